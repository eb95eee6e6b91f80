//! The rules for the specification of a KubeVirt resource and for its deletion. Messages name the field and the remedy.
//!
//! The validating webhook is part of the installation, so it does not check the first KubeVirt resource. A rule that
//! the webhook enforces is therefore one of two kinds. An error cannot be installed: the operator installs nothing, and
//! the conditions say why. A questionable setting is installed by upstream virt-operator nevertheless, and so by this
//! operator, with a warning.
//!
//! These functions make no requests. What only the API server can check is returned as a [`DryRun`].

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
    Failure,
    kubevirt::{KubeVirt, KubeVirtSpec},
};

pub(crate) use placement::dry_runs;
pub use placement::{DryRun, DryRunObject};
pub(crate) use removal::already_exists;
pub use removal::{Remaining, delete, describe, is_guarded, protects_workloads};

/// Reason of a failure: the resource asks for something that cannot be installed.
pub(crate) const INVALID_RESOURCE: &str = "InvalidResource";

/// The cause of a refusal, as the Kubernetes API names it.
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

/// A rejected value, its field and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub cause: Cause,
    /// Empty if the refusal is about the whole resource.
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
            field => write!(f, "{field}: {}", self.message),
        }
    }
}

/// Whether this resource can be installed, regardless of what was installed before. The message contains every error.
pub(crate) fn check_installable(kubevirt: &KubeVirt) -> Result<(), Failure> {
    let mut errors = errors(&KubeVirtSpec::default(), &kubevirt.spec);
    if !is_deployed(kubevirt) {
        errors.extend(certificates::invalid_renewals(kubevirt.spec.self_signed()));
    }
    if errors.is_empty() {
        return Ok(());
    }
    let messages: Vec<String> = errors.iter().map(ToString::to_string).collect();
    Err(Failure::invalid(INVALID_RESOURCE, messages.join("; ")))
}

/// Settings that are installed, although the webhook would reject a change to them.
pub(crate) fn questionable(kubevirt: &KubeVirt) -> Vec<Refusal> {
    let spec = &kubevirt.spec;
    let mut refusals = questionable_changes(&KubeVirtSpec::default(), spec);
    refusals.extend(certificates::hasty_renewals(spec.self_signed()));
    if is_deployed(kubevirt) {
        refusals.extend(certificates::invalid_renewals(spec.self_signed()));
    }
    refusals
}

/// A KubeVirt operator has installed the resource, perhaps by other rules. It has certificates, and it runs as long as
/// they are renewed, however often. A questionable lifetime does not block it.
fn is_deployed(kubevirt: &KubeVirt) -> bool {
    kubevirt.status.as_ref().is_some_and(|status| !status.observed_deployment_id.is_empty())
}

/// Everything that the webhook rejects in a change of the specification.
pub(crate) fn refusals(old: &KubeVirtSpec, new: &KubeVirtSpec) -> Vec<Refusal> {
    let renewals = certificates::invalid_renewals(new.self_signed());
    [errors(old, new), renewals, questionable_changes(old, new)].concat()
}

/// Changes that cannot be installed.
pub(crate) fn errors(old: &KubeVirtSpec, new: &KubeVirtSpec) -> Vec<Refusal> {
    let errors = [
        components::patches(&new.customize_components),
        components::replicas(new.infra.as_ref()),
        certificates::invalid_lifetimes(new.self_signed()),
        images::images(old, new),
    ];
    errors.concat()
}

fn questionable_changes(old: &KubeVirtSpec, new: &KubeVirtSpec) -> Vec<Refusal> {
    let settings = new.self_signed();
    let certificates =
        [certificates::mixes_old_and_new_fields(settings), certificates::certificate_outlives_ca(settings)];
    let mut refusals: Vec<Refusal> = certificates.into_iter().flatten().collect();
    refusals.extend(configuration::refusals(&old.configuration, &new.configuration));
    refusals
}
