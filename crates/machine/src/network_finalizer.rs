//! When a NetworkConfiguration may go. A Machine protects the networks that it names before its VM is made, and lets
//! them go when it is deleted; but it may leave them in other ways: by an edit, or because somebody took its finalizer
//! away and it is simply gone. So whether a network is still in use is asked of the network as well, by nothing but who
//! names it now. It is right after any crash, because nothing is remembered.

use serde_json::json;
use vitivirt_api::machine::{FINALIZER_NETWORK, NetworkConfiguration};
use vitivirt_api::{Body, ObjectKey, Plan, Step, Target, Write, remove_finalizer};

/// Everything that a pass over a NetworkConfiguration decides on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedNetwork {
    pub key: ObjectKey,
    pub uid: String,
    /// Where our finalizer stands among its own.
    pub protected: Option<usize>,
    /// A Machine names it, be it one that is going.
    pub used: bool,
}

pub(crate) mod step {
    pub(crate) const RELEASE: &str = "release of a network that nobody uses";
}

pub fn plan(observed: &ObservedNetwork) -> Plan {
    let Some(place) = observed.protected.filter(|_| !observed.used) else { return Plan::default() };
    Plan { steps: vec![Step::new(step::RELEASE).write(release(&observed.key, &observed.uid, place))] }
}

pub(crate) fn protect(key: &ObjectKey, uid: &str) -> Write {
    let body = Body::from(json!({"metadata": {"finalizers": [FINALIZER_NETWORK]}}));
    Write::Apply { target: Target::of::<NetworkConfiguration>(key.clone()), uid: uid.to_owned(), body }
}

pub(crate) fn release(key: &ObjectKey, uid: &str, place: usize) -> Write {
    remove_finalizer(Target::of::<NetworkConfiguration>(key.clone()), uid, FINALIZER_NETWORK, place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_protected_for_nobody_is_released() {
        for (protected, used) in [(Some(1), true), (Some(1), false), (None, true), (None, false)] {
            let key = ObjectKey::namespaced("shop", "prod");
            let plan = plan(&ObservedNetwork { key: key.clone(), uid: "u".to_owned(), protected, used });
            let writes: Vec<Write> = plan.steps.into_iter().flat_map(|step| step.writes).collect();
            let expected = if protected.is_some() && !used { vec![release(&key, "u", 1)] } else { Vec::new() };
            assert_eq!(writes, expected, "protected: {protected:?}, used: {used}");
        }
    }
}
