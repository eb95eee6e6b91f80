//! `AdmissionReview` of `admission.k8s.io/v1`: the request that the API server sends, and the response to it.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use vitivirt_install::validation::Refusal;

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct IncomingReview {
    api_version: String,
    kind: String,
    request: Option<AdmissionRequest>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AdmissionRequest {
    pub(super) uid: String,
    pub(super) operation: String,
    pub(super) resource: GroupResource,
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default)]
    pub(super) object: Value,
    #[serde(default)]
    pub(super) old_object: Value,
}

#[derive(Debug, Deserialize)]
pub(super) struct GroupResource {
    pub(super) group: String,
    pub(super) resource: String,
}

/// Parses the body of a request. The error is a message for the client.
pub(super) fn parse_review(body: &[u8]) -> Result<AdmissionRequest, String> {
    let review: IncomingReview =
        serde_json::from_slice(body).map_err(|error| format!("request body is not an {KIND} in JSON: {error}"))?;
    if review.kind != KIND || review.api_version != API_VERSION {
        let (kind, version) = (review.kind, review.api_version);
        return Err(format!("request body must be an {KIND} of {API_VERSION}: found kind {kind:?} of {version:?}"));
    }
    review.request.ok_or_else(|| format!("{KIND} has no request"))
}

/// The decision on a request. The request is allowed if there are no refusals.
#[derive(Debug, Default)]
pub(super) struct AdmissionDecision {
    /// The HTTP status that the API server returns to its client if the request is denied.
    pub(super) code: u16,
    pub(super) refusals: Vec<Refusal>,
    pub(super) warnings: Vec<String>,
}

impl AdmissionDecision {
    /// The body of the HTTP response.
    pub(super) fn to_json(&self, uid: &str) -> Result<Vec<u8>, serde_json::Error> {
        let review = OutgoingReview { api_version: API_VERSION, kind: KIND, response: self.response(uid) };
        serde_json::to_vec(&review)
    }

    fn response<'a>(&'a self, uid: &'a str) -> AdmissionResponse<'a> {
        let causes: Vec<StatusCause<'_>> = self.refusals.iter().map(StatusCause::new).collect();
        let message = || self.refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let reason = match self.code {
            403 => "Forbidden",
            422 => "Invalid",
            503 => "ServiceUnavailable",
            _ => "BadRequest",
        };
        let status = (!causes.is_empty()).then(|| DenialStatus {
            code: self.code,
            reason,
            message: message(),
            details: StatusDetails { causes },
        });
        AdmissionResponse { uid, allowed: status.is_none(), status, warnings: &self.warnings }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OutgoingReview<'a> {
    api_version: &'a str,
    kind: &'a str,
    response: AdmissionResponse<'a>,
}

#[derive(Serialize)]
struct AdmissionResponse<'a> {
    uid: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<DenialStatus<'a>>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    warnings: &'a [String],
}

#[derive(Serialize)]
struct DenialStatus<'a> {
    code: u16,
    reason: &'static str,
    message: String,
    details: StatusDetails<'a>,
}

#[derive(Serialize)]
struct StatusDetails<'a> {
    causes: Vec<StatusCause<'a>>,
}

#[derive(Serialize)]
struct StatusCause<'a> {
    reason: &'static str,
    message: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    field: &'a str,
}

impl<'a> StatusCause<'a> {
    fn new(refusal: &'a Refusal) -> Self {
        Self { reason: refusal.cause.as_str(), message: refusal.to_string(), field: &refusal.field }
    }
}
