//! The PersistentVolumeClaim of a disk, and the VolumeImportSource that CDI fills it from.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{
        PersistentVolumeClaim, PersistentVolumeClaimSpec, TypedObjectReference, VolumeResourceRequirements,
    },
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};
use serde::Serialize;
use sha2::{Digest, Sha256};
use vitivirt_api::{
    machine::{ANNOTATION_IDENTITY, ANNOTATION_SOURCE, LABEL_ON_DELETE, ON_DELETE_DELETE, ON_DELETE_RETAIN},
    text::hex,
};

use super::{object_labels, owner_reference};
use crate::resolve::{DiskBacking, OnDelete, PvcSource, Resolved};

/// The labels of a PVC. The UID label says which Machine it belongs to: a PVC has no owner reference, so that the
/// garbage collector cannot delete data.
pub(crate) fn pvc_labels(resolved: &Resolved, on_delete: OnDelete) -> BTreeMap<String, String> {
    let mut labels = object_labels(resolved);
    let on_delete = match on_delete {
        OnDelete::Delete => ON_DELETE_DELETE,
        OnDelete::Retain => ON_DELETE_RETAIN,
    };
    labels.insert(LABEL_ON_DELETE.to_owned(), on_delete.to_owned());
    labels
}

/// The whole object, for its first write; none for a disk without a PVC. `class` is the name of the StorageClass.
pub fn render(resolved: &Resolved, backing: &DiskBacking, class: &str) -> Option<PersistentVolumeClaim> {
    let DiskBacking::Pvc { pvc, size, access_mode, volume_mode, source, on_delete, .. } = backing else { return None };
    let identity = (ANNOTATION_IDENTITY.to_owned(), resolved.id.uid().to_owned());
    let digest = source.as_ref().map(|source| (ANNOTATION_SOURCE.to_owned(), source_digest(source)));
    Some(PersistentVolumeClaim {
        metadata: ObjectMeta {
            labels: Some(pvc_labels(resolved, *on_delete)),
            annotations: Some(std::iter::once(identity).chain(digest).collect()),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeClaimSpec {
            storage_class_name: Some(class.to_owned()),
            access_modes: Some(vec![access_mode.to_string()]),
            volume_mode: Some(volume_mode.to_string()),
            resources: Some(VolumeResourceRequirements {
                requests: Some([("storage".to_owned(), Quantity(size.to_string()))].into()),
                ..VolumeResourceRequirements::default()
            }),
            data_source_ref: source.as_ref().map(|source| data_source(pvc, source)),
            ..PersistentVolumeClaimSpec::default()
        }),
        status: None,
    })
}

/// The value of `ANNOTATION_DISK`.
pub(crate) fn disk_mark(disk: &str, pvc: &str) -> String {
    format!("{disk} {pvc}")
}

/// The disk that the value of `ANNOTATION_DISK` names, if it was written for the PVC of this name.
pub fn marked_disk<'a>(mark: &'a str, pvc: &str) -> Option<&'a str> {
    mark.split_once(' ').filter(|(_, name)| *name == pvc).map(|(disk, _)| disk)
}

/// Identifies a source. It is a digest because a URL may contain a password, and PVCs are widely readable.
pub(crate) fn source_digest(source: &PvcSource) -> String {
    let (kind, place) = match source {
        PvcSource::Pvc(name) => ("pvc", name),
        PvcSource::Snapshot(name) => ("snapshot", name),
        PvcSource::Http(url) => ("http", url),
        PvcSource::Registry(url) => ("registry", url),
    };
    let digest = Sha256::new().chain_update(kind).chain_update([0]).chain_update(place).finalize();
    hex(digest.get(..8).unwrap_or_default())
}

fn data_source(pvc: &str, source: &PvcSource) -> TypedObjectReference {
    let (api_group, kind, name) = match source {
        PvcSource::Pvc(name) => (None, "PersistentVolumeClaim", name.as_str()),
        PvcSource::Snapshot(name) => (Some("snapshot.storage.k8s.io"), "VolumeSnapshot", name.as_str()),
        PvcSource::Http(_) | PvcSource::Registry(_) => (Some("cdi.kubevirt.io"), "VolumeImportSource", pvc),
    };
    TypedObjectReference {
        api_group: api_group.map(str::to_owned),
        kind: kind.to_owned(),
        name: name.to_owned(),
        namespace: None,
    }
}

/// CDI's description of the content of a disk. Without `apiVersion` and `kind`, which the executor adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VolumeImportSource {
    pub metadata: ObjectMeta,
    pub spec: VolumeImportSourceSpec,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VolumeImportSourceSpec {
    pub source: ImportFrom,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ImportFrom {
    Http { url: String },
    Registry { url: String },
}

/// Whether CDI imports the content of the disk.
pub(crate) fn needs_import_source(backing: &DiskBacking) -> bool {
    matches!(backing, DiskBacking::Pvc { source: Some(PvcSource::Http(_) | PvcSource::Registry(_)), .. })
}

/// None for a source that CDI does not import.
pub(crate) fn import_source(resolved: &Resolved, backing: &DiskBacking) -> Option<VolumeImportSource> {
    let DiskBacking::Pvc { source: Some(source), .. } = backing else { return None };
    let from = match source {
        PvcSource::Http(url) => ImportFrom::Http { url: url.clone() },
        PvcSource::Registry(url) => ImportFrom::Registry { url: url.clone() },
        PvcSource::Pvc(_) | PvcSource::Snapshot(_) => return None,
    };
    Some(VolumeImportSource {
        metadata: ObjectMeta {
            labels: Some(object_labels(resolved)),
            annotations: Some([(ANNOTATION_SOURCE.to_owned(), source_digest(source))].into()),
            owner_references: Some(vec![owner_reference(&resolved.id)]),
            ..ObjectMeta::default()
        },
        spec: VolumeImportSourceSpec { source: from },
    })
}
