//! The finalizer that protects a NetworkConfiguration while Machines use it.
//!
//! A Machine adds the finalizer to its networks before its VM is created, and removes it when the last Machine of a
//! network is deleted. A Machine can also leave a network in other ways: by an edit, or because a user removed the
//! Machine's finalizer. Therefore the NetworkConfigurations have their own reconcile, which decides only by the
//! Machines that refer to the network now. It keeps no state, so it is correct after any crash.

use serde_json::json;
use vitivirt_api::{
    Body, ObjectKey, Plan, Step, Target, Write,
    machine::{FINALIZER_NETWORK, NetworkConfiguration},
    remove_finalizer,
};

/// Everything that a reconcile of a NetworkConfiguration decides on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedNetwork {
    pub key: ObjectKey,
    pub uid: String,
    /// The index of the operator's finalizer in the network's list.
    pub finalizer_index: Option<usize>,
    /// A Machine refers to it, even if that Machine is being deleted.
    pub used: bool,
}

pub(crate) mod step {
    pub(crate) const RELEASE: &str = "release of an unused network";
}

pub fn plan(observed: &ObservedNetwork) -> Plan {
    let Some(index) = observed.finalizer_index.filter(|_| !observed.used) else { return Plan::default() };
    Plan { steps: vec![Step::new(step::RELEASE).write(release(&observed.key, &observed.uid, index))] }
}

pub(crate) fn protect(key: &ObjectKey, uid: &str) -> Write {
    let body = Body::from(json!({"metadata": {"finalizers": [FINALIZER_NETWORK]}}));
    Write::Apply { target: Target::of_kind::<NetworkConfiguration>(key.clone()), uid: uid.to_owned(), body }
}

pub(crate) fn release(key: &ObjectKey, uid: &str, index: usize) -> Write {
    remove_finalizer(Target::of_kind::<NetworkConfiguration>(key.clone()), uid, FINALIZER_NETWORK, index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unused_network_with_our_finalizer_is_released() {
        for (finalizer_index, used) in [(Some(1), true), (Some(1), false), (None, true), (None, false)] {
            let key = ObjectKey::namespaced("shop", "prod");
            let plan = plan(&ObservedNetwork { key: key.clone(), uid: "u".to_owned(), finalizer_index, used });
            let writes: Vec<Write> = plan.steps.into_iter().flat_map(|step| step.writes).collect();
            let expected = if finalizer_index.is_some() && !used { vec![release(&key, "u", 1)] } else { Vec::new() };
            assert_eq!(writes, expected, "finalizer: {finalizer_index:?}, used: {used}");
        }
    }
}
