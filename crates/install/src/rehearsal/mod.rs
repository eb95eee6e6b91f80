//! A rehearsal: everything that a change of a KubeVirt resource would do until it is complete, and what would stop it.
//! The command `plan` shows it. Nothing here is used by a reconcile.
//!
//! A plan contains the writes that can be sent now. [`complete_plan`] adds those that follow when the pods of the previous
//! version are gone, and instancetypes, which are written when virt-api is ready.

mod nodes;
mod permissions;
#[cfg(test)]
mod tests;
mod vms;

use vitivirt_api::{
    Failure, Plan, Target, Write,
    kubevirt::{KubeVirt, KubeVirtStatus},
};

pub use self::{
    nodes::node_problems,
    permissions::{Access, RbacObjects, missing_permissions},
    vms::{Budget, Launchers, OutdatedVm, Vmi, VmiEffect, outdated_vms},
};
use crate::{
    RELEASE,
    desired::Desired,
    installation::Installation,
    kind::Kind,
    observed::{Objects, Observed},
    order::Lane,
    plan::{differing_instancetypes, plan},
    rollout::canary::RolloutNodes,
};

/// The writes of all lanes except `Certificates`, in their order, until the installation is complete.
pub fn complete_plan(observed: &mut Observed, desired: &Desired) -> Result<Plan, Failure> {
    // As if the status had the version of this operator, without which nothing is planned.
    let announced = |status: &mut Option<KubeVirtStatus>| {
        if let Some(status) = status {
            RELEASE.clone_into(&mut status.operator_version);
        }
    };
    with_status(observed, announced, |observed| plan_of_lanes(observed, desired))
}

fn plan_of_lanes(observed: &mut Observed, desired: &Desired) -> Result<Plan, Failure> {
    let mut complete = plan(observed, desired, Lane::Components)?;
    // As if the status recorded the namespaces of the resource.
    let recorded = |status: &mut Option<KubeVirtStatus>| {
        if let Some(config) = desired.config() {
            status.get_or_insert_default().target_deployment_config = config.json();
        }
    };
    let monitoring = with_status(observed, recorded, |observed| plan(observed, desired, Lane::Monitoring));
    complete.steps.extend(monitoring?.steps);
    complete.steps.extend(differing_instancetypes(observed, desired)?);
    let Some(config) = desired.installation().map(|installation| &installation.config) else { return Ok(complete) };
    // As if no pod of the previous version were left.
    let replaced = |status: &mut Option<KubeVirtStatus>| {
        if let Some(status) = status {
            status.observed_kube_virt_version.clone_from(&config.kube_virt_version);
        }
    };
    let later = with_status(observed, replaced, |observed| plan(observed, desired, Lane::Components));
    let known: Vec<Target> = writes(&complete).map(|write| write.target().clone()).collect();
    for mut step in later?.steps {
        step.writes.retain(|write| !known.contains(write.target()));
        step.wait = None;
        if !step.writes.is_empty() {
            complete.steps.push(step);
        }
    }
    Ok(complete)
}

/// Plans with another status of the KubeVirt resource.
fn with_status(
    observed: &mut Observed,
    change: impl FnOnce(&mut Option<KubeVirtStatus>),
    plan: impl FnOnce(&mut Observed) -> Result<Plan, Failure>,
) -> Result<Plan, Failure> {
    let before = observed.kubevirt.status.clone();
    change(&mut observed.kubevirt.status);
    let planned = plan(observed);
    observed.kubevirt.status = before;
    planned
}

fn writes(plan: &Plan) -> impl Iterator<Item = &Write> {
    plan.steps.iter().flat_map(|step| &step.writes)
}

/// The version that was complete last, if there was one.
pub fn installed_version(kubevirt: &KubeVirt) -> Option<&str> {
    let version = kubevirt.status.as_ref()?.observed_kube_virt_version.as_str();
    (!version.is_empty()).then_some(version)
}

/// The number of objects of an installation that exist and that the plan does not write.
pub fn unchanged_objects(observed: &Observed, installation: &Installation, plan: &Plan) -> usize {
    let written: Vec<&Target> = writes(plan).map(Write::target).collect();
    let is_unchanged = |kind: Kind, objects: &Objects, target: &Target| {
        objects.get(kind, &target.key).is_some() && !written.contains(&target)
    };
    let objects = installation.objects.iter();
    objects.filter(|object| is_unchanged(object.kind, &observed.objects, &object.target())).count()
}

/// The pods of a workload that a rollout replaces, and in which batches.
#[derive(Debug, PartialEq, Eq)]
pub struct Restart {
    pub pods: Vec<String>,
    /// The numbers of nodes whose pods are replaced at the same time. Empty for a Deployment.
    pub batches: Vec<usize>,
}

/// `None` if the target is not a workload.
pub fn restart(observed: &Observed, target: &Target) -> Option<Restart> {
    let kind = Kind::from_name(&target.resource.kind)?;
    if !matches!(kind, Kind::Deployment | Kind::DaemonSet) {
        return None;
    }
    let name = target.key.name();
    let pods = observed.pods.of(kind, name).filter(|(_, pod)| !pod.ended && pod.deleted.is_none());
    let mut pods: Vec<String> = pods.map(|(key, _)| key.name().to_owned()).collect();
    pods.sort_unstable();
    let mut batches = Vec::new();
    if kind == Kind::DaemonSet {
        let rollout = observed.objects.get(kind, &target.key).and_then(|live| live.rollout).unwrap_or_default();
        batches = RolloutNodes::batches(&observed.pods, name, rollout);
    }
    Some(Restart { pods, batches })
}
