//! Responses of the proxy itself, in the form of the API server: clients decide by `reason`, `code` and
//! `retryAfterSeconds`, so a response without these fields would not test the real error handling.

use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use serde_json::json;

use super::{
    forward::ForwardedBody,
    request::{RequestInfo, RequestVerb},
};

/// A `Status` object with status `Failure`.
pub(super) fn failure(code: StatusCode, info: &RequestInfo, retry_after: Option<u64>) -> Response<ForwardedBody> {
    let message = format!(
        "fault injected by the lab: {} for {:?} {} {:?}",
        code.canonical_reason().unwrap_or("failure"),
        info.verb,
        info.resource,
        info.name
    );
    write(code, info, retry_after, &message)
}

/// The proxy does not relay upgraded connections, because nothing in the lab uses them.
pub(super) fn no_upgrades(info: &RequestInfo) -> Response<ForwardedBody> {
    let message = "the lab's fault proxy does not support upgraded connections (exec, attach, port-forward, console); \
                   connect to the API server directly";
    write(StatusCode::NOT_IMPLEMENTED, info, None, message)
}

fn write(code: StatusCode, info: &RequestInfo, retry_after: Option<u64>, message: &str) -> Response<ForwardedBody> {
    let mut details = json!({ "name": info.name, "group": info.group, "kind": info.resource });
    if let (Some(seconds), Some(details)) = (retry_after, details.as_object_mut()) {
        details.insert("retryAfterSeconds".to_owned(), json!(seconds));
    }
    let status = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason(code, info.verb),
        "details": details,
        "code": code.as_u16(),
    });
    let body = Full::new(Bytes::from(status.to_string())).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

fn reason(code: StatusCode, verb: RequestVerb) -> &'static str {
    match (code.as_u16(), verb) {
        (400, _) => "BadRequest",
        (401, _) => "Unauthorized",
        (403, _) => "Forbidden",
        (404, _) => "NotFound",
        (405, _) => "MethodNotAllowed",
        (409, RequestVerb::Create) => "AlreadyExists",
        (409, _) => "Conflict",
        (410, _) => "Expired",
        (413, _) => "RequestEntityTooLarge",
        (422, _) => "Invalid",
        (429, _) => "TooManyRequests",
        (500, _) => "InternalError",
        (503, _) => "ServiceUnavailable",
        (504, _) => "Timeout",
        _ => "",
    }
}
