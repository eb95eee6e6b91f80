//! What the status records about the objects of an installation: their generations and digests, and their namespaces.

use vitivirt_api::{
    Plan, Target, Write,
    kubevirt::{Generation, KubeVirtStatus},
};

use crate::{
    desired::UpToDate,
    installation::Installation,
    kind::Kind,
    observed::Observed,
    order::Lane,
    record::{ContentRecord, is_recorded},
};

/// The generations and digests of the objects that match the desired state. The next reconcile records the objects that
/// this one wrote.
pub(super) fn generations(
    observed: &Observed,
    installation: &Installation,
    up_to_date: &UpToDate,
    plan: &Plan,
) -> Vec<Generation> {
    let written: Vec<&Target> = plan.steps.iter().flat_map(|step| &step.writes).map(Write::target).collect();
    let mut generations: Vec<Generation> = installation
        .objects
        .iter()
        .filter_map(|object| {
            if !is_recorded(object.kind) {
                return None;
            }
            let live = observed.objects.get(object.kind, &object.key)?;
            let target = object.target();
            let group = match object.kind {
                Kind::CustomResourceDefinition => "apiextensions.k8s.io/v1",
                // Upstream virt-operator records PodDisruptionBudgets under this group too.
                Kind::PodDisruptionBudget => "apps",
                _ => &target.resource.group,
            };
            let known = up_to_date.get(&(object.kind, object.key.clone()));
            let known = known.filter(|known| known.digest == live.digest).map(|known| known.record);
            // This plan has compared neither the objects of other lanes nor those whose repair is delayed.
            let is_compared = object.stage.lane() == Lane::Components
                && !observed.repairs.are_exhausted(object.kind, &object.key, observed.now);
            if written.contains(&&target) || known.is_none() && !is_compared {
                return observed.recorded_generation(object.kind, &object.key).cloned();
            }
            // A live object that cannot be read has stopped the plan before.
            let record = known.unwrap_or_else(|| ContentRecord::new(object, live).unwrap_or_default())?;
            Some(Generation {
                group: group.to_owned(),
                resource: target.resource.plural.clone(),
                namespace: object.key.namespace().unwrap_or_default().to_owned(),
                name: object.key.name().to_owned(),
                last_generation: live.generation,
                hash: record.to_string(),
            })
        })
        .collect();
    sort_generations(&mut generations);
    generations
}

/// Until an installation is complete, the status names every object that it and the ones before it may have in other
/// namespaces. An edit may replace an installation at any time, and `orphans` finds its objects by their namespaces.
pub(super) fn record_namespaces(status: &mut KubeVirtStatus, before: &KubeVirtStatus, installation: &Installation) {
    let own = ["", "kube-system", installation.config.namespace.as_str()];
    let objects = installation.objects.iter().map(|object| {
        let resource = object.kind.resource();
        Generation {
            group: resource.group,
            resource: resource.plural,
            namespace: object.key.namespace().unwrap_or_default().to_owned(),
            name: object.key.name().to_owned(),
            last_generation: 0,
            hash: String::new(),
        }
    });
    for object in before.generations.iter().cloned().chain(objects) {
        let is_same = |recorded: &Generation| {
            let identity = |of: &Generation| (of.resource.clone(), of.namespace.clone(), of.name.clone());
            identity(recorded) == identity(&object)
        };
        if !own.contains(&object.namespace.as_str()) && !status.generations.iter().any(is_same) {
            status.generations.push(object);
        }
    }
    sort_generations(&mut status.generations);
}

fn sort_generations(generations: &mut [Generation]) {
    generations.sort_by(|a, b| (&a.resource, &a.namespace, &a.name).cmp(&(&b.resource, &b.namespace, &b.name)));
}
