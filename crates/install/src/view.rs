//! What people see of an installation: its workloads as steps, and the objects that other clients changed. The status
//! page of virt-operator shows it.

use vitivirt_api::{
    Plan, Target, Write,
    view::{StepState, TreeStep},
};

use crate::{desired::Desired, kind::Kind, live::LiveObject, observed::Objects, observed::Observed, pods::Pods};

/// The Deployments and DaemonSets that a KubeVirt operator manages, each with what it waits for.
pub fn workloads(objects: &Objects, pods: &Pods) -> Vec<TreeStep> {
    let of_kind = |kind: Kind| objects.managed(kind).map(move |(key, live)| workload(kind, key.name(), live, pods));
    [Kind::Deployment, Kind::DaemonSet].into_iter().flat_map(of_kind).collect()
}

fn workload(kind: Kind, name: &str, live: &LiveObject, pods: &Pods) -> TreeStep {
    let rollout = live.rollout.unwrap_or_default();
    let (state, summary) = match pods.incomplete_rollout(kind, name, rollout) {
        _ if live.deleting => (StepState::Waiting, "is being deleted".to_owned()),
        None => (StepState::Ok, "ready".to_owned()),
        Some(problems) if problems.certain => (StepState::Failed, problems.text()),
        Some(problems) => (StepState::Waiting, problems.text()),
    };
    TreeStep::new(kind.name(), name, state, summary)
        .fact("ready", format!("{} of {}", rollout.ready, rollout.pods))
        .fact("updated", format!("{} of {}", rollout.updated, rollout.pods))
}

/// An object that matched the desired state until another client changed or deleted it, and that a plan repairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriftedObject {
    pub target: Target,
    /// Its other clients, as `managedFields` name them. Empty if the object was deleted, or if no other client has set a
    /// field.
    pub managers: Vec<String>,
    pub deleted: bool,
}

pub fn drifted_objects(observed: &Observed, desired: &Desired, plan: &Plan) -> Vec<DriftedObject> {
    let Some((_, up_to_date)) = desired.compared() else { return Vec::new() };
    let drifted = |write: &Write| {
        let target = write.target();
        let key = (Kind::from_name(&target.resource.kind)?, target.key.clone());
        let matching = up_to_date.get(&key)?;
        let live = observed.objects.get(key.0, &key.1);
        // The operator itself changes an object that still is as it was, for example when a certificate is renewed.
        live.is_none_or(|live| live.digest != matching.digest).then_some(())?;
        let managers = live.and_then(|live| live.fields().ok()?).map(|fields| fields.managers).unwrap_or_default();
        Some(DriftedObject { target: target.clone(), managers, deleted: live.is_none() })
    };
    plan.steps.iter().flat_map(|step| &step.writes).filter_map(drifted).collect()
}
