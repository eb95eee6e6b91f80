//! When a NetworkConfiguration may go. A Machine protects the networks that it names before its VM is made, and lets
//! them go when it is deleted; but it may leave them in other ways: by an edit, or because somebody took its finalizer
//! away and it is simply gone. So whether a network is still in use is asked of the network as well, by nothing but who
//! names it now. It is right after any crash, because nothing is remembered.

use api::machine::{FINALIZER_NETWORK, NetworkConfiguration};
use api::{Body, ObjectKey, Plan, Step, Target, Write};
use serde_json::json;

/// Everything that a pass over a NetworkConfiguration decides on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedNetwork {
    pub key: ObjectKey,
    pub uid: String,
    /// Its finalizers include ours.
    pub protected: bool,
    /// A Machine names it, be it one that is going.
    pub used: bool,
}

pub(crate) mod step {
    pub(crate) const RELEASE: &str = "release of a network that nobody uses";
}

pub fn plan(observed: &ObservedNetwork) -> Plan {
    let step = Step::new(step::RELEASE);
    if !observed.protected || observed.used {
        return Plan::default();
    }
    Plan { steps: vec![step.write(release(&observed.key, &observed.uid))] }
}

pub(crate) fn protect(key: &ObjectKey, uid: &str) -> Write {
    apply(key, uid, json!({"metadata": {"finalizers": [FINALIZER_NETWORK]}}))
}

/// What we applied was only the finalizer; applying nothing takes it back.
pub(crate) fn release(key: &ObjectKey, uid: &str) -> Write {
    apply(key, uid, json!({"metadata": {}}))
}

fn apply(key: &ObjectKey, uid: &str, body: serde_json::Value) -> Write {
    let target = Target::of::<NetworkConfiguration>(key.clone());
    Write::Apply { target, uid: uid.to_owned(), body: Body::from(body) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_protected_for_nobody_is_released() {
        for (protected, used) in [(true, true), (true, false), (false, true), (false, false)] {
            let key = ObjectKey::namespaced("shop", "prod");
            let plan = plan(&ObservedNetwork { key: key.clone(), uid: "u".to_owned(), protected, used });
            let writes: Vec<Write> = plan.steps.into_iter().flat_map(|step| step.writes).collect();
            let expected = if protected && !used { vec![release(&key, "u")] } else { Vec::new() };
            assert_eq!(writes, expected, "protected: {protected}, used: {used}");
        }
    }
}
