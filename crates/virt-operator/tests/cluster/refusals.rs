//! The refusals of the webhooks: words that clients of upstream virt-operator search for, also under a flood of connections.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use vitivirt_lab::{
    Lab,
    harness::{SharedLabs, Suite},
};

use crate::support::{NAMESPACE, kubevirt, kubevirts, program, wait_until_available};

/// More than the webhook server accepts, and more than its backlog.
const FLOOD: usize = 1_500;
const WEBHOOK_PORT: u16 = 8444;

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        refusals_contain_the_words_of_upstream_virt_operator,
        a_flood_of_connections_does_not_close_the_webhooks,
    );
}

async fn refusals_contain_the_words_of_upstream_virt_operator(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.ours(&program()).await?;
    wait_until_available(&lab).await?;
    a_second_resource_is_refused(&lab).await?;
    let api = kubevirts(&lab);
    let toleration = json!([{"key": "a", "operator": "foo", "value": "b"}]);
    let placement = |component: &str| json!({component: {"nodePlacement": {"tolerations": toleration}}});
    let refused: [(Value, &str); 3] = [
        (json!({"infra": {"replicas": 0}}), "infra replica count can't be 0"),
        (placement("infra"), "spec.infra.nodePlacement.tolerations.operator in body should be one of"),
        (placement("workloads"), "spec.workloads.nodePlacement.tolerations.operator in body should be one of"),
    ];
    for (spec, words) in refused {
        let patch = Patch::Merge(json!({"spec": spec}));
        match api.patch("kubevirt", &PatchParams::default(), &patch).await {
            Ok(_) => bail!("{spec} was accepted"),
            Err(error) => ensure!(error.to_string().contains(words), "{words:?} is not in {error}"),
        }
    }
    Ok(())
}

async fn a_second_resource_is_refused(lab: &Lab) -> Result<()> {
    let mut second = kubevirt(&json!({}));
    second["metadata"]["name"] = json!("second");
    match kubevirts(lab).create(&PostParams::default(), &serde_json::from_value(second)?).await {
        Ok(_) => bail!("a second KubeVirt resource was created"),
        Err(error) => ensure!(error.to_string().contains("Kubevirt is already created"), "{error}"),
    }
    Ok(())
}

/// A pod of a tenant opens connections to the webhooks and sends nothing.
async fn a_flood_of_connections_does_not_close_the_webhooks(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.ours(&program()).await?;
    wait_until_available(&lab).await?;
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let operators = pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?.items;
    ensure!(!operators.is_empty(), "virt-operator has no pod");
    let mut flood = Vec::new();
    for pod in &operators {
        let address = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).context("no address")?;
        for _ in 0..FLOOD {
            flood.push(TcpStream::connect((address, WEBHOOK_PORT)).await.context("opening a connection")?);
        }
    }
    // The API server gives a webhook ten seconds.
    for _ in 0..5 {
        let answer = tokio::time::timeout(Duration::from_secs(5), a_second_resource_is_refused(&lab)).await;
        answer.context("the webhook does not respond")??;
    }
    let restarts = |pod: &Pod| {
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        statuses.map(|status| status.restart_count).sum::<i32>()
    };
    let now = pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?.items;
    ensure!(now.iter().map(restarts).eq(operators.iter().map(restarts)), "the kubelet restarted virt-operator");
    drop(flood);
    Ok(())
}
