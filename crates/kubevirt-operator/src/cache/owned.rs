//! The cached part of the other kinds: PVCs, Secrets (never their data), networks, StorageClasses, import sources.

#![expect(clippy::needless_pass_by_value, reason = "a cache passes the object that it received")]

use k8s_openapi::{
    api::{
        core::v1::{PersistentVolumeClaim, Secret},
        storage::v1::StorageClass,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use kube::core::{DynamicObject, PartialObjectMeta};
use serde_json::Value;
use vitivirt_api::{
    ObjectKey,
    machine::{
        ANNOTATION_ADOPT_BY, ANNOTATION_CONTENT, ANNOTATION_DISK, ANNOTATION_IDENTITY, ANNOTATION_SEGMENTS,
        ANNOTATION_SOURCE, ANNOTATION_SOURCE_READ, ANNOTATION_STARTED_WITH, AccessMode, FINALIZER_NETWORK,
        LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_ON_DELETE, MANAGED_BY, ON_DELETE_RETAIN, PvcPhase, VolumeMode,
    },
    text::truncate,
};
use vitivirt_machine::{
    observed::{ImportSourceView, NetworkAttachmentView, NetworkView, PvcView, SecretView, StorageClassView, VmOwner},
    render::pvc::marked_disk,
};
use vitivirt_runtime::watch::{Entry, Uid, controller_uid};

use super::compact::{self, Labels};

/// Longer values are invalid or belong to another client, and are cached in part.
const NAME_LIMIT: usize = 253;
const CONFIG_LIMIT: usize = 4096;

fn boxed(text: Option<&str>) -> Option<Box<str>> {
    text.map(Into::into)
}

fn owned_string(text: Option<&str>) -> Option<String> {
    text.map(str::to_owned)
}

fn annotation(metadata: &ObjectMeta, name: &str) -> Option<Box<str>> {
    boxed(compact::annotation(metadata, name))
}

fn is_annotated(metadata: &ObjectMeta) -> bool {
    metadata.annotations.as_ref().is_some_and(|all| !all.is_empty())
}

/// The disk that an annotation of a PVC names.
fn disk(metadata: &ObjectMeta) -> Option<&str> {
    let mark = compact::annotation(metadata, ANNOTATION_DISK)?;
    marked_disk(mark, metadata.name.as_deref()?)
}

/// Whether it has owner references of any kind.
pub(super) fn has_owners(metadata: &ObjectMeta) -> bool {
    metadata.owner_references.as_ref().is_some_and(|owners| !owners.is_empty())
}

/// The position of the controller among the owner references. A list of more than 255 is not ours.
pub(super) fn controller_index(metadata: &ObjectMeta) -> u8 {
    let mut owners = metadata.owner_references.iter().flatten();
    let index = owners.position(|owner| owner.controller == Some(true)).unwrap_or_default();
    u8::try_from(index).unwrap_or(u8::MAX)
}

fn vm_owner(metadata: &ObjectMeta) -> Option<(u8, Uid)> {
    let mut owners = metadata.owner_references.iter().flatten().enumerate();
    let is_vm =
        |owner: &OwnerReference| owner.kind == "VirtualMachine" && owner.api_version.starts_with("kubevirt.io/");
    let (index, owner) = owners.find(|(_, owner)| is_vm(owner))?;
    Some((u8::try_from(index).ok()?, Uid::from(owner.uid.as_str())))
}

pub(super) fn creation_seconds(metadata: &ObjectMeta) -> i64 {
    metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second())
}

#[derive(Debug, PartialEq)]
pub(crate) struct PvcEntry {
    labels: Labels,
    pub(crate) phase: PvcPhase,
    requested: Box<str>,
    pub(crate) storage_class: Option<Box<str>>,
    access_mode: AccessMode,
    volume_mode: VolumeMode,
    source: Option<Box<str>>,
    volume: Option<Box<str>>,
    /// In the annotation, for a PVC that lost its labels.
    identity: Option<Uid>,
    adopt_by: Option<Box<str>>,
    disk: Option<Box<str>>,
    annotated: bool,
    has_owners: bool,
    /// The first owner reference to a VirtualMachine: its position and the UID.
    vm_owner: Option<(u8, Uid)>,
    deleting: bool,
    /// In seconds since 1970.
    pub(crate) created: i64,
}

impl PvcEntry {
    pub(crate) fn project(pvc: PersistentVolumeClaim) -> Self {
        let spec = pvc.spec.unwrap_or_default();
        let requests = spec.resources.and_then(|resources| resources.requests).unwrap_or_default();
        let phase = pvc.status.and_then(|status| status.phase).unwrap_or_default();
        Self {
            labels: Labels::from_metadata(&pvc.metadata),
            phase: phase.as_str().into(),
            requested: requests.get("storage").map(|quantity| quantity.0.as_str()).unwrap_or_default().into(),
            storage_class: boxed(spec.storage_class_name.as_deref()),
            access_mode: spec.access_modes.iter().flatten().next().map_or("", String::as_str).into(),
            volume_mode: spec.volume_mode.as_deref().unwrap_or("Filesystem").into(),
            source: annotation(&pvc.metadata, ANNOTATION_SOURCE)
                .or_else(|| spec.data_source_ref.as_ref().map(|_| Box::default())),
            volume: boxed(spec.volume_name.as_deref().filter(|name| !name.is_empty())),
            identity: annotation(&pvc.metadata, ANNOTATION_IDENTITY).map(|uid| Uid::from(&*uid)),
            adopt_by: annotation(&pvc.metadata, ANNOTATION_ADOPT_BY),
            disk: disk(&pvc.metadata).map(Into::into),
            annotated: is_annotated(&pvc.metadata),
            has_owners: has_owners(&pvc.metadata),
            vm_owner: vm_owner(&pvc.metadata),
            deleting: pvc.metadata.deletion_timestamp.is_some(),
            created: creation_seconds(&pvc.metadata),
        }
    }

    /// The view of an object that was read from the API server.
    pub(crate) fn live_view(entry: &Entry<Self>) -> PvcView {
        PvcView { live_version: Some(entry.resource_version.to_string()), ..Self::view(entry) }
    }

    pub(crate) fn view(entry: &Entry<Self>) -> PvcView {
        let pvc = &entry.value;
        PvcView {
            uid: entry.uid.to_string(),
            live_version: None,
            labels: pvc.labels.to_map(),
            phase: pvc.phase,
            requested: pvc.requested.to_string(),
            storage_class: owned_string(pvc.storage_class.as_deref()),
            access_mode: pvc.access_mode,
            volume_mode: pvc.volume_mode,
            source: owned_string(pvc.source.as_deref()),
            volume: owned_string(pvc.volume.as_deref()),
            identity: pvc.identity.as_ref().map(Uid::to_string),
            adopt_by: owned_string(pvc.adopt_by.as_deref()),
            disk: owned_string(pvc.disk.as_deref()),
            annotated: pvc.annotated,
            has_owners: pvc.has_owners,
            vm_owner: pvc
                .vm_owner
                .as_ref()
                .map(|(index, uid)| VmOwner { index: (*index).into(), uid: uid.to_string() }),
            deleting: pvc.deleting,
            created: pvc.created,
        }
    }

    pub(crate) fn machine(&self) -> Option<&str> {
        self.labels.get(LABEL_MACHINE)
    }

    pub(crate) fn machine_uid(&self) -> Option<&str> {
        self.labels.get(LABEL_MACHINE_UID)
    }

    /// It holds a disk that KubeVirt restored or migrated into it.
    pub(crate) fn is_restored(&self) -> bool {
        self.disk.is_some()
    }

    pub(crate) fn is_retained(&self) -> bool {
        self.labels.get(LABEL_ON_DELETE) == Some(ON_DELETE_RETAIN)
    }

    /// Whether the change is only progress of the storage, so that the reconcile can be delayed.
    pub(crate) fn is_intermediate(&self, newer: &Self) -> bool {
        self.labels == newer.labels && self.deleting == newer.deleting
    }
}

#[derive(Debug, PartialEq)]
pub(crate) struct SecretEntry {
    controller_uid: Option<Uid>,
    controller_index: u8,
    has_owners: bool,
    labels: Labels,
    content: Option<Box<str>>,
    source_read: Option<Box<str>>,
    annotated: bool,
    tampered: bool,
    adopt_by: Option<Box<str>>,
    started_with: Option<Box<str>>,
    deleting: bool,
}

impl SecretEntry {
    pub(crate) fn project(secret: PartialObjectMeta<Secret>) -> Self {
        let metadata = &secret.metadata;
        Self {
            controller_uid: controller_uid(metadata),
            controller_index: controller_index(metadata),
            has_owners: has_owners(metadata),
            labels: Labels::from_metadata(metadata),
            content: annotation(metadata, ANNOTATION_CONTENT),
            annotated: is_annotated(metadata),
            source_read: annotation(metadata, ANNOTATION_SOURCE_READ),
            tampered: has_foreign_data(metadata),
            adopt_by: annotation(metadata, ANNOTATION_ADOPT_BY),
            started_with: annotation(metadata, ANNOTATION_STARTED_WITH),
            deleting: metadata.deletion_timestamp.is_some(),
        }
    }

    pub(crate) fn view(entry: &Entry<Self>) -> SecretView {
        let secret = &entry.value;
        SecretView {
            uid: entry.uid.to_string(),
            controller_uid: secret.controller_uid.as_ref().map(Uid::to_string),
            controller_index: secret.controller_index.into(),
            has_owners: secret.has_owners,
            labels: secret.labels.to_map(),
            content: owned_string(secret.content.as_deref()),
            annotated: secret.annotated,
            source_read: owned_string(secret.source_read.as_deref()),
            tampered: secret.tampered,
            adopt_by: owned_string(secret.adopt_by.as_deref()),
            started_with: owned_string(secret.started_with.as_deref()),
            deleting: secret.deleting,
        }
    }

    pub(crate) fn machine(&self) -> Option<&str> {
        self.labels.get(LABEL_MACHINE)
    }
}

/// Whether another field manager has written any of the data.
fn has_foreign_data(metadata: &ObjectMeta) -> bool {
    metadata.managed_fields.iter().flatten().any(|entry| {
        let data = entry.fields_v1.as_ref().is_some_and(|fields| fields.0.get("f:data").is_some());
        data && entry.manager.as_deref() != Some(MANAGED_BY)
    })
}

#[derive(Debug, PartialEq)]
pub(crate) struct NetworkEntry {
    vlan: Option<u16>,
    bridge: Option<Box<str>>,
    /// The index of the operator's finalizer.
    pub(crate) finalizer_index: Option<usize>,
    pub(crate) deleting: bool,
}

impl NetworkEntry {
    /// Other components of Viti Stack own the rest of the spec, so any content must be readable. An invalid VLAN must
    /// not become untagged traffic: it is cached as 0, which is invalid too.
    pub(crate) fn project(network: DynamicObject) -> Self {
        let spec = network.data.get("spec").unwrap_or(&Value::Null);
        let tag = |vlan: &Value| vlan.as_u64().and_then(|vlan| u16::try_from(vlan).ok()).unwrap_or_default();
        let vlan = spec.get("vlan").filter(|vlan| !vlan.is_null()).map(tag);
        let finalizers = network.metadata.finalizers.unwrap_or_default();
        Self {
            vlan,
            bridge: spec.get("bridge").and_then(Value::as_str).map(|name| truncate(name, NAME_LIMIT).into()),
            finalizer_index: finalizers.iter().position(|finalizer| finalizer == FINALIZER_NETWORK),
            deleting: network.metadata.deletion_timestamp.is_some(),
        }
    }

    pub(crate) fn bridge_and_vlan(&self) -> Option<(&str, Option<u16>)> {
        Some((self.bridge.as_deref()?, self.vlan))
    }

    pub(crate) fn view(entry: &Entry<Self>, other_users: bool) -> NetworkView {
        let network = &entry.value;
        NetworkView {
            uid: entry.uid.to_string(),
            vlan: network.vlan,
            bridge: owned_string(network.bridge.as_deref()),
            finalizer_index: network.finalizer_index,
            deleting: network.deleting,
            other_users,
        }
    }
}

#[derive(Debug, PartialEq)]
pub(crate) struct AttachmentEntry {
    controller_uid: Option<Uid>,
    labels: Labels,
    config: Box<str>,
    segments: Option<Box<str>>,
    annotated: bool,
}

impl AttachmentEntry {
    pub(crate) fn project(attachment: DynamicObject) -> Self {
        let config = attachment.data.pointer("/spec/config").and_then(Value::as_str).unwrap_or_default();
        Self {
            // The operator's own are much shorter.
            config: truncate(config, CONFIG_LIMIT).into(),
            segments: annotation(&attachment.metadata, ANNOTATION_SEGMENTS),
            annotated: is_annotated(&attachment.metadata),
            controller_uid: controller_uid(&attachment.metadata),
            labels: Labels::from_metadata(&attachment.metadata),
        }
    }

    pub(crate) fn view(entry: &Entry<Self>) -> NetworkAttachmentView {
        NetworkAttachmentView {
            uid: entry.uid.to_string(),
            controller_uid: entry.value.controller_uid.as_ref().map(Uid::to_string),
            labels: entry.value.labels.to_map(),
            config: entry.value.config.to_string(),
            segments: owned_string(entry.value.segments.as_deref()),
            annotated: entry.value.annotated,
        }
    }
}

#[derive(Debug, PartialEq)]
pub(crate) struct ImportEntry {
    controller_uid: Option<Uid>,
    labels: Labels,
    source: Option<Box<str>>,
    deleting: bool,
}

impl ImportEntry {
    pub(crate) fn project(source: PartialObjectMeta<DynamicObject>) -> Self {
        Self {
            controller_uid: controller_uid(&source.metadata),
            labels: Labels::from_metadata(&source.metadata),
            source: annotation(&source.metadata, ANNOTATION_SOURCE),
            deleting: source.metadata.deletion_timestamp.is_some(),
        }
    }

    pub(crate) fn view(entry: &Entry<Self>) -> ImportSourceView {
        ImportSourceView {
            uid: entry.uid.to_string(),
            controller_uid: entry.value.controller_uid.as_ref().map(Uid::to_string),
            labels: entry.value.labels.to_map(),
            source: owned_string(entry.value.source.as_deref()),
            deleting: entry.value.deleting,
        }
    }

    pub(crate) fn machine(&self) -> Option<&str> {
        self.labels.get(LABEL_MACHINE)
    }
}

#[derive(Debug, PartialEq)]
pub(crate) struct ClassEntry {
    is_default: bool,
    waits_for_consumer: bool,
    allows_expansion: bool,
    created: i64,
}

impl ClassEntry {
    pub(crate) fn project(class: StorageClass) -> Self {
        Self {
            is_default: Self::is_default(&class),
            waits_for_consumer: class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"),
            allows_expansion: class.allow_volume_expansion == Some(true),
            created: creation_seconds(&class.metadata),
        }
    }

    /// Whether the StorageClass is marked as the default of the cluster.
    pub(crate) fn is_default(class: &StorageClass) -> bool {
        let annotations = class.metadata.annotations.as_ref();
        let says = |name: &str| annotations.and_then(|all| all.get(name)).is_some_and(|value| value == "true");
        says("storageclass.kubernetes.io/is-default-class") || says("storageclass.beta.kubernetes.io/is-default-class")
    }

    fn view(&self, name: &str) -> StorageClassView {
        StorageClassView {
            name: name.to_owned(),
            is_default: self.is_default,
            waits_for_consumer: self.waits_for_consumer,
            allows_expansion: self.allows_expansion,
        }
    }

    /// Sorted as Kubernetes chooses between several default StorageClasses: the youngest first, then by name.
    pub(crate) fn views(mut all: Vec<(ObjectKey, Entry<Self>)>) -> Vec<StorageClassView> {
        all.sort_by(|(a, first), (b, second)| second.value.created.cmp(&first.value.created).then_with(|| a.cmp(b)));
        all.iter().map(|(key, entry)| entry.value.view(key.name())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn data_of_another_field_manager_is_detected() {
        let secret = |manager: &str, fields: Value| -> SecretEntry {
            SecretEntry::project(
                serde_json::from_value(json!({"metadata": {
                    "name": "s", "annotations": {ANNOTATION_CONTENT: "d"},
                    "managedFields": [
                        {"manager": MANAGED_BY, "operation": "Update", "fieldsV1": {"f:data": {"f:userdata": {}}}},
                        {"manager": manager, "operation": "Update", "fieldsV1": fields},
                    ],
                }}))
                .unwrap(),
            )
        };
        assert!(secret("kubectl-edit", json!({"f:data": {"f:x": {}}})).tampered);
        assert!(!secret("kubectl-label", json!({"f:metadata": {"f:labels": {}}})).tampered);
        let ours = secret(MANAGED_BY, json!({"f:data": {"f:networkdata": {}}}));
        assert!(!ours.tampered);
        assert_eq!(ours.content.as_deref(), Some("d"));
    }

    #[test]
    fn the_youngest_default_storage_class_is_first() {
        let class = |name: &str, created: &str| {
            let class = serde_json::from_value(json!({
                "metadata": {"name": name, "creationTimestamp": created,
                    "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
                "provisioner": "p",
            }))
            .unwrap();
            let entry = Entry {
                uid: name.into(),
                resource_version: "1".into(),
                value: std::sync::Arc::new(ClassEntry::project(class)),
            };
            (ObjectKey::cluster(name), entry)
        };
        let views = ClassEntry::views(vec![
            class("old", "2026-01-01T00:00:00Z"),
            class("z", "2026-02-01T00:00:00Z"),
            class("y", "2026-02-01T00:00:00Z"),
        ]);
        assert_eq!(views.iter().map(|view| view.name.as_str()).collect::<Vec<_>>(), ["y", "z", "old"]);
        assert!(views[0].is_default);
    }

    #[test]
    fn a_network_with_malformed_content_is_readable() {
        let network = |spec: Value| {
            NetworkEntry::project(
                serde_json::from_value(
                    json!({"metadata": {"name": "n", "finalizers": [FINALIZER_NETWORK]}, "spec": spec}),
                )
                .unwrap(),
            )
        };
        for (vlan, expected) in
            [(json!(70000), Some(0)), (json!("7"), Some(0)), (json!(-1), Some(0)), (Value::Null, None)]
        {
            assert_eq!(network(json!({"vlan": vlan, "bridge": 1})).vlan, expected, "{vlan}");
        }
        let plain = network(json!({"vlan": 7, "bridge": "br1", "other": {"a": [1]}}));
        assert_eq!((plain.vlan, plain.bridge.as_deref(), plain.finalizer_index), (Some(7), Some("br1"), Some(0)));
    }
}
