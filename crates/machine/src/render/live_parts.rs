//! The parts of a live VM that the operator keeps as they are: those that a problem stops or that wait for an object, and
//! those that KubeVirt wrote. KubeVirt's restore and its volume migration replace the PVC of a volume,
//! `virtctl addvolume --persist` adds a disk, and a memory dump adds a volume.

use std::collections::BTreeSet;

use serde_json::Value;

const DOMAIN: &str = "/template/spec/domain";
const DISKS: &str = "/template/spec/domain/devices/disks";
const VOLUMES: &str = "/template/spec/volumes";
const INTERFACES: &str = "/template/spec/domain/devices/interfaces";
const NETWORKS: &str = "/template/spec/networks";

/// The parts of the VM that stay as they are.
#[derive(Default)]
pub(crate) struct KeptParts<'a> {
    /// Names of disks, and of their volumes.
    pub(crate) disks: BTreeSet<&'a str>,
    pub(crate) networks: bool,
}

/// The desired spec with the kept parts of the live one. A kept disk that the live VM does not have is left out.
pub(crate) fn keep(live: &Value, mut desired: Value, kept: &KeptParts<'_>) -> Value {
    for list in [DISKS, VOLUMES] {
        if let Some(Value::Array(items)) = desired.pointer_mut(list) {
            *items = std::mem::take(items)
                .into_iter()
                .filter_map(|item| match name(&item).filter(|name| kept.disks.contains(name)) {
                    Some(name) => named(live, list, name).cloned(),
                    None => Some(item),
                })
                .collect();
        }
    }
    if kept.networks {
        for list in [INTERFACES, NETWORKS] {
            if let (Some(desired), Some(live)) = (desired.pointer_mut(list), live.pointer(list)) {
                desired.clone_from(live);
            }
        }
    }
    desired
}

/// The desired spec with what KubeVirt wrote into the live one.
pub(crate) fn keep_changes_of_kubevirt(live: &Value, mut desired: Value) -> Value {
    let plugged: Vec<Value> = items(live, VOLUMES)
        .filter(|volume| {
            is_plugged(volume) && name(volume).is_some_and(|name| named(&desired, VOLUMES, name).is_none())
        })
        .cloned()
        .collect();
    let disks: Vec<Value> = plugged.iter().filter_map(|volume| named(live, DISKS, name(volume)?).cloned()).collect();
    if let Some(Value::Array(volumes)) = desired.pointer_mut(VOLUMES) {
        for volume in volumes.iter_mut() {
            let live = name(volume).and_then(|name| named(live, VOLUMES, name));
            if let Some(live) = live.filter(|live| volume.get("persistentVolumeClaim").is_some() && is_pvc(live)) {
                volume.clone_from(live);
            }
        }
        volumes.extend(plugged);
    }
    if let Some(Value::Array(all)) = desired.pointer_mut(DISKS) {
        all.extend(disks);
    }
    // KubeVirt chose it by the architecture of the cluster, or an earlier version of this operator did. It is hardware of
    // the guest, so only an edit of the Machine changes it.
    if let (Some(machine), Some(Value::Object(domain))) =
        (live.pointer(&format!("{DOMAIN}/machine")), desired.pointer_mut(DOMAIN))
    {
        domain.entry("machine").or_insert_with(|| machine.clone());
    }
    if let (Some(strategy), Value::Object(fields)) = (live.get("updateVolumesStrategy"), &mut desired) {
        fields.insert("updateVolumesStrategy".to_owned(), strategy.clone());
    }
    desired
}

/// The PVC of a volume of the VM. CDI gives the PVC of a DataVolume the same name.
pub(crate) fn pvc_of<'a>(live: &'a Value, disk: &str) -> Option<&'a str> {
    let volume = named(live, VOLUMES, disk)?;
    let text = |pointer: &str| volume.pointer(pointer).and_then(Value::as_str);
    text("/persistentVolumeClaim/claimName").or_else(|| text("/dataVolume/name"))
}

/// The volume of the VM that uses a PVC.
pub(crate) fn disk_with_pvc<'a>(live: &'a Value, pvc: &str) -> Option<&'a str> {
    let volumes = live.pointer(VOLUMES).and_then(Value::as_array).into_iter().flatten();
    let mut names = volumes.filter_map(|volume| volume.get("name").and_then(Value::as_str));
    names.find(|name| pvc_of(live, name) == Some(pvc))
}

fn is_pvc(volume: &Value) -> bool {
    volume.get("persistentVolumeClaim").is_some() || volume.get("dataVolume").is_some()
}

fn is_plugged(volume: &Value) -> bool {
    let hotpluggable = |kind: &str| volume.pointer(&format!("/{kind}/hotpluggable")) == Some(&Value::Bool(true));
    hotpluggable("persistentVolumeClaim") || hotpluggable("dataVolume") || volume.get("memoryDump").is_some()
}

fn items<'a>(spec: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    spec.pointer(list).and_then(Value::as_array).into_iter().flatten()
}

fn named<'a>(spec: &'a Value, list: &str, wanted: &str) -> Option<&'a Value> {
    items(spec, list).find(|item| name(item) == Some(wanted))
}

fn name(item: &Value) -> Option<&str> {
    item.get("name")?.as_str()
}
