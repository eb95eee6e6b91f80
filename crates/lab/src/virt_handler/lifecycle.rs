//! The writes of virt-handler while a guest starts, runs and stops: pure functions from a VMI to the next VMI.

use serde_json::{Map, Value, json};

/// The values that the simulator chooses for a guest.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub(crate) address: Option<String>,
    /// Whether it reports addresses already.
    pub(crate) reports_addresses: bool,
    pub(crate) live_migratable: bool,
    pub(crate) now: String,
}

pub(crate) fn phase(vmi: &Value) -> &str {
    vmi.pointer("/status/phase").and_then(Value::as_str).unwrap_or_default()
}

pub(crate) fn is_being_deleted(vmi: &Value) -> bool {
    vmi.pointer("/metadata/deletionTimestamp").is_some()
}

/// Scheduled → Running: sets addresses, volumes, machine type and whether the guest can migrate.
pub(crate) fn started(vmi: &Value, guest: &Guest) -> Value {
    let mut vmi = vmi.clone();
    let interfaces = interfaces(&vmi, guest);
    let machine = vmi.pointer("/spec/domain/machine/type").cloned().unwrap_or_else(|| "q35".into());
    let memory =
        vmi.pointer("/status/memory/guestRequested").or_else(|| vmi.pointer("/spec/domain/memory/guest")).cloned();
    set(&mut vmi, "/status/interfaces", interfaces);
    set(&mut vmi, "/status/machine", json!({"type": machine}));
    set(&mut vmi, "/status/selinuxContext", "none".into());
    set(&mut vmi, "/status/migrationMethod", "LiveMigration".into());
    if let Some(memory) = memory {
        set(&mut vmi, "/status/memory/guestCurrent", memory);
    }
    for (index, volume) in array(&mut vmi, "/status/volumeStatus").iter_mut().enumerate() {
        let letter = char::from(b'a' + u8::try_from(index % 26).unwrap_or_default());
        set(volume, "/target", format!("vd{letter}").into());
    }
    for type_ in ["LiveMigratable", "StorageLiveMigratable"] {
        let (status, reason) =
            if guest.live_migratable { ("True", Value::Null) } else { ("False", "DisksNotLiveMigratable".into()) };
        set_condition(&mut vmi, type_, status, &reason, &guest.now);
    }
    enter(&mut vmi, "Running", &guest.now);
    vmi
}

/// A running guest reports its addresses.
pub(crate) fn with_addresses(vmi: &Value, guest: &Guest) -> Value {
    let mut vmi = vmi.clone();
    let interfaces = interfaces(&vmi, guest);
    set(&mut vmi, "/status/interfaces", interfaces);
    vmi
}

pub(crate) fn has_addresses(vmi: &Value) -> bool {
    let mut interfaces = vmi.pointer("/status/interfaces").and_then(Value::as_array).into_iter().flatten();
    interfaces.any(|interface| interface.get("ipAddress").is_some())
}

/// The guest has stopped, with this phase.
pub(crate) fn ended(vmi: &Value, phase: &str, now: &str) -> Value {
    let mut vmi = vmi.clone();
    enter(&mut vmi, phase, now);
    vmi
}

fn enter(vmi: &mut Value, phase: &str, now: &str) {
    set(vmi, "/status/phase", phase.into());
    // virt-controller treats a VMI that stops without a timestamp for Running as a failed start.
    array(vmi, "/status/phaseTransitionTimestamps").push(json!({"phase": phase, "phaseTransitionTimestamp": now}));
}

fn interfaces(vmi: &Value, guest: &Guest) -> Value {
    let requested =
        vmi.pointer("/spec/domain/devices/interfaces").and_then(Value::as_array).cloned().unwrap_or_default();
    let present = vmi.pointer("/status/interfaces").and_then(Value::as_array).cloned().unwrap_or_default();
    let networks = vmi.pointer("/spec/networks").and_then(Value::as_array).cloned().unwrap_or_default();
    let reported = requested.iter().enumerate().map(|(index, interface)| {
        let name = interface.get("name").and_then(Value::as_str).unwrap_or_default();
        let is_pod_network = networks
            .iter()
            .any(|network| network.get("name").and_then(Value::as_str) == Some(name) && network.get("pod").is_some());
        let address = if is_pod_network {
            guest.address.clone()
        } else {
            Some(format!("172.16.{}.{}", index % 250, 10 + index % 200))
        };
        let mac = interface.get("macAddress").and_then(Value::as_str).map_or_else(
            || format!("02:00:00:00:{:02x}:{index:02x}", name.bytes().fold(0u8, u8::wrapping_add)),
            str::to_owned,
        );
        // virt-controller owns podInterfaceName and other fields of the same entry: keep them.
        let mut entry = present
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))
            .and_then(Value::as_object)
            .cloned()
            .unwrap_or_default();
        entry.extend(into_map(json!({"name": name, "mac": mac, "infoSource": "domain", "queueCount": 1})));
        if let Some(address) = address.filter(|_| guest.reports_addresses) {
            entry.extend(into_map(json!({"ipAddress": address, "ipAddresses": [address]})));
        }
        Value::Object(entry)
    });
    Value::Array(reported.collect())
}

fn into_map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn set_condition(vmi: &mut Value, type_: &str, status: &str, reason: &Value, now: &str) {
    remove_condition(vmi, type_);
    let mut condition = json!({"type": type_, "status": status, "lastProbeTime": null, "lastTransitionTime": now});
    if !reason.is_null() {
        set(&mut condition, "/reason", reason.clone());
    }
    array(vmi, "/status/conditions").push(condition);
}

pub(crate) fn remove_condition(vmi: &mut Value, type_: &str) {
    array(vmi, "/status/conditions").retain(|condition| condition.get("type").and_then(Value::as_str) != Some(type_));
}

/// Sets the value at a path of object keys, and creates the missing objects on the path.
pub(crate) fn set(target: &mut Value, path: &str, value: Value) {
    if let Some(field) = field_mut(target, path) {
        *field = value;
    }
}

pub(crate) fn remove(target: &mut Value, parent: &str, key: &str) {
    if let Some(map) = target.pointer_mut(parent).and_then(Value::as_object_mut) {
        map.remove(key);
    }
}

fn array<'a>(target: &'a mut Value, path: &str) -> &'a mut Vec<Value> {
    if target.pointer(path).and_then(Value::as_array).is_none() {
        set(target, path, json!([]));
    }
    match target.pointer_mut(path) {
        Some(Value::Array(items)) => items,
        _ => unreachable!("{path} was just set to an array"),
    }
}

fn field_mut<'a>(target: &'a mut Value, path: &str) -> Option<&'a mut Value> {
    path.split('/').skip(1).try_fold(target, |parent, key| {
        let key = key.replace("~1", "/").replace("~0", "~");
        if !parent.is_object() {
            *parent = Value::Object(Map::new());
        }
        parent.as_object_mut().map(|map| map.entry(key).or_insert(Value::Null))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest() -> Guest {
        Guest {
            address: Some("10.1.2.3".to_owned()),
            reports_addresses: true,
            live_migratable: true,
            now: "2026-01-01T00:00:00Z".to_owned(),
        }
    }

    fn scheduled() -> Value {
        json!({
            "spec": {
                "domain": {"devices": {"interfaces": [{"name": "default"}, {"name": "vlan", "macAddress": "02:aa:bb:cc:dd:ee"}]}},
                "networks": [{"name": "default", "pod": {}}, {"name": "vlan", "multus": {"networkName": "x"}}],
            },
            "status": {
                "phase": "Scheduled",
                "conditions": [{"type": "Ready", "status": "False"}],
                "interfaces": [{"name": "default", "podInterfaceName": "eth0"}],
            },
        })
    }

    #[test]
    fn a_started_guest_reports_its_interfaces_and_keeps_fields_of_other_writers() {
        let vmi = started(&scheduled(), &guest());
        assert_eq!(phase(&vmi), "Running");
        assert_eq!(vmi.pointer("/status/interfaces/0/ipAddress").unwrap(), "10.1.2.3");
        assert_eq!(vmi.pointer("/status/interfaces/0/podInterfaceName").unwrap(), "eth0");
        assert_eq!(vmi.pointer("/status/interfaces/1/mac").unwrap(), "02:aa:bb:cc:dd:ee");
        let conditions: Vec<&str> =
            vmi["status"]["conditions"].as_array().unwrap().iter().map(|c| c["type"].as_str().unwrap()).collect();
        assert_eq!(conditions, ["Ready", "LiveMigratable", "StorageLiveMigratable"]);
    }

    #[test]
    fn addresses_may_follow_later() {
        let vmi = started(&scheduled(), &Guest { reports_addresses: false, ..guest() });
        assert!(phase(&vmi) == "Running" && !has_addresses(&vmi));
        let later = with_addresses(&vmi, &guest());
        assert!(has_addresses(&later));
        assert_eq!(later, started(&scheduled(), &guest()));
    }

    #[test]
    fn every_phase_adds_a_transition_timestamp() {
        let vmi = ended(&started(&scheduled(), &guest()), "Succeeded", "2026-01-01T00:01:00Z");
        let phases: Vec<&str> = vmi["status"]["phaseTransitionTimestamps"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["phase"].as_str().unwrap())
            .collect();
        assert_eq!(phases, ["Running", "Succeeded"]);
    }

    #[test]
    fn missing_objects_on_a_path_are_created() {
        let mut value = json!({});
        set(&mut value, "/a/b~1c", 1.into());
        assert_eq!(value, json!({"a": {"b/c": 1}}));
    }
}
