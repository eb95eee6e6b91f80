//! Why a Machine cannot become what it says, in words that tell what to do.

/// Something that only a change by somebody else can end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// One of `api::machine::machine_reason`.
    pub reason: &'static str,
    /// What is wrong and what to do, in one sentence.
    pub message: String,
    pub kind: ProblemKind,
}

/// What the Machine's phase says meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// The Machine itself is wrong.
    Failed,
    /// Something that it refers to is missing.
    Pending,
    /// Something of the cluster is missing.
    Creating,
}

impl Problem {
    pub(crate) fn failed(reason: &'static str, message: impl Into<String>) -> Self {
        Problem { reason, message: message.into(), kind: ProblemKind::Failed }
    }

    pub(crate) fn creating(reason: &'static str, message: impl Into<String>) -> Self {
        Problem { reason, message: message.into(), kind: ProblemKind::Creating }
    }

    pub(crate) fn pending(reason: &'static str, message: impl Into<String>) -> Self {
        Problem { reason, message: message.into(), kind: ProblemKind::Pending }
    }
}
