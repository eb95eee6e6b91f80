//! Whether the operator installs anything for a KubeVirt resource. A cluster has one installation, in the namespace of
//! its operator.

use crate::observed::Observed;

pub fn is_eligible(observed: &Observed) -> bool {
    ineligible_message(observed).is_none()
}

/// Why the operator installs nothing for this resource. `None` if it does.
pub(crate) fn ineligible_message(observed: &Observed) -> Option<String> {
    let namespace = observed.kubevirt.metadata.namespace.as_deref().unwrap_or_default();
    if let Some(first) = &observed.first_kubevirt {
        return Some(format!(
            "There is an active KubeVirt deployment: KubeVirt {first} is older, and a cluster can have only one \
             installation; delete this KubeVirt resource or the other one"
        ));
    }
    (namespace != observed.operator_namespace).then(|| {
        format!(
            "KubeVirt can only be installed in the namespace of its operator; create this KubeVirt resource in {} instead",
            observed.operator_namespace
        )
    })
}
