//! Simulated storage: one PersistentVolume per PVC, bound by the real controller, the expansion of bound PVCs, and the
//! deletion of released volumes.
//!
//! The lab is the external provisioner of the name `BINDING`: it creates volumes immediately or for the first consumer,
//! as the StorageClass says. The name `NEVER` has no provisioner, so a PVC of its class stays Pending.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::{
    api::{
        core::v1::{
            HostPathVolumeSource, ObjectReference, PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec,
        },
        storage::v1::StorageClass,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
    runtime::watcher,
};
use serde_json::json;
use tokio::{sync::watch, time::Instant};

use crate::{object_watch::run_per_object, pace::DelayRange};

pub(crate) const BINDING: &str = "lab.vitistack.io/binding";
pub(crate) const NEVER: &str = "lab.vitistack.io/never";

/// The cluster's default StorageClass. It binds immediately.
pub const CLASS_STANDARD: &str = "standard";
/// Binds when a pod that uses the PVC has been scheduled.
pub const CLASS_WAIT: &str = "wait-for-consumer";
/// Never binds.
pub const CLASS_NEVER: &str = "never-binds";

const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
const RECLAIM: &str = "Delete";
const PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
const RETRY: Duration = Duration::from_millis(200);
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

pub(crate) async fn create_classes(client: &Client) -> Result<()> {
    let classes: Api<StorageClass> = Api::all(client.clone());
    for (name, provisioner, mode, default) in [
        (CLASS_STANDARD, BINDING, "Immediate", true),
        (CLASS_WAIT, BINDING, "WaitForFirstConsumer", false),
        (CLASS_NEVER, NEVER, "Immediate", false),
    ] {
        let class = StorageClass {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                annotations: default
                    .then(|| [("storageclass.kubernetes.io/is-default-class".to_owned(), "true".to_owned())].into()),
                ..ObjectMeta::default()
            },
            provisioner: provisioner.to_owned(),
            volume_binding_mode: Some(mode.to_owned()),
            allow_volume_expansion: Some(true),
            ..StorageClass::default()
        };
        classes
            .create(&PostParams::default(), &class)
            .await
            .with_context(|| format!("creating StorageClass {name}"))?;
    }
    Ok(())
}

/// Runs until cancelled.
pub(crate) async fn provision(client: Client, delay: DelayRange, seed: u64) {
    let pvcs: Api<PersistentVolumeClaim> = Api::all(client.clone());
    let everything = watcher::Config::default();
    run_per_object(pvcs, everything, |_, _| {}, |changes| run_pvc(client.clone(), delay, seed, changes)).await;
}

/// Deletes the volumes whose PVC was deleted, as an external provisioner does. Runs until cancelled.
pub(crate) async fn reclaim(client: Client) {
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let everything = watcher::Config::default();
    run_per_object(volumes, everything, |_, _| {}, |changes| reclaim_volume(client.clone(), changes)).await;
}

async fn reclaim_volume(client: Client, mut changes: watch::Receiver<Option<PersistentVolume>>) {
    let volumes: Api<PersistentVolume> = Api::all(client);
    loop {
        let Some(volume) = changes.borrow_and_update().clone() else { return };
        if is_released(&volume)
            && let Err(error) = volumes.delete(&volume.name_any(), &DeleteParams::default()).await
        {
            tracing::debug!("volume {}: {error:#}", volume.name_any());
            tokio::time::sleep(RETRY).await;
            continue;
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn is_released(volume: &PersistentVolume) -> bool {
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    let is_ours = volume.annotations().get(PROVISIONED_BY).map(String::as_str) == Some(BINDING);
    is_ours && phase == Some("Released") && policy == Some(RECLAIM) && volume.metadata.deletion_timestamp.is_none()
}

/// Handles one PVC as long as it exists. It retries failed requests, because no other change of the PVC may follow.
async fn run_pvc(
    client: Client,
    delay: DelayRange,
    seed: u64,
    mut changes: watch::Receiver<Option<PersistentVolumeClaim>>,
) {
    let mut ready = None;
    loop {
        let Some(pvc) = changes.borrow_and_update().clone() else { return };
        let result = match action_for(&pvc) {
            ProvisionAction::None => Ok(Duration::MAX),
            ProvisionAction::CreateVolume => {
                let object = format!("{}/{}", pvc.namespace().unwrap_or_default(), pvc.name_any());
                let ready = *ready.get_or_insert_with(|| Instant::now() + delay.pick(seed, "binding", &object));
                let left = ready.saturating_duration_since(Instant::now());
                if left.is_zero() { create_volume(&client, &pvc).await.map(|()| Duration::MAX) } else { Ok(left) }
            }
            ProvisionAction::Expand => expand(&client, &pvc).await.map(|()| Duration::MAX),
        };
        let retry_after = match result {
            Ok(next_check) => next_check,
            Err(error) => {
                tracing::debug!("storage for {}: {error:#}", pvc.name_any());
                RETRY
            }
        };
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(retry_after) => {}
        }
    }
}

#[derive(Debug, PartialEq)]
enum ProvisionAction {
    None,
    CreateVolume,
    Expand,
}

/// What the provisioner must do for this PVC. The controller sets the provisioner annotation when a volume may be
/// created: immediately, or for a WaitForFirstConsumer class after the scheduler has selected a node.
fn action_for(pvc: &PersistentVolumeClaim) -> ProvisionAction {
    let annotations = pvc.annotations();
    let status = pvc.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let volume = pvc.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    if annotations.get(PROVISIONER).map(String::as_str) != Some(BINDING) || pvc.metadata.deletion_timestamp.is_some() {
        return ProvisionAction::None;
    }
    match (phase, volume) {
        ("Pending", None) => ProvisionAction::CreateVolume,
        ("Bound", Some(_)) if requested(pvc) != status.and_then(|status| status.capacity.clone()) => {
            ProvisionAction::Expand
        }
        _ => ProvisionAction::None,
    }
}

fn requested(pvc: &PersistentVolumeClaim) -> Option<Quantities> {
    pvc.spec.as_ref()?.resources.as_ref()?.requests.clone()
}

type Quantities = std::collections::BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>;

async fn create_volume(client: &Client, pvc: &PersistentVolumeClaim) -> Result<()> {
    let classes: Api<StorageClass> = Api::all(client.clone());
    let spec = pvc.spec.clone().unwrap_or_default();
    let class_name = spec.storage_class_name.clone().unwrap_or_default();
    let Some(class) = classes.get_opt(&class_name).await? else { return Ok(()) };
    let waits = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
    if waits && !pvc.annotations().contains_key(SELECTED_NODE) {
        return Ok(());
    }
    let name = format!("pvc-{}", pvc.uid().unwrap_or_default());
    let volume = PersistentVolume {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            annotations: Some([(PROVISIONED_BY.to_owned(), BINDING.to_owned())].into()),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: spec.access_modes,
            capacity: requested(pvc),
            claim_ref: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("PersistentVolumeClaim".to_owned()),
                namespace: pvc.namespace(),
                name: pvc.metadata.name.clone(),
                uid: pvc.uid(),
                ..ObjectReference::default()
            }),
            host_path: Some(HostPathVolumeSource { path: format!("/volumes/{name}"), type_: None }),
            persistent_volume_reclaim_policy: Some(RECLAIM.to_owned()),
            storage_class_name: Some(class_name),
            volume_mode: spec.volume_mode,
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    };
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    match volumes.create(&PostParams::default(), &volume).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(error).context("creating a PersistentVolume"),
    }
}

/// The combined work of external-resizer and the kubelet.
async fn expand(client: &Client, pvc: &PersistentVolumeClaim) -> Result<()> {
    let volume = pvc.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
    let capacity = requested(pvc);
    let parameters = PatchParams::default();
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    volumes.patch(&volume, &parameters, &Patch::Merge(json!({"spec": {"capacity": capacity}}))).await?;
    let pvcs: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &pvc.namespace().unwrap_or_default());
    pvcs.patch_status(&pvc.name_any(), &parameters, &Patch::Merge(json!({"status": {"capacity": capacity}}))).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pvc(json: serde_json::Value) -> PersistentVolumeClaim {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_pending_pvc_of_the_binding_provisioner_gets_a_volume() {
        let ours = json!({"metadata": {"annotations": {PROVISIONER: BINDING}}, "status": {"phase": "Pending"}});
        assert_eq!(action_for(&pvc(ours)), ProvisionAction::CreateVolume);
        let never = json!({"metadata": {"annotations": {PROVISIONER: NEVER}}, "status": {"phase": "Pending"}});
        assert_eq!(action_for(&pvc(never)), ProvisionAction::None);
    }

    #[test]
    fn a_released_volume_of_the_lab_is_deleted() {
        let volume = |phase: &str, provisioner: &str| -> PersistentVolume {
            serde_json::from_value(json!({
                "metadata": {"annotations": {PROVISIONED_BY: provisioner}},
                "spec": {"persistentVolumeReclaimPolicy": "Delete"}, "status": {"phase": phase},
            }))
            .unwrap()
        };
        assert!(is_released(&volume("Released", BINDING)));
        assert!(!is_released(&volume("Bound", BINDING)) && !is_released(&volume("Released", "another")));
    }

    #[test]
    fn a_bound_pvc_with_a_larger_request_is_expanded() {
        let bound = |capacity: &str| {
            pvc(json!({
                "metadata": {"annotations": {PROVISIONER: BINDING}},
                "spec": {"volumeName": "pv", "resources": {"requests": {"storage": "2Gi"}}},
                "status": {"phase": "Bound", "capacity": {"storage": capacity}},
            }))
        };
        assert_eq!(action_for(&bound("1Gi")), ProvisionAction::Expand);
        assert_eq!(action_for(&bound("2Gi")), ProvisionAction::None);
    }
}
