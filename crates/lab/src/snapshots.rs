//! Simulated snapshots of volumes: each VolumeSnapshot is ready as soon as it exists. Volumes of the lab have no data.

use anyhow::{Context, Result};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
    runtime::watcher::{self, Event},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::{object_watch::watch_events, storage::BINDING};

pub(crate) const GROUP: &str = "snapshot.storage.k8s.io";

pub(crate) fn class() -> Value {
    json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": "VolumeSnapshotClass", "metadata": {"name": "lab"},
        "driver": BINDING, "deletionPolicy": "Delete",
    })
}

/// Runs until cancelled.
pub(crate) async fn take(client: Client) {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, "v1", "VolumeSnapshot"));
    let snapshots: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let mut tasks = JoinSet::new();
    watch_events(snapshots, watcher::Config::default(), |event| {
        let (Event::Apply(snapshot) | Event::InitApply(snapshot)) = event else { return };
        if snapshot.data.get("status").is_none() {
            let namespace = snapshot.namespace().unwrap_or_default();
            let snapshots = Api::namespaced_with(client.clone(), &namespace, &resource);
            tasks.spawn(async move {
                if let Err(error) = complete(&snapshots, &snapshot).await {
                    tracing::warn!("VolumeSnapshot {}: {error:#}", snapshot.name_any());
                }
            });
        }
    })
    .await;
}

async fn complete(snapshots: &Api<DynamicObject>, snapshot: &DynamicObject) -> Result<()> {
    let status = json!({"status": {
        "readyToUse": true,
        "boundVolumeSnapshotContentName": format!("snapcontent-{}", snapshot.uid().unwrap_or_default()),
        "creationTime": snapshot.creation_timestamp(),
    }});
    let patched = snapshots.patch(&snapshot.name_any(), &PatchParams::default(), &Patch::Merge(status)).await;
    patched.map(|_| ()).context("writing the status")
}
