//! Errors, in five classes that decide what happens next.
//!
//! The class decides how the controller retries. The reason is what users read and what metrics count. Reasons are
//! constants, so that neither a name nor a server's message can become a metric label.

use std::{error::Error, fmt, time::Duration};

/// How the controller reacts to a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorClass {
    /// Expected to disappear without a change: retry with a jittered backoff.
    Transient,
    /// The object changed after it was observed: reconcile again.
    Conflict,
    /// The request was refused: report it in a condition and wait for a change. The rule that refused it may change
    /// without a watch event, so the operator also retries, slowly.
    Invalid,
    /// A permission is missing: report the verb and the resource, and retry slowly.
    Forbidden,
    /// A bug of the operator: log it, count it, retry with a backoff.
    Bug,
}

impl ErrorClass {
    pub const ALL: [Self; 5] = [Self::Transient, Self::Conflict, Self::Invalid, Self::Forbidden, Self::Bug];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Transient => "Transient",
            Self::Conflict => "Conflict",
            Self::Invalid => "Invalid",
            Self::Forbidden => "Forbidden",
            Self::Bug => "Bug",
        }
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reasons that the runtime uses. The operators define their own next to the conditions that show them.
pub mod reason {
    pub const API_NOT_INSTALLED: &str = "ApiNotInstalled";
    pub const API_SERVER_ERROR: &str = "ApiServerError";
    pub const API_SERVER_UNREACHABLE: &str = "ApiServerUnreachable";
    pub const API_UNAVAILABLE: &str = "ApiUnavailable";
    pub const ADMISSION_REFUSED: &str = "AdmissionRefused";
    pub const BAD_REQUEST: &str = "BadRequest";
    pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
    pub const INVALID_OBJECT: &str = "InvalidObject";
    pub const NAME_TAKEN: &str = "NameTaken";
    pub const NAMESPACE_MISSING: &str = "NamespaceMissing";
    pub const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";
    pub const NOT_LEADING: &str = "NotLeading";
    pub const OBJECT_CHANGED: &str = "ObjectChanged";
    pub const OBJECT_GONE: &str = "ObjectGone";
    pub const PANIC: &str = "Panic";
    pub const RECONCILE_DEADLINE_EXCEEDED: &str = "ReconcileDeadlineExceeded";
    pub const PERMISSION_MISSING: &str = "PermissionMissing";
    pub const QUOTA_EXCEEDED: &str = "QuotaExceeded";
    pub const TOO_MANY_OBJECTS: &str = "TooManyObjects";
    pub const TOO_MANY_REQUESTS: &str = "TooManyRequests";
    pub const UNAUTHORIZED: &str = "Unauthorized";
    pub const UNREADABLE_ANSWER: &str = "UnreadableAnswer";
    pub const WEBHOOK_UNREACHABLE: &str = "WebhookUnreachable";
}

/// How long a server that cannot be reached counts as one that is starting. A pod is ready before its endpoints are in
/// place everywhere, and a new CRD exists before it is served.
pub const STARTING: Duration = Duration::from_secs(30);

/// An error with its class, its constant reason and one sentence for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub class: ErrorClass,
    pub reason: &'static str,
    pub message: String,
    /// The minimum delay that the server asked for.
    pub retry_after: Option<Duration>,
    /// The time since the first attempt that failed for the same cause. Zero for the first one.
    pub failing_for: Duration,
}

impl Failure {
    pub fn new(class: ErrorClass, reason: &'static str, message: impl Into<String>) -> Self {
        Self { class, reason, message: message.into(), retry_after: None, failing_for: Duration::ZERO }
    }

    pub fn transient(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Transient, reason, message)
    }

    pub fn conflict(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Conflict, reason, message)
    }

    pub fn invalid(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Invalid, reason, message)
    }

    pub fn forbidden(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Forbidden, reason, message)
    }

    pub fn bug(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Bug, reason, message)
    }

    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// A server that the request needs could not be reached: the API server, a webhook, or the server of the API. The
    /// request itself was not checked.
    pub fn is_unreachable(&self) -> bool {
        [
            reason::API_NOT_INSTALLED,
            reason::API_SERVER_UNREACHABLE,
            reason::API_UNAVAILABLE,
            reason::WEBHOOK_UNREACHABLE,
        ]
        .contains(&self.reason)
    }

    /// The API server has too much to do, or could not process the request. The request itself was not refused.
    fn is_overload(&self) -> bool {
        [reason::API_SERVER_ERROR, reason::DEADLINE_EXCEEDED, reason::TOO_MANY_REQUESTS].contains(&self.reason)
    }

    /// The failure says nothing about the request, and such a failure usually ends without a change.
    pub fn is_passing(&self) -> bool {
        self.is_unreachable() || self.is_overload()
    }

    /// The failure has lasted for a short time only and may end without a change, so it is progress and not an error.
    pub fn may_end_soon(&self) -> bool {
        self.is_passing() && self.failing_for < STARTING
    }

    /// The server that could not be reached may be starting. Then the failure is retried within a second.
    pub fn is_not_reachable_yet(&self) -> bool {
        self.is_unreachable() && self.failing_for < STARTING
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}

impl Error for Failure {}
