//! Changes to components: patches that can be read, and at least one replica.

use api::kubevirt::{ComponentConfig, CustomizeComponents};

use super::{Cause, Refusal};
use crate::customize;

/// Whether a patch fits its object is seen when it is applied; here it must be a patch.
pub(super) fn patches(asked: &CustomizeComponents) -> Vec<Refusal> {
    let refusal = |(index, problem)| {
        let field = format!("spec.customizeComponents.patches[{index}]");
        Refusal::new(Cause::NotSupported, field, problem)
    };
    customize::problems(asked).map(refusal).collect()
}

pub(super) fn replicas(infra: Option<&ComponentConfig>) -> Vec<Refusal> {
    let none = infra.and_then(|infra| infra.replicas) == Some(0);
    let refusal = || {
        let message = "cannot be 0, because KubeVirt does not work without its control plane; \
                       set it to 1 or more, or leave it out for the usual number";
        Refusal::new(Cause::Invalid, "spec.infra.replicas", message)
    };
    none.then(refusal).into_iter().collect()
}
