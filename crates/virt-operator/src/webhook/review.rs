//! The question that the API server asks and the form of the answer: `AdmissionReview` of `admission.k8s.io/v1`.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use vitivirt_install::validation::Refusal;

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Question {
    api_version: String,
    kind: String,
    request: Option<Request>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Request {
    pub(super) uid: String,
    pub(super) operation: String,
    pub(super) resource: Resource,
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
pub(super) struct Resource {
    pub(super) group: String,
    pub(super) resource: String,
}

/// The question, or a sentence about what is wrong with it.
pub(super) fn read(body: &[u8]) -> Result<Request, String> {
    let question: Question =
        serde_json::from_slice(body).map_err(|error| format!("the body is not an {KIND} in JSON: {error}"))?;
    if question.kind != KIND || question.api_version != API_VERSION {
        let (kind, version) = (question.kind, question.api_version);
        return Err(format!("the body must be an {KIND} of {API_VERSION}, and it is {kind:?} of {version:?}"));
    }
    question.request.ok_or_else(|| format!("the {KIND} has no request"))
}

/// What the API server is told.
#[derive(Debug, Default)]
pub(super) struct Decision {
    /// Of the answer that whoever asked gets from the API server, if something is refused.
    pub(super) code: u16,
    pub(super) refusals: Vec<Refusal>,
    pub(super) warnings: Vec<String>,
}

impl Decision {
    pub(super) fn write(&self, uid: &str) -> Vec<u8> {
        let answer = Answer { api_version: API_VERSION, kind: KIND, response: self.response(uid) };
        serde_json::to_vec(&answer).unwrap_or_default()
    }

    fn response<'a>(&'a self, uid: &'a str) -> Response<'a> {
        let causes: Vec<Cause<'_>> = self.refusals.iter().map(Cause::new).collect();
        let message = || self.refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let reason = match self.code {
            403 => "Forbidden",
            422 => "Invalid",
            503 => "ServiceUnavailable",
            _ => "BadRequest",
        };
        let status = (!causes.is_empty()).then(|| Status {
            code: self.code,
            reason,
            message: message(),
            details: Details { causes },
        });
        Response { uid, allowed: status.is_none(), status, warnings: &self.warnings }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    api_version: &'a str,
    kind: &'a str,
    response: Response<'a>,
}

#[derive(Serialize)]
struct Response<'a> {
    uid: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status<'a>>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    warnings: &'a [String],
}

#[derive(Serialize)]
struct Status<'a> {
    code: u16,
    reason: &'static str,
    message: String,
    details: Details<'a>,
}

#[derive(Serialize)]
struct Details<'a> {
    causes: Vec<Cause<'a>>,
}

#[derive(Serialize)]
struct Cause<'a> {
    reason: &'static str,
    message: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    field: &'a str,
}

impl<'a> Cause<'a> {
    fn new(refusal: &'a Refusal) -> Self {
        Self { reason: refusal.cause.as_str(), message: refusal.to_string(), field: &refusal.field }
    }
}
