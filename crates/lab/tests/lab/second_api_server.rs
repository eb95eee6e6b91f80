//! A second API server with the same data, which hears of some changes later.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    admissionregistration::v1::ValidatingWebhookConfiguration, authentication::v1::SelfSubjectReview,
    core::v1::ConfigMap,
};
use kube::{Api, Client, api::PostParams};
use serde_json::json;
use vitivirt_lab::{
    ApiServerLag, Lab, LabOptions, LagScope,
    harness::{SharedLabs, Suite},
    tests,
};

use crate::pace::after;

pub(crate) fn add(suite: &mut Suite) {
    tests!(suite; the_second_api_server_hears_of_webhooks_and_api_services_late, the_second_api_server_can_lag_in_everything);
}

const LAG: Duration = Duration::from_secs(4);
/// More than the first API server needs, on a busy machine.
const SOON: Duration = Duration::from_secs(3);

async fn the_second_api_server_hears_of_webhooks_and_api_services_late(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, [first, second]) = start(LagScope::CalledServers).await?;
    let account = lab.credentials("default", "caller").await?;
    for client in [account.client("test")?, account.through(lab.second_api_server()?).client("test")?] {
        let reviews: Api<SelfSubjectReview> = Api::all(client);
        let user = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await?;
        let name = user.status.and_then(|status| status.user_info?.username).context("the review has no user")?;
        ensure!(name == "system:serviceaccount:default:caller", "{name}");
    }

    create_map(&first, "plain").await?;
    let created = Instant::now();
    let visible = after(created, || is_cached(&second, "plain")).await?;
    ensure!(visible < SOON, "the second API server shows the ConfigMap after {visible:?}");

    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(first.clone());
    let webhook = json!({
        "metadata": {"name": "refuses"},
        "webhooks": [{
            "name": "refuses.example.org",
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}],
            "clientConfig": {"url": "https://10.0.0.1:1/"},
            "objectSelector": {"matchLabels": {"webhook": "yes"}},
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }],
    });
    // Before the writes: the lag begins with them.
    let created = Instant::now();
    webhooks.create(&PostParams::default(), &serde_json::from_value(webhook)?).await?;
    lab.create(API_SERVICE).await?;
    let (first_webhook, second_webhook, first_service, second_service) = tokio::try_join!(
        after(created, || is_refused(&first)),
        after(created, || is_refused(&second)),
        after(created, || is_served(&first)),
        after(created, || is_served(&second)),
    )?;
    for (what, soon, late) in
        [("webhook", first_webhook, second_webhook), ("APIService", first_service, second_service)]
    {
        ensure!(soon < SOON, "the first API server hears of the {what} after {soon:?}");
        ensure!((LAG..LAG * 3).contains(&late), "the second API server hears of the {what} after {late:?}");
    }
    lab.stop().await
}

async fn the_second_api_server_can_lag_in_everything(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, [first, second]) = start(LagScope::Everything).await?;
    let created = Instant::now();
    create_map(&first, "late").await?;
    let (soon, late) =
        tokio::try_join!(after(created, || is_cached(&first, "late")), after(created, || is_cached(&second, "late")))?;
    ensure!(soon < SOON && late >= LAG, "the ConfigMap is visible after {soon:?} and {late:?}");
    let maps: Api<ConfigMap> = Api::namespaced(second, "default");
    create_map(&first, "read").await?;
    ensure!(maps.get_opt("read").await?.is_some(), "a read that asks etcd is not late");
    lab.stop().await
}

async fn start(scope: LagScope) -> Result<(Lab, [Client; 2])> {
    let second_api_server = Some(ApiServerLag { delay: LAG, scope });
    let lab = Lab::start(LabOptions { nodes: 1, second_api_server, ..LabOptions::default() }).await?;
    let second = lab.admin().through(lab.second_api_server()?).client("second")?;
    let clients = [lab.client(), second];
    Ok((lab, clients))
}

const API_SERVICE: &str = r#"
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.late.example.org}
spec:
  group: late.example.org
  version: v1
  groupPriorityMinimum: 1000
  versionPriority: 10
  insecureSkipTLSVerify: true
  service: {namespace: default, name: absent}
"#;

async fn create_map(client: &Client, name: &str) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    maps.create(&PostParams::default(), &serde_json::from_value(json!({"metadata": {"name": name}}))?).await?;
    Ok(())
}

/// Whether the API server's cache has the ConfigMap.
async fn is_cached(client: &Client, name: &str) -> Result<bool> {
    let path = format!("/api/v1/namespaces/default/configmaps/{name}?resourceVersion=0");
    Ok(status_of(client, &path).await? == 200)
}

/// Whether the API server knows the APIService. Its Service does not exist.
async fn is_served(client: &Client) -> Result<bool> {
    Ok(status_of(client, "/apis/late.example.org/v1").await? == 503)
}

async fn status_of(client: &Client, path: &str) -> Result<u16> {
    match client.request_text(http::Request::get(path).body(Vec::new())?).await {
        Ok(_) => Ok(200),
        Err(kube::Error::Api(status)) => Ok(status.code),
        Err(error) => Err(error.into()),
    }
}

/// Whether the webhook, which does not answer, refuses a ConfigMap.
async fn is_refused(client: &Client) -> Result<bool> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    let map = json!({"metadata": {"name": "refused", "labels": {"webhook": "yes"}}});
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    match maps.create(&dry_run, &serde_json::from_value(map)?).await {
        Ok(_) => Ok(false),
        Err(kube::Error::Api(status)) if status.message.contains("refuses.example.org") => Ok(true),
        Err(error) => Err(error.into()),
    }
}
