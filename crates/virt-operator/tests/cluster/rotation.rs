//! Certificates over time: CAs and leaves are replaced while an API server hears of changes late and the kubelet needs
//! time to update mounted Secrets. No call fails. Lifetimes and delays are scaled down alike.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use serde_json::json;
use vitivirt_lab::{
    ApiServerLag, DelayRange, Lab, LabOptions, LagScope, PodBehaviour, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::{
    support::{NAMESPACE, TIMEOUT, create_kubevirt, program, wait_until_available},
    webhook_client::WebhookClient,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; five_rotations_fail_no_call);
}

const ROTATIONS: usize = 5;

async fn five_rotations_fail_no_call(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions {
        pods: PodBehaviour { volumes_updated_after: DelayRange::millis(1_500, 2_500), ..PodBehaviour::default() },
        second_api_server: Some(ApiServerLag { delay: Duration::from_secs(1), scope: LagScope::CalledServers }),
        ..LabOptions::default()
    })
    .await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    let lifetimes = json!({"certificateRotateStrategy": {"selfSigned": {
        "ca": {"duration": "36s", "renewBefore": "18s"}, "server": {"duration": "24s", "renewBefore": "12s"},
    }}});
    create_kubevirt(&lab, &lifetimes).await?;
    wait_until_available(&lab).await?;
    let second = lab.admin().through(lab.second_api_server()?).client("probe")?;
    for client in [&lab.client(), &second] {
        WebhookClient::wait_until_answered(client).await?;
    }
    let client = WebhookClient::start(vec![lab.client(), second]);
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    let mut cas = BTreeSet::new();
    while cas.len() <= ROTATIONS {
        let known = cas.clone();
        let renewed = lab.wait("a new CA", TIMEOUT, secrets.clone(), "kubevirt-ca", |secret| {
            secret.and_then(certificate).is_some_and(|current| !known.contains(&current))
        });
        cas.extend(renewed.await?.as_ref().and_then(certificate));
    }
    client.finish().await.context("while certificates were replaced")?;
    lab.stop().await
}

fn certificate(secret: &Secret) -> Option<Vec<u8>> {
    Some(secret.data.as_ref()?.get("tls.crt")?.0.clone())
}
