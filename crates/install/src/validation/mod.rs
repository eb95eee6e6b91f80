//! What may not be said in a KubeVirt resource, and when it may not be made or removed.
//!
//! The same is refused as by the release, in words that name the field and say what to do. A change that leaves the
//! specification alone is never refused, and neither is one of a resource that is being deleted: both are needed to
//! take a finalizer off, and a resource that was made before anybody checked it must stay removable.
//!
//! Nothing is asked here. What only the API server can judge leaves as a `Trial`, which the caller has it judge.

mod certificates;
mod components;
mod configuration;
mod images;
mod placement;
mod removal;
#[cfg(test)]
mod tests;

use std::fmt;

use api::{ObjectKey, kubevirt::KubeVirt};

pub use placement::{Template, Trial};
pub use removal::{Remaining, delete, is_guarded};

use crate::advice;

/// Why a value is refused, in the words of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Invalid,
    NotSupported,
    Forbidden,
}

impl Cause {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "FieldValueInvalid",
            Self::NotSupported => "FieldValueNotSupported",
            Self::Forbidden => "FieldValueForbidden",
        }
    }
}

/// Something that is refused, where, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub cause: Cause,
    /// Empty if it is about the resource as a whole.
    pub field: String,
    pub message: String,
}

impl Refusal {
    pub fn new(cause: Cause, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { cause, field: field.into(), message: message.into() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.field.as_str() {
            "" => f.write_str(&self.message),
            field => write!(f, "{field} {}", self.message),
        }
    }
}

/// What is said about a resource that somebody wants to write.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    pub refusals: Vec<Refusal>,
    pub warnings: Vec<String>,
    /// To be judged by the API server; each that it finds invalid is one more refusal.
    pub trials: Vec<Trial>,
}

/// `existing` are the KubeVirt resources of the cluster, as far as they were looked for.
pub fn create(new: &KubeVirt, existing: &[ObjectKey]) -> Verdict {
    let mut verdict = judge(&KubeVirt::default(), new);
    verdict.refusals.splice(0..0, existing.first().map(removal::one_is_enough));
    verdict
}

pub fn update(old: &KubeVirt, new: &KubeVirt) -> Verdict {
    if old.spec == new.spec || new.metadata.deletion_timestamp.is_some() {
        return Verdict::default();
    }
    judge(old, new)
}

fn judge(old: &KubeVirt, new: &KubeVirt) -> Verdict {
    let refusals = [
        components::patches(&new.spec.customize_components),
        components::replicas(new.spec.infra.as_ref()),
        certificates::lifetimes(new.spec.self_signed()),
        images::images(&old.spec, &new.spec),
        configuration::refusals(&old.spec.configuration, &new.spec.configuration),
    ];
    Verdict {
        refusals: refusals.into_iter().flatten().collect(),
        warnings: advice::warnings(new),
        trials: placement::trials(old, new),
    }
}
