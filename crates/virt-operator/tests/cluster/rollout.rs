//! How a change of virt-handler reaches the nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{
    api::{apps::v1::DaemonSet, core::v1::Pod},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use vitivirt_lab::{
    CRASH_MESSAGE, Lab, LabOptions, NodeTaints, PodFate, PodRule, VIRT_OPERATOR_USER, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::{
    pods::handlers,
    support::{
        NAMESPACE, TIMEOUT, condition, create_kubevirt, event_exists, kubevirts, program, replace_operator,
        wait_until_available,
    },
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; a_template_of_virt_handler_that_does_not_work_reaches_one_node);
}

const NODES: u8 = 12;
const DEAD: &str = "node-5";
const NEXT: &str = "example.org/virt-handler:next";
const LATER: &str = "example.org/virt-handler:later";

/// One test with many steps, because every step needs an installation.
async fn a_template_of_virt_handler_that_does_not_work_reaches_one_node(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { nodes: NODES, ..LabOptions::default() }).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    let before = uids(&lab).await?;
    a_crash_stops_the_rollout(&lab, &before).await.context("a crash")?;
    edit(&lab, &json!({})).await?;
    wait_until_available(&lab).await.context("after the change was taken back")?;
    let kept = uids(&lab).await?;
    ensure!(kept.intersection(&before).count() == usize::from(NODES) - 1, "more than one pod was replaced");
    ensure!(max_unavailable(&lab).await? == Some(IntOrString::Int(1)), "the limit of a new installation is not back");
    a_template_that_works_reaches_a_tenth_of_the_nodes_at_a_time(&lab).await.context("a template that works")?;
    for (image, taints) in [(NEXT, NodeTaints::Missing), (LATER, NodeTaints::Set)] {
        let rolled_out = a_dead_node_is_not_awaited_and_updated_when_it_returns(&lab, image, taints).await;
        rolled_out.with_context(|| format!("a dead node, taints: {taints:?}"))?;
    }
    lab.stop().await
}

async fn edit(lab: &Lab, spec: &Value) -> Result<()> {
    let patch = serde_json::from_value(json!([{"op": "replace", "path": "/spec", "value": spec}]))?;
    kubevirts(lab).patch("kubevirt", &PatchParams::default(), &Patch::<()>::Json(patch)).await?;
    Ok(())
}

/// A KubeVirt resource with another image of virt-handler.
fn with_image(image: &str) -> Value {
    let patch = json!({"spec": {"template": {"spec": {"containers": [{"name": "virt-handler", "image": image}]}}}});
    json!({"customizeComponents": {"patches": [
        {"resourceType": "DaemonSet", "resourceName": "virt-handler", "type": "strategic", "patch": patch.to_string()},
    ]}})
}

fn image(pod: &Pod) -> &str {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.filter_map(|container| container.image.as_deref()).next().unwrap_or_default()
}

async fn uids(lab: &Lab) -> Result<BTreeSet<String>> {
    Ok(handlers(lab).await?.iter().filter_map(ResourceExt::uid).collect())
}

async fn with_this_image(lab: &Lab, wanted: &str) -> Result<usize> {
    Ok(handlers(lab).await?.iter().filter(|pod| image(pod) == wanted).count())
}

async fn max_unavailable(lab: &Lab) -> Result<Option<IntOrString>> {
    let daemon_sets: Api<DaemonSet> = Api::namespaced(lab.client(), NAMESPACE);
    let strategy = daemon_sets.get("virt-handler").await?.spec.and_then(|spec| spec.update_strategy);
    Ok(strategy.and_then(|strategy| strategy.rolling_update?.max_unavailable))
}

async fn a_crash_stops_the_rollout(lab: &Lab, before: &BTreeSet<String>) -> Result<()> {
    const BROKEN: &str = "example.org/virt-handler:broken";
    lab.set_pods(|pods| {
        pods.rules = vec![PodRule { image_contains: BROKEN.to_owned(), fate: PodFate::Crashes }];
    });
    edit(lab, &with_image(BROKEN)).await?;
    let expected = ["virt-handler exits with code 1", CRASH_MESSAGE, "on node node-", "the rollout stops here"];
    lab.wait("the crash is named", TIMEOUT, kubevirts(lab), "kubevirt", |kubevirt| {
        let progressing = kubevirt.and_then(|kubevirt| condition(kubevirt, "Progressing"));
        progressing.is_some_and(|(_, _, message)| expected.iter().all(|expected| message.contains(expected)))
    })
    .await?;
    event_exists(lab, "FailedUpdate").await?;
    // A new leader continues from what is in the cluster.
    replace_operator(lab).await?;
    // In this time nothing may happen.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let broken = with_this_image(lab, BROKEN).await?;
    ensure!(broken == 1, "{broken} nodes have the broken pod");
    ensure!(uids(lab).await?.intersection(before).count() == usize::from(NODES) - 1, "other pods were replaced");
    Ok(())
}

async fn a_template_that_works_reaches_a_tenth_of_the_nodes_at_a_time(lab: &Lab) -> Result<()> {
    const WORKS: &str = "example.org/virt-handler:works";
    let writes = || {
        let records = lab.audit()?;
        let writes = records
            .iter()
            .filter(|record| record.is_write() && record.resource == "daemonsets" && record.user == VIRT_OPERATOR_USER);
        Ok::<_, anyhow::Error>(writes.count())
    };
    let before = writes()?;
    edit(lab, &with_image(WORKS)).await?;
    wait_until_available(lab).await?;
    ensure!(with_this_image(lab, WORKS).await? == usize::from(NODES));
    ensure!(max_unavailable(lab).await? == Some(IntOrString::Int(1)));
    // The template, a tenth, and back to one.
    let written = writes()? - before;
    ensure!(written == 3, "the DaemonSet was written {written} times");
    Ok(())
}

async fn a_dead_node_is_not_awaited_and_updated_when_it_returns(
    lab: &Lab,
    next: &str,
    taints: NodeTaints,
) -> Result<()> {
    lab.kill_node(DEAD, taints).await?;
    let counted = usize::from(NODES) - usize::from(taints == NodeTaints::Set);
    let daemon_sets: Api<DaemonSet> = Api::namespaced(lab.client(), NAMESPACE);
    lab.wait("the DaemonSet counts the nodes", TIMEOUT, daemon_sets, "virt-handler", |daemon_set| {
        let status = daemon_set.and_then(|daemon_set| daemon_set.status.as_ref());
        status.is_some_and(|status| usize::try_from(status.desired_number_scheduled) == Ok(counted))
    })
    .await?;
    edit(lab, &with_image(next)).await?;
    wait_until_available(lab).await?;
    let kubevirt = kubevirts(lab).get("kubevirt").await?;
    let (_, _, message) = condition(&kubevirt, "Available").context("no condition Available")?;
    ensure!(message.contains(&format!("Node {DEAD} is not ready")), "{message}");
    ensure!(with_this_image(lab, next).await? == usize::from(NODES) - 1, "a node that is ready was not updated");
    lab.revive_node(DEAD).await?;
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let images: BTreeMap<String, bool> =
            handlers(lab).await?.iter().map(|pod| (pod.name_any(), image(pod) == next)).collect();
        if images.len() == usize::from(NODES) && images.values().all(|is_next| *is_next) {
            return Ok(());
        }
        ensure!(tokio::time::Instant::now() < deadline, "the node that returned was not updated: {images:?}");
        // The name of the new pod is not known, so this polls the list.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
