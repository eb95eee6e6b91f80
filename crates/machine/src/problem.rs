//! Why a Machine cannot be created as its spec describes it, and what to do about it.

use vitivirt_api::text::truncate;

/// An obstacle that only a change by a user or an administrator removes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// One of `vitivirt_api::machine::machine_reason`.
    pub reason: &'static str,
    /// Cause and remedy, in one sentence.
    pub message: String,
    pub kind: ProblemKind,
    /// The NetworkConfigurations that cause it, whether they exist or not.
    pub networks: Vec<String>,
}

/// Decides the phase of the Machine while the problem lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// The Machine itself is wrong.
    Failed,
    /// An object that the Machine refers to is missing.
    Pending,
    /// A component of the cluster is missing.
    Creating,
}

/// Messages quote text of users, which can have any length.
const MESSAGE_LIMIT: usize = 1024;

impl Problem {
    fn new(reason: &'static str, message: &str, kind: ProblemKind) -> Self {
        Problem { reason, message: truncate(message, MESSAGE_LIMIT).into_owned(), kind, networks: Vec::new() }
    }

    pub(crate) fn caused_by_networks<'a>(self, names: impl IntoIterator<Item = &'a str>) -> Self {
        Problem { networks: names.into_iter().map(str::to_owned).collect(), ..self }
    }

    pub(crate) fn failed(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(reason, &message.into(), ProblemKind::Failed)
    }

    pub(crate) fn creating(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(reason, &message.into(), ProblemKind::Creating)
    }

    pub(crate) fn pending(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(reason, &message.into(), ProblemKind::Pending)
    }
}
