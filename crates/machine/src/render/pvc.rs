//! The PersistentVolumeClaim of a disk.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use vitivirt_api::machine::{
    ANNOTATION_SOURCE, LABEL_MACHINE_UID, LABEL_ON_DELETE, Machine, ON_DELETE_DELETE, ON_DELETE_RETAIN,
};

use super::labels;
use crate::resolve::{Content, OnDelete, Source};

/// The labels by which a PVC is ours: it has no owner reference, so that no garbage collection can take data.
pub fn pvc_labels(machine: &Machine, on_delete: OnDelete) -> BTreeMap<String, String> {
    let mut labels = labels(machine);
    labels.insert(LABEL_MACHINE_UID.to_owned(), machine.metadata.uid.clone().unwrap_or_default());
    let on_delete = match on_delete {
        OnDelete::Delete => ON_DELETE_DELETE,
        OnDelete::Retain => ON_DELETE_RETAIN,
    };
    labels.insert(LABEL_ON_DELETE.to_owned(), on_delete.to_owned());
    labels
}

/// The whole object, for its first write; none for a disk without a PVC. `class` is the class that was found.
pub fn render(machine: &Machine, content: &Content, class: &str) -> Option<Value> {
    let Content::Pvc { pvc, size, access_mode, volume_mode, source, on_delete, .. } = content else { return None };
    let mut spec = json!({
        "storageClassName": class,
        "accessModes": [access_mode],
        "volumeMode": volume_mode,
        "resources": {"requests": {"storage": size.to_string()}},
    });
    let mut metadata = json!({"labels": pvc_labels(machine, *on_delete)});
    if let (Some(source), Value::Object(fields), Value::Object(metadata)) = (source, &mut spec, &mut metadata) {
        fields.insert("dataSourceRef".to_owned(), data_source(pvc, source));
        metadata.insert("annotations".to_owned(), json!({ANNOTATION_SOURCE: source_digest(source)}));
    }
    Some(json!({"metadata": metadata, "spec": spec}))
}

/// Tells one source from another. A URL may hold a password, so none is written down where PVCs can be read.
pub fn source_digest(source: &Source) -> String {
    let (kind, place) = match source {
        Source::Pvc(name) => ("pvc", name),
        Source::Snapshot(name) => ("snapshot", name),
        Source::Http(url) => ("http", url),
        Source::Registry(url) => ("registry", url),
    };
    let digest = Sha256::new().chain_update(kind).chain_update([0]).chain_update(place).finalize();
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn data_source(pvc: &str, source: &Source) -> Value {
    match source {
        Source::Pvc(name) => json!({"kind": "PersistentVolumeClaim", "name": name}),
        Source::Snapshot(name) => {
            json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name})
        }
        Source::Http(_) | Source::Registry(_) => {
            json!({"apiGroup": "cdi.kubevirt.io", "kind": "VolumeImportSource", "name": pvc})
        }
    }
}

/// CDI's description of where a disk's contents come from; none for other sources.
pub fn import_source(machine: &Machine, content: &Content) -> Option<Value> {
    let Content::Pvc { source, .. } = content else { return None };
    let source = match source {
        Some(Source::Http(url)) => json!({"http": {"url": url}}),
        Some(Source::Registry(url)) => json!({"registry": {"url": url}}),
        _ => return None,
    };
    Some(json!({
        "metadata": {"labels": labels(machine), "ownerReferences": [super::owner(machine)]},
        "spec": {"source": source},
    }))
}
