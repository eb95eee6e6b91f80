//! Why something failed, in the five classes that decide what happens next.
//!
//! A class says what the controller does; a reason says what the user reads and what a metric counts. Reasons are
//! constants, so neither a name nor a message of a server can ever become a metric label.

use std::{error::Error, fmt, time::Duration};

/// What the controller does about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorClass {
    /// Time heals it: try again with a jittered backoff.
    Transient,
    /// The world moved while we looked: observe again.
    Conflict,
    /// What was asked for cannot be: say so in a condition and wait for a change. What refused it may change without
    /// waking anybody, so it is tried again all the same, seldom.
    Invalid,
    /// A permission is missing: say which verb on which resource, and try again seldom.
    Forbidden,
    /// Our own mistake: log it, count it, back off.
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

/// Reasons that the runtime itself gives. The operators add their own beside the conditions that show them.
pub mod reason {
    pub const API_NOT_INSTALLED: &str = "ApiNotInstalled";
    pub const API_SERVER_ERROR: &str = "ApiServerError";
    pub const API_SERVER_UNREACHABLE: &str = "ApiServerUnreachable";
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
    pub const TOO_MANY_REQUESTS: &str = "TooManyRequests";
    pub const UNAUTHORIZED: &str = "Unauthorized";
    pub const UNREADABLE_ANSWER: &str = "UnreadableAnswer";
    pub const WEBHOOK_UNREACHABLE: &str = "WebhookUnreachable";
}

/// A failure with its class, its stable reason and one sentence for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub class: ErrorClass,
    pub reason: &'static str,
    pub message: String,
    /// The least time that the server asked us to wait.
    pub retry_after: Option<Duration>,
}

impl Failure {
    pub fn new(class: ErrorClass, reason: &'static str, message: impl Into<String>) -> Self {
        Self { class, reason, message: message.into(), retry_after: None }
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
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}

impl Error for Failure {}
