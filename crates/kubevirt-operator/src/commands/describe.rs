//! One Machine as the tree of the status page, read from the cluster with the permissions of a user.

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt, api::ListParams};
use vitivirt_api::{
    machine::Machine,
    view::{StepState, TreeStep},
};
use vitivirt_machine::{
    Observed,
    view::{PodView, adoptable_items, machine_tree},
};

use super::cluster::ClusterReader;
use crate::launcher::{CREATED_BY, waiting_container};

pub struct Description {
    pub tree: TreeStep,
    /// The items of the annotation `vitistack.io/adopt` that a user may add.
    pub adoptable: Vec<String>,
}

/// Objects that the user is not allowed to read have an unknown state.
pub async fn describe(client: Client, machine: Machine) -> Result<Description> {
    let reader = ClusterReader::new(client.clone());
    let observed = reader.objects(machine).await?;
    let pods = pods(&client, &observed).await;
    let mut tree = machine_tree(&observed, pods.as_deref());
    for (kind, name) in reader.unreadable() {
        tree.set_state(&kind, &name, StepState::Unknown, "you are not allowed to read it");
    }
    let adoptable = adoptable_items(&observed);
    Ok(Description { tree, adoptable })
}

/// The pods of the guest. `None` if they cannot be read.
async fn pods(client: &Client, observed: &Observed) -> Option<Vec<PodView>> {
    let vmi = observed.vmi.as_ref()?;
    let api: Api<Pod> = Api::namespaced(client.clone(), observed.namespace());
    let of_vmi = ListParams::default().labels(&format!("{CREATED_BY}={}", vmi.uid));
    let pods = api.list(&of_vmi).await.ok()?;
    Some(pods.items.iter().map(pod_view).collect())
}

fn pod_view(pod: &Pod) -> PodView {
    let status = pod.status.clone().unwrap_or_default();
    let condition = |type_: &str| status.conditions.iter().flatten().find(|condition| condition.type_ == type_);
    let unscheduled = condition("PodScheduled").filter(|condition| condition.status == "False");
    let waiting = waiting_container(pod).map(|problem| format!("{}: {}", problem.reason, problem.message));
    PodView {
        name: pod.name_any(),
        phase: status.phase.clone().unwrap_or_default(),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        ready: condition("Ready").is_some_and(|condition| condition.status == "True"),
        problem: waiting.or_else(|| unscheduled.and_then(|condition| condition.message.clone())),
    }
}
