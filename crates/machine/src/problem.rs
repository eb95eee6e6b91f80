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
    pub part: Part,
    /// The NetworkConfigurations that cause it, whether they exist or not.
    pub networks: Vec<String>,
}

/// The part of a Machine that a problem stops. The operator continues with the other parts of a Machine that has a VM.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Everything.
    Machine,
    /// The disk of this name.
    Disk(String),
    /// All networks, because the boot order connects them.
    Networks,
    CloudInit,
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
        Problem {
            reason,
            message: truncate(message, MESSAGE_LIMIT).into_owned(),
            kind,
            part: Part::Machine,
            networks: Vec::new(),
        }
    }

    /// The same problem with the remedy at its end.
    pub(crate) fn with_remedy(self, remedy: &str) -> Self {
        let message = truncate(&format!("{}; {remedy}", self.message), MESSAGE_LIMIT).into_owned();
        Problem { message, ..self }
    }

    pub(crate) fn of(self, part: Part) -> Self {
        Problem { part, ..self }
    }

    pub(crate) fn of_disk(self, name: &str) -> Self {
        self.of(Part::Disk(name.to_owned()))
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
