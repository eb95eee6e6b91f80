//! When the installation was really ready: every process answers its readiness probe, and every endpoint exists. A pod
//! may report that it is ready before that. Also whether the KubeVirt resource was ever Degraded.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use k8s_openapi::api::{core::v1::Pod, discovery::v1::EndpointSlice};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams},
    runtime::{WatchStreamExt, watcher},
};
use parking_lot::Mutex;
use serde_json::Value;
use vitivirt_lab::{Lab, kubevirt_resource};

const INTERVAL: Duration = Duration::from_millis(50);
const TIMEOUT: Duration = Duration::from_secs(120);
/// Longer than endpoints lag behind pods.
const ENDPOINTS_LAG: Duration = Duration::from_secs(4);

/// What was seen since the start, with the time of each first occurrence.
#[derive(Default)]
pub(super) struct Seen {
    /// By pod: its process answers, or a simulated pod reports that it is ready.
    pods: BTreeMap<String, Instant>,
    /// By slice and address.
    endpoints: BTreeMap<(String, String), Instant>,
    /// The first reason and message of the condition Degraded.
    pub(super) degraded: Option<String>,
}

/// Observes an installation until the future is dropped.
pub(super) async fn observe(lab: &Lab, namespace: &str, seen: Arc<Mutex<Seen>>) {
    tokio::join!(
        watch_pods(lab, namespace, &seen),
        watch_endpoints(lab, namespace, &seen),
        watch_conditions(lab, namespace, &seen),
    );
}

async fn watch_pods(lab: &Lab, namespace: &str, seen: &Mutex<Seen>) {
    let pods: Api<Pod> = Api::namespaced(lab.client(), namespace);
    let mut events = watcher(pods, watcher::Config::default()).default_backoff().applied_objects().boxed();
    let mut waiting: BTreeMap<String, Pod> = BTreeMap::new();
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(pod)) => { waiting.insert(pod.name_any(), pod); }
                Some(Err(_)) => {}
                None => return,
            },
            () = tokio::time::sleep(INTERVAL), if !waiting.is_empty() => {}
        }
        for (name, pod) in std::mem::take(&mut waiting) {
            if seen.lock().pods.contains_key(&name) {
                continue;
            }
            if lab.answers(&pod).await.unwrap_or_else(|| is_ready(&pod)) {
                seen.lock().pods.insert(name, Instant::now());
            } else {
                waiting.insert(name, pod);
            }
        }
    }
}

async fn watch_endpoints(lab: &Lab, namespace: &str, seen: &Mutex<Seen>) {
    let slices: Api<EndpointSlice> = Api::namespaced(lab.client(), namespace);
    let mut events = watcher(slices, watcher::Config::default()).default_backoff().applied_objects().boxed();
    while let Some(event) = events.next().await {
        let Ok(slice) = event else { continue };
        for address in ready_addresses(&slice) {
            seen.lock().endpoints.entry((slice.name_any(), address.clone())).or_insert_with(Instant::now);
        }
    }
}

async fn watch_conditions(lab: &Lab, namespace: &str, seen: &Mutex<Seen>) {
    let api: Api<DynamicObject> = Api::namespaced_with(lab.client(), namespace, &kubevirt_resource("KubeVirt"));
    let mut events = watcher(api, watcher::Config::default()).default_backoff().applied_objects().boxed();
    while let Some(event) = events.next().await {
        if let Ok(kubevirt) = event
            && let Some(degraded) = degraded(&kubevirt.data)
        {
            seen.lock().degraded.get_or_insert(degraded);
        }
    }
}

fn degraded(kubevirt: &Value) -> Option<String> {
    let conditions = kubevirt.pointer("/status/conditions")?.as_array()?;
    let text =
        |condition: &Value, field: &str| condition.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let condition = conditions
        .iter()
        .find(|condition| text(condition, "type") == "Degraded" && text(condition, "status") == "True")?;
    Some(format!("{}: {}", text(condition, "reason"), text(condition, "message")))
}

/// Waits until every pod of the namespace is really ready and every endpoint exists. Returns the time of the last one.
pub(super) async fn wait(lab: &Lab, namespace: &str, seen: &Mutex<Seen>) -> Result<Instant> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), namespace);
    let started = Instant::now();
    loop {
        let names: BTreeSet<String> = running(&pods).await?.iter().map(ResourceExt::name_any).collect();
        let missing: Vec<&String> = {
            let seen = seen.lock();
            names.iter().filter(|name| !seen.pods.contains_key(*name)).collect()
        };
        if missing.is_empty() {
            break;
        }
        if started.elapsed() > TIMEOUT {
            bail!("pods are not ready after {TIMEOUT:?}: {missing:?}");
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    tokio::time::sleep(ENDPOINTS_LAG).await;
    let slices: Api<EndpointSlice> = Api::namespaced(lab.client(), namespace);
    let slices = slices.list(&ListParams::default()).await?.items;
    let present: BTreeSet<(String, String)> = slices
        .iter()
        .flat_map(|slice| ready_addresses(slice).map(|address| (slice.name_any(), address.clone())))
        .collect();
    let names: BTreeSet<String> = running(&pods).await?.iter().map(ResourceExt::name_any).collect();
    let seen = seen.lock();
    let of_pods = seen.pods.iter().filter(|(name, _)| names.contains(*name)).map(|(_, time)| *time);
    let of_endpoints = seen.endpoints.iter().filter(|(key, _)| present.contains(*key)).map(|(_, time)| *time);
    of_pods.chain(of_endpoints).max().context("the namespace has no pods")
}

/// The pods that are neither finished (Jobs) nor being deleted.
async fn running(pods: &Api<Pod>) -> Result<Vec<Pod>> {
    let mut pods = pods.list(&ListParams::default()).await?.items;
    pods.retain(|pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        pod.metadata.deletion_timestamp.is_none() && !["Succeeded", "Failed"].contains(&phase)
    });
    Ok(pods)
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn ready_addresses(slice: &EndpointSlice) -> impl Iterator<Item = &String> {
    let ready = slice
        .endpoints
        .iter()
        .filter(|endpoint| endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) != Some(false));
    ready.flat_map(|endpoint| &endpoint.addresses)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_true_condition_counts_as_degraded() {
        let kubevirt = |status: &str| {
            json!({"status": {"conditions": [
                {"type": "Available", "status": "True"},
                {"type": "Degraded", "status": status, "reason": "DeploymentFailed", "message": "refused"},
            ]}})
        };
        assert_eq!(degraded(&kubevirt("True")), Some("DeploymentFailed: refused".to_owned()));
        assert_eq!(degraded(&kubevirt("False")), None);
        assert_eq!(degraded(&json!({})), None);
    }
}
