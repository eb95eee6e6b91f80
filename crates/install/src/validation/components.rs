//! Customization of components: valid patches and at least one replica.

use vitivirt_api::kubevirt::{ComponentConfig, CustomizeComponents};

use super::{Cause, Refusal};
use crate::customize;

/// Only the syntax of patches. Whether a patch applies to its object shows when it is applied.
pub(super) fn patches(asked: &CustomizeComponents) -> Vec<Refusal> {
    let refusal = |(index, problem)| {
        let field = format!("spec.customizeComponents.patches[{index}]");
        Refusal::new(Cause::NotSupported, field, problem)
    };
    customize::syntax_errors(asked).map(refusal).collect()
}

/// KubeVirt's type for replicas is one byte.
pub(super) fn replicas(infra: Option<&ComponentConfig>) -> Vec<Refusal> {
    let refusal = |message: String| Refusal::new(Cause::Invalid, "spec.infra.replicas", message);
    let message = match infra.and_then(|infra| infra.replicas) {
        // Clients search the message for the words of upstream virt-operator.
        Some(0) => {
            "invalid value 0: infra replica count can't be 0; must be at least 1, because KubeVirt needs its control \
             plane; remove the field to use the default"
                .to_owned()
        }
        Some(number) if !(1..=255).contains(&number) => format!("invalid value {number}: must be from 1 to 255"),
        _ => return Vec::new(),
    };
    vec![refusal(message)]
}
