//! Which live objects are known to match the desired state, so that `plan` does not compare them again. virt-operator
//! keeps the result between reconciles.

use std::collections::HashMap;

use vitivirt_api::{ObjectKey, Plan, Target, Write};

use crate::{
    api_readiness::accepts_instancetypes,
    desired::{Desired, MatchingObject, UpToDate},
    drift::{Drift, drift},
    kind::Kind,
    live::LiveObject,
    object::InstallationObject,
    observed::{CrdCheck, Observed},
    order::Lane,
    record::{ContentRecord, Recorded},
    rollout::canary::keep_live_limit,
    superseded::announcement,
    trust::{StoredTrust, keep_live_trust},
};

/// What the API server stored for the writes of one reconcile.
pub type StoredObjects = HashMap<(Kind, ObjectKey), LiveObject>;

/// The objects that match the desired state after a reconcile of one lane: those that matched before, and those that the API server
/// stored for its writes. The API server may normalize a value that the operator wrote. The stored object counts as a
/// match then too; otherwise the operator would patch it in every reconcile. `None`: there is no installation, or its lane
/// was not compared.
pub fn up_to_date_after(
    observed: &Observed,
    desired: &Desired,
    plan: &Plan,
    stored_objects: &StoredObjects,
    lane: Lane,
) -> Option<UpToDate> {
    let (installation, up_to_date) = desired.compared()?;
    // What matches the release that runs does not match the one that replaces it.
    if matches!(desired, Desired::StrategyPending { .. }) {
        return None;
    }
    // Roles keep rules for pods of another version, and lose them when these pods are gone.
    let has_other_pods = observed.pods.has_other_version(&installation.config.kube_virt_version);
    // Their plan is empty, because they cannot be written yet.
    if lane == Lane::Instancetypes && !accepts_instancetypes(observed, installation) {
        return None;
    }
    // The plan compares nothing before the status has the version of this operator.
    if announcement(observed).is_some() {
        return None;
    }
    // The plan compares nothing as long as a stored version would be lost.
    if lane == Lane::Components && observed.crd_checks.values().any(CrdCheck::depends_on_status) {
        return None;
    }
    let trust = StoredTrust::new(observed);
    let mut up_to_date = UpToDate::clone(up_to_date);
    let writes = plan.steps.iter().flat_map(|step| &step.writes);
    let writes: HashMap<&Target, &Write> = writes.map(|write| (write.target(), write)).collect();
    for object in installation.objects.iter().filter(|object| object.stage.lane() == lane) {
        let key = (object.kind, object.key.clone());
        let is_role = matches!(object.kind, Kind::Role | Kind::ClusterRole);
        let matching = match writes.get(&object.target()) {
            _ if is_role && has_other_pods => None,
            Some(write) => {
                let stored = stored_objects.get(&key);
                stored.filter(|stored| stored_matches(object, &trust, write, stored))
            }
            None => {
                let live = observed.objects.get(object.kind, &object.key).map(|live| &**live);
                // An object whose repair is delayed was not compared in this reconcile.
                let is_delayed = observed.repairs.are_exhausted(object.kind, &object.key, observed.now);
                let is_known =
                    |live: &&LiveObject| up_to_date.get(&key).is_some_and(|known| known.digest == live.digest);
                live.filter(|live| !is_delayed || is_known(live))
            }
        };
        match matching {
            Some(live) if up_to_date.get(&key).is_some_and(|known| known.digest == live.digest) => {}
            Some(live) => {
                // An object that cannot be read is compared again.
                let record = ContentRecord::new(object, live).unwrap_or_default();
                up_to_date.insert(key, MatchingObject { digest: live.digest, record });
            }
            None => drop(up_to_date.remove(&key)),
        }
    }
    Some(up_to_date)
}

/// Whether a stored object matches the desired one, except for values that the API server normalized, and contains
/// nothing that another client wrote at the same time.
fn stored_matches(object: &InstallationObject, trust: &StoredTrust, write: &Write, stored: &LiveObject) -> bool {
    let Write::Patch { operations, .. } = write else { return true };
    let Ok(desired) = object.body(trust) else { return false };
    let mut desired = desired.into_json();
    let content = stored.content().unwrap_or_default();
    keep_live_trust(object.kind, &mut desired, &content);
    if object.kind == Kind::DaemonSet {
        keep_live_limit(&mut desired, &content);
    }
    match drift(object.kind, &desired, stored, Recorded::Never) {
        Ok(Drift::None) => true,
        Ok(Drift::Patch(left)) => {
            left.iter().all(|left| operations.iter().any(|operation| operation.path == left.path))
        }
        Ok(Drift::Recreate) | Err(_) => false,
    }
}
