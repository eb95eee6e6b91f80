//! Pods that do not start, and what the KubeVirt resource says about them.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use vitivirt_lab::{
    CRASH_MESSAGE, Lab, LabOptions, NodeTaints, PodFate, PodRule, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::support::{
    NAMESPACE, TIMEOUT, condition, event_exists, kubevirts, operator_requests, program, wait_until_available,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; conditions_name_why_pods_do_not_start);
}

/// One test with many steps, because every step needs an installation.
async fn conditions_name_why_pods_do_not_start(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    set_fate(&lab, Some(PodFate::ImageMissing));
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    let kubevirt = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
        "spec": {},
    });
    kubevirts(&lab).create(&PostParams::default(), &serde_json::from_value(kubevirt)?).await?;
    wait_until_named(&lab, &["virt-handler: image ", "cannot be pulled", "not found", "on node node-", "1 more pod"])
        .await?;
    event_exists(&lab, "PodsFail").await?;
    crashes_are_named_without_counting_restarts(&lab).await?;
    set_fate(&lab, Some(PodFate::InitCrashes));
    wait_until_named(&lab, &["virt-handler: init container virt-launcher exits with code 1", CRASH_MESSAGE]).await?;
    set_fate(&lab, None);
    wait_until_available(&lab).await.context("after the pods started")?;
    for taints in [NodeTaints::Missing, NodeTaints::Set] {
        let named = a_dead_node_is_named_and_not_awaited(&lab, taints).await;
        named.with_context(|| format!("a dead node, taints: {taints:?}"))?;
    }
    a_pod_that_cannot_be_scheduled_is_named(&lab).await?;
    lab.stop().await
}

fn set_fate(lab: &Lab, fate: Option<PodFate>) {
    let rule = |fate| PodRule { image_contains: "virt-handler".to_owned(), fate };
    lab.set_pods(|pods| pods.rules = fate.map(rule).into_iter().collect());
}

/// Waits until the message of the condition Progressing contains all of these.
async fn wait_until_named(lab: &Lab, expected: &[&str]) -> Result<()> {
    let what = format!("condition Progressing contains {expected:?}");
    lab.wait(&what, TIMEOUT, kubevirts(lab), "kubevirt", |kubevirt| {
        let progressing = kubevirt.and_then(|kubevirt| condition(kubevirt, "Progressing"));
        progressing.is_some_and(|(status, _, message)| {
            status == "True" && expected.iter().all(|expected| message.contains(expected))
        })
    })
    .await?;
    Ok(())
}

async fn crashes_are_named_without_counting_restarts(lab: &Lab) -> Result<()> {
    set_fate(lab, Some(PodFate::Crashes));
    let expected = ["virt-handler: container virt-handler exits with code 1", CRASH_MESSAGE, "on node", "1 more pod"];
    wait_until_named(lab, &expected).await?;
    let before = kubevirts(lab).get("kubevirt").await?.resource_version();
    let restarts = || async {
        let pods = handlers(lab).await?;
        let statuses = pods.iter().filter_map(|pod| pod.status.as_ref()?.container_statuses.as_ref()?.first());
        Ok::<_, anyhow::Error>(statuses.map(|status| status.restart_count).min().unwrap_or_default())
    };
    let (start, deadline) = (restarts().await?, tokio::time::Instant::now() + TIMEOUT);
    while restarts().await? < start + 3 {
        ensure!(tokio::time::Instant::now() < deadline, "the pods do not crash again");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    let after = kubevirts(lab).get("kubevirt").await?.resource_version();
    ensure!(after == before, "the status was written, although only the number of restarts changed");
    Ok(())
}

pub(crate) async fn handlers(lab: &Lab) -> Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    Ok(pods.list(&ListParams::default().labels("kubevirt.io=virt-handler")).await?.items)
}

async fn a_dead_node_is_named_and_not_awaited(lab: &Lab, taints: NodeTaints) -> Result<()> {
    let node_reads = || {
        let requests = operator_requests(lab)?;
        Ok::<_, anyhow::Error>(
            requests.iter().filter(|record| record.resource == "nodes" && record.verb == "get").count(),
        )
    };
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let on_node = pods.list(&ListParams::default().fields("spec.nodeName=node-2")).await?.items.len();
    let before = node_reads()?;
    lab.kill_node("node-2", taints).await?;
    let is_named = |named: bool| {
        move |kubevirt: Option<&kube::api::DynamicObject>| {
            let available = kubevirt.and_then(|kubevirt| condition(kubevirt, "Available"));
            available.is_some_and(|(status, _, message)| {
                status == "True" && message.contains("Node node-2 is not ready") == named
            })
        }
    };
    lab.wait("the dead node is named", TIMEOUT, kubevirts(lab), "kubevirt", is_named(true)).await?;
    event_exists(lab, "NodeNotReady").await?;
    let reads = node_reads()? - before;
    // Each of the pods becomes not ready, and the taints change the status of the DaemonSet.
    ensure!((1..=on_node + 1).contains(&reads), "the operator read nodes {reads} times for {on_node} pods");
    lab.revive_node("node-2").await?;
    lab.wait("the node is no longer named", TIMEOUT, kubevirts(lab), "kubevirt", is_named(false)).await?;
    Ok(())
}

async fn a_pod_that_cannot_be_scheduled_is_named(lab: &Lab) -> Result<()> {
    let placement = json!({"spec": {"infra": {"nodePlacement": {"nodeSelector": {"example.com/none": "true"}}}}});
    kubevirts(lab).patch("kubevirt", &PatchParams::default(), &Patch::Merge(&placement)).await?;
    wait_until_named(lab, &["virt-api: cannot be scheduled: 0/2 nodes are available", "node affinity/selector"]).await
}
