//! What may not be said in a KubeVirt resource, and when it may not be made or removed.
//!
//! The same is refused as by the release, in words that name the field and say what to do. A change that leaves the
//! specification alone is never refused, and neither is one of a resource that is being deleted: both are needed to
//! take a finalizer off, and a resource that was made before anybody checked it must stay removable.
//!
//! The webhook that refuses is a part of the installation, so nobody has checked the first resource when it is
//! installed. Of what it would have been refused for, a fault is something that nobody can install soundly: then nothing
//! is installed, and the resource says why. A doubt is something that the release installs all the same: then so do we,
//! with a warning.
//!
//! Nothing is asked here. What only the API server can judge leaves as a `DryRun`, which the caller has it judge.

mod certificates;
mod components;
mod configuration;
mod images;
mod placement;
mod removal;
#[cfg(test)]
mod tests;

use std::fmt;

use vitivirt_api::{
    Failure, ObjectKey,
    kubevirt::{KubeVirt, KubeVirtSpec},
};

pub use placement::{DryRun, Template};
pub use removal::{Remaining, delete, is_guarded};

use crate::warnings;

/// Reason of a failure: the resource asks for something that cannot be installed soundly.
pub const INVALID_RESOURCE: &str = "InvalidResource";

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
    pub dry_runs: Vec<DryRun>,
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

/// Whether this resource can be installed soundly, whatever was installed before. Every fault is in the message.
pub fn sound(kubevirt: &KubeVirt) -> Result<(), Failure> {
    let mut faults = faults(&KubeVirtSpec::default(), &kubevirt.spec);
    faults.extend(
        certificates::early_renewal(kubevirt.spec.self_signed()).into_iter().filter(|_| !is_deployed(kubevirt)),
    );
    if faults.is_empty() {
        return Ok(());
    }
    let told: Vec<String> = faults.iter().map(ToString::to_string).collect();
    Err(Failure::invalid(INVALID_RESOURCE, told.join("; ")))
}

/// What is installed as it is, although whoever changed the resource to this would be refused.
pub(crate) fn doubts(kubevirt: &KubeVirt) -> Vec<Refusal> {
    let spec = &kubevirt.spec;
    let mut all = doubts_since(&KubeVirtSpec::default(), spec);
    all.extend(certificates::early_renewal(spec.self_signed()).into_iter().filter(|_| is_deployed(kubevirt)));
    all
}

/// Somebody has installed it, perhaps by other rules. It has certificates, and while they are renewed, too often or not,
/// it runs: it is not held up for the sake of a number.
fn is_deployed(kubevirt: &KubeVirt) -> bool {
    kubevirt.status.as_ref().is_some_and(|status| !status.observed_deployment_id.is_empty())
}

fn judge(old: &KubeVirt, new: &KubeVirt) -> Verdict {
    let (old_spec, new_spec) = (&old.spec, &new.spec);
    let early = certificates::early_renewal(new_spec.self_signed());
    let refusals = [faults(old_spec, new_spec), early, doubts_since(old_spec, new_spec)].concat();
    // What was there before may be let through without being right: it is told, but not twice.
    let refused: Vec<String> = refusals.iter().map(ToString::to_string).collect();
    let standing = faults(&KubeVirtSpec::default(), new_spec).iter().map(ToString::to_string).collect();
    let warnings = [standing, warnings(new)].concat();
    Verdict {
        warnings: warnings.into_iter().filter(|warning| !refused.contains(warning)).collect(),
        refusals,
        dry_runs: placement::dry_runs(old, new),
    }
}

fn faults(old: &KubeVirtSpec, new: &KubeVirtSpec) -> Vec<Refusal> {
    let all = [
        components::patches(&new.customize_components),
        components::replicas(new.infra.as_ref()),
        certificates::unusable(new.self_signed()),
        images::images(old, new),
    ];
    all.concat()
}

fn doubts_since(old: &KubeVirtSpec, new: &KubeVirtSpec) -> Vec<Refusal> {
    let certificates = [certificates::mixed(new.self_signed()), certificates::outlives(new.self_signed())];
    let mut all: Vec<Refusal> = certificates.into_iter().flatten().collect();
    all.extend(configuration::refusals(&old.configuration, &new.configuration));
    all
}
