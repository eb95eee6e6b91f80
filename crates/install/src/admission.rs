//! The validation of requests that create or change a KubeVirt resource.
//!
//! It rejects the same requests as upstream virt-operator. It accepts a change that does not touch the specification
//! and any change of a resource that is being deleted: both are needed to remove a finalizer, and a resource that was
//! created before the webhook existed must stay deletable.

use vitivirt_api::{
    ObjectKey,
    kubevirt::{KubeVirt, KubeVirtSpec},
};

use crate::{
    validation::{self, DryRun, Refusal},
    warnings::warnings,
};

/// The result of validating a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValidationResult {
    pub refusals: Vec<Refusal>,
    pub warnings: Vec<String>,
    /// The API server checks these; each that it rejects is one more refusal.
    pub dry_runs: Vec<DryRun>,
}

/// `existing` lists the KubeVirt resources of the cluster.
pub fn validate_create(new: &KubeVirt, existing: &[ObjectKey]) -> ValidationResult {
    let mut result = validate(&KubeVirt::default(), new);
    result.refusals.splice(0..0, existing.first().map(validation::already_exists));
    result
}

pub fn validate_update(old: &KubeVirt, new: &KubeVirt) -> ValidationResult {
    if old.spec == new.spec || new.metadata.deletion_timestamp.is_some() {
        return ValidationResult::default();
    }
    validate(old, new)
}

fn validate(old: &KubeVirt, new: &KubeVirt) -> ValidationResult {
    let refusals = validation::refusals(&old.spec, &new.spec);
    // An error that the old resource already had may be accepted. It is a warning then, unless it is a refusal too.
    let refused: Vec<String> = refusals.iter().map(ToString::to_string).collect();
    let standing = validation::errors(&KubeVirtSpec::default(), &new.spec).iter().map(ToString::to_string).collect();
    let warnings = [standing, warnings(new, None)].concat();
    ValidationResult {
        warnings: warnings.into_iter().filter(|warning| !refused.contains(warning)).collect(),
        refusals,
        dry_runs: validation::dry_runs(old, new),
    }
}
