//! Changes to components: patches that can be read, and at least one replica.

use vitivirt_api::kubevirt::{ComponentConfig, CustomizeComponents};

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

/// The release counts them in one byte.
pub(super) fn replicas(infra: Option<&ComponentConfig>) -> Vec<Refusal> {
    let refusal = |message: String| Refusal::new(Cause::Invalid, "spec.infra.replicas", message);
    let problem = match infra.and_then(|infra| infra.replicas) {
        Some(0) => "cannot be 0, because KubeVirt does not work without its control plane; \
                    set it to 1 or more, or leave it out for the usual number"
            .to_owned(),
        Some(number) if !(1..=255).contains(&number) => format!("must be a number from 1 to 255, and {number} is not"),
        _ => return Vec::new(),
    };
    vec![refusal(problem)]
}
