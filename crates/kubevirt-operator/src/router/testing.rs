//! Entries and changes of caches for tests, without a cluster.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use vitivirt_api::{
    ObjectKey,
    machine::{ANNOTATION_DISK, LABEL_MACHINE, LABEL_MACHINE_UID},
};
use vitivirt_runtime::{
    health::Health,
    watch::{Change, Watches},
};

use crate::cache::{Caches, MachineEntry, PvcEntry};

/// A client of a server that does not exist.
pub(crate) fn client() -> kube::Client {
    kube::Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap()
}

/// Empty caches: no watch is started.
pub(crate) fn caches() -> Caches {
    let mut watches = Watches::new(client(), Arc::new(Health::default()), CancellationToken::new());
    Caches::new(&mut watches, None)
}

pub(crate) fn key(name: &str) -> ObjectKey {
    ObjectKey::namespaced("ns", name)
}

pub(crate) fn machine(edit: impl FnOnce(&mut Value)) -> Arc<MachineEntry> {
    let mut object = json!({
        "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
        "metadata": {"name": "vm", "namespace": "ns", "uid": "u", "generation": 1},
        "spec": {"template": "small", "networks": [{"name": "a", "networkName": "net"}]},
        "status": {"phase": "Creating"},
    });
    edit(&mut object);
    Arc::new(MachineEntry::project(serde_json::from_value(object).unwrap()))
}

pub(crate) fn pvc(machine_uid: &str) -> Arc<PvcEntry> {
    let labels = json!({LABEL_MACHINE: "vm", LABEL_MACHINE_UID: machine_uid});
    let object = json!({"metadata": {"name": "vm-root", "namespace": "ns", "labels": labels}});
    Arc::new(PvcEntry::project(serde_json::from_value(object).unwrap()))
}

/// A PVC `restore-root` into which KubeVirt restored the root disk.
pub(crate) fn restored_pvc(machine: &str, machine_uid: &str) -> Arc<PvcEntry> {
    let metadata = json!({
        "name": "restore-root", "namespace": "ns", "labels": {LABEL_MACHINE: machine, LABEL_MACHINE_UID: machine_uid},
        "annotations": {ANNOTATION_DISK: "root restore-root"},
    });
    Arc::new(PvcEntry::project(serde_json::from_value(json!({"metadata": metadata})).unwrap()))
}

pub(crate) fn change<V>(name: &str, old: Option<&Arc<V>>, new: Option<&Arc<V>>) -> Change<V> {
    Change { key: key(name), old: old.cloned(), new: new.cloned(), is_next: true }
}
