//! A webhook that is not reachable yet, as while pods start: the installation waits for it and is not degraded.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, PostParams},
};
use serde_json::json;
use tokio::time::Instant;
use vitivirt_lab::{
    Lab, LabOptions, Record, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::support::{TIMEOUT, condition, create_kubevirt, is_available, kubevirts, operator_requests, program};

const WEBHOOK: &str = "refuses-connections";

pub(crate) fn add(suite: &mut Suite) {
    suite.test(
        "a_webhook_that_is_not_reachable_yet_delays_an_installation_and_does_not_degrade_it",
        a_webhook_that_is_not_reachable_yet_delays_an_installation_and_does_not_degrade_it,
    );
}

async fn a_webhook_that_is_not_reachable_yet_delays_an_installation_and_does_not_degrade_it(
    _: Arc<SharedLabs>,
) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(lab.client());
    // Nothing listens on this port.
    let webhook = json!({
        "metadata": {"name": WEBHOOK},
        "webhooks": [{
            "name": "refuses.example.com",
            "clientConfig": {"url": "https://127.0.0.1:1/"},
            "rules": [{
                "apiGroups": ["instancetype.kubevirt.io"], "apiVersions": ["*"], "operations": ["CREATE"],
                "resources": ["virtualmachineclusterinstancetypes"],
            }],
            "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Fail",
        }],
    });
    webhooks.create(&PostParams::default(), &serde_json::from_value(webhook)?).await?;
    create_kubevirt(&lab, &json!({})).await?;

    // The operator names the cause when it has lasted for two seconds.
    wait_unless_degraded(&lab, "the cause is named", |kubevirt| {
        condition(kubevirt, "Progressing").is_some_and(|(status, reason, message)| {
            status == "True" && reason == "DeploymentInProgress" && message.contains("connection refused")
        })
    })
    .await?;
    let refused = instancetype_creates(&lab, 500)?;
    let span = refused.last().zip(refused.first()).map(|(last, first)| last.time.duration_since(first.time));
    let span = Duration::try_from(span.context("no create was refused")?)?;
    // 100, 100, 200, 400, 800 and 1000 ms, each shortened by at most half.
    let most = 8 + 2 * usize::try_from(span.as_secs())?;
    ensure!((4..=most).contains(&refused.len()), "{} attempts in {span:?}", refused.len());

    webhooks.delete(WEBHOOK, &DeleteParams::default()).await?;
    let reachable = Instant::now();
    wait_unless_degraded(&lab, "KubeVirt is available", is_available).await?;
    ensure!(reachable.elapsed() < Duration::from_secs(15), "available {:?} later", reachable.elapsed());
    let last_refused = instancetype_creates(&lab, 500)?.last().map(|record| record.time);
    let created = instancetype_creates(&lab, 201)?.first().map(|record| record.time);
    let delay = created.zip(last_refused).map(|(created, last)| created.duration_since(last));
    let delay = Duration::try_from(delay.context("nothing was created")?)?;
    ensure!(delay <= Duration::from_millis(1_500), "the first create after the last refused one took {delay:?}");
    lab.stop().await
}

async fn wait_unless_degraded(lab: &Lab, what: &str, done: fn(&DynamicObject) -> bool) -> Result<()> {
    let degraded = |kubevirt: &DynamicObject| {
        let degraded = condition(kubevirt, "Degraded");
        degraded.filter(|(status, reason, _)| status == "True" || reason == "DeploymentFailed")
    };
    let ended = |kubevirt: Option<&DynamicObject>| {
        kubevirt.is_some_and(|kubevirt| degraded(kubevirt).is_some() || done(kubevirt))
    };
    let kubevirt = lab.wait(what, TIMEOUT, kubevirts(lab), "kubevirt", ended).await?;
    let degraded = kubevirt.as_ref().and_then(degraded);
    ensure!(degraded.is_none(), "{what}: degraded: {degraded:?}");
    Ok(())
}

/// The operator's creates of instancetypes that the API server answered with this status.
fn instancetype_creates(lab: &Lab, code: u16) -> Result<Vec<Record>> {
    let is_create = |record: &Record| {
        record.verb == "create" && record.resource == "virtualmachineclusterinstancetypes" && record.code == Some(code)
    };
    Ok(operator_requests(lab)?.into_iter().filter(is_create).collect())
}
