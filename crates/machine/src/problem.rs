//! Why a Machine cannot become what it says, in words that tell what to do.

/// Something that only a change by somebody else can end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// One of `vitivirt_api::machine::machine_reason`.
    pub reason: &'static str,
    /// What is wrong and what to do, in one sentence.
    pub message: String,
    pub kind: ProblemKind,
    /// The NetworkConfigurations that are at fault, whether they exist or not.
    pub networks: Vec<String>,
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

/// What a user wrote may be quoted, and may be of any length.
const MESSAGE_LIMIT: usize = 1024;

impl Problem {
    fn new(reason: &'static str, message: &str, kind: ProblemKind) -> Self {
        Problem {
            reason,
            message: vitivirt_api::text::truncate(message, MESSAGE_LIMIT).into_owned(),
            kind,
            networks: Vec::new(),
        }
    }

    /// These are at fault.
    pub(crate) fn of_networks<'a>(self, names: impl IntoIterator<Item = &'a str>) -> Self {
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
