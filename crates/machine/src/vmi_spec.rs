//! What a guest was started with, as far as Machines decide it. A VM's template and the instance that was made of it are
//! brought into the same shape, without what KubeVirt adds and without what follows from the rest, so that what differs
//! is what waits for a restart. It is kept of every guest, so it is small.

use serde_json::{Map, Value, json};

/// No Machine has more devices than this, and an instance may be anybody's.
const MOST_DEVICES: usize = 64;

/// Of an instance's spec (or of a VM's `spec.template.spec`) what a Machine can change.
pub fn comparable_spec(spec: &Value) -> Value {
    let plugged: Vec<&str> = list(spec, "/volumes").filter(|volume| is_plugged(volume)).filter_map(name).collect();
    // What `virtctl addvolume` plugged in is not part of any Machine.
    let fixed = |device: &&Value| !name(device).is_some_and(|name| plugged.contains(&name));
    let disks: Vec<Value> = list(spec, "/domain/devices/disks").filter(fixed).map(disk).collect();
    let volumes: Vec<Value> = list(spec, "/volumes").filter(fixed).map(volume).collect();
    let interfaces: Vec<Value> = list(spec, "/domain/devices/interfaces").map(interface).collect();
    let networks: Vec<Value> =
        list(spec, "/networks").map(|network| keep(network, &["name", "pod", "multus"])).collect();
    let domain = spec.get("domain").unwrap_or(&Value::Null);
    let part = |pointer: &str, keys: &[&str]| domain.pointer(pointer).map(|part| keep(part, keys));
    let whole = object([
        ("cpu", part("/cpu", &["cores", "threads", "sockets"])),
        ("memory", part("/memory", &["guest"])),
        ("machine", part("/machine", &["type"])),
        ("firmware", part("/firmware", &["bootloader"]).filter(|part| *part != json!({}))),
        (
            "features",
            part("/features", &["acpi", "apic", "smm", "hyperv"]).map(features).filter(|part| *part != json!({})),
        ),
        (
            "devices",
            Some(object([
                ("disks", Some(disks.into())),
                ("interfaces", Some(interfaces.into())),
                ("networkInterfaceMultiqueue", domain.pointer("/devices/networkInterfaceMultiqueue").cloned()),
            ])),
        ),
    ]);
    object([("domain", Some(whole)), ("networks", Some(networks.into())), ("volumes", Some(volumes.into()))])
}

/// Whether an instance's spec names this Secret anywhere in its volumes. One that could not be read may.
pub fn names_secret(spec: &Value, secret: &str) -> bool {
    !spec.is_object() || spec.get("volumes").is_some_and(|volumes| mentions(volumes, secret))
}

fn mentions(value: &Value, text: &str) -> bool {
    match value {
        Value::String(have) => have == text,
        Value::Array(items) => items.iter().any(|item| mentions(item, text)),
        Value::Object(fields) => fields.values().any(|field| mentions(field, text)),
        _ => false,
    }
}

/// A Windows guest's set of features is ours as a whole; KubeVirt fills in its parts.
fn features(mut features: Value) -> Value {
    if let Some(hyperv) = features.get_mut("hyperv") {
        *hyperv = json!({});
    }
    features
}

/// The bus of a disk follows its type.
fn disk(disk: &Value) -> Value {
    object([
        ("name", disk.get("name").cloned()),
        ("bootOrder", disk.get("bootOrder").cloned()),
        ("disk", disk.get("disk").map(|target| keep(target, &["readonly"]))),
        ("cdrom", disk.get("cdrom").map(|_| json!({}))),
    ])
}

/// The names of PVCs and of the cloud-init Secret follow those of the Machine and the disk.
fn volume(volume: &Value) -> Value {
    let there = |pointer: &str| volume.pointer(pointer).map(|_| json!({}));
    let network_data = there("/cloudInitNoCloud/networkDataSecretRef");
    object([
        ("name", volume.get("name").cloned()),
        ("persistentVolumeClaim", there("/persistentVolumeClaim")),
        ("containerDisk", volume.get("containerDisk").map(|part| keep(part, &["image"]))),
        ("cloudInitNoCloud", there("/cloudInitNoCloud").map(|_| object([("networkDataSecretRef", network_data)]))),
    ])
}

/// How an interface is bound follows its network.
fn interface(interface: &Value) -> Value {
    keep(interface, &["name", "bootOrder", "model", "macAddress"])
}

fn is_plugged(volume: &Value) -> bool {
    let parts = volume.as_object().into_iter().flat_map(Map::values);
    parts.into_iter().any(|part| part.get("hotpluggable") == Some(&Value::Bool(true)))
}

fn list<'a>(spec: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    spec.pointer(pointer).and_then(Value::as_array).into_iter().flatten().take(MOST_DEVICES)
}

fn name(device: &Value) -> Option<&str> {
    device.get("name")?.as_str()
}

fn keep(value: &Value, keys: &[&str]) -> Value {
    object(keys.iter().map(|key| (*key, value.get(*key).cloned())))
}

fn object<'a>(fields: impl IntoIterator<Item = (&'a str, Option<Value>)>) -> Value {
    fields.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect::<Map<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_named_in_whatever_kind_of_volume() {
        let with = |volume: Value| json!({"volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "web-root"}}, volume]});
        for volume in [
            json!({"name": "a", "cloudInitNoCloud": {"secretRef": {"name": "web-cloudinit"}}}),
            json!({"name": "a", "cloudInitNoCloud": {"networkDataSecretRef": {"name": "web-cloudinit"}}}),
            json!({"name": "a", "cloudInitConfigDrive": {"secretRef": {"name": "web-cloudinit"}}}),
            json!({"name": "a", "secret": {"secretName": "web-cloudinit"}}),
        ] {
            assert!(names_secret(&with(volume.clone()), "web-cloudinit"), "{volume}");
        }
        assert!(!names_secret(&with(json!({"name": "a", "secret": {"secretName": "other"}})), "web-cloudinit"));
        assert!(!names_secret(&json!({}), "web-cloudinit"));
        assert!(names_secret(&Value::Null, "web-cloudinit"), "nothing is known of it");
    }

    /// What virt-api v1.8.4 makes of a template when it starts a guest.
    #[test]
    fn kubevirts_defaults_are_no_change() {
        let template = json!({
            "domain": {
                "cpu": {"cores": 2, "threads": 1, "sockets": 1}, "memory": {"guest": "4Gi"}, "machine": {"type": "q35"},
                "features": {"hyperv": {"relaxed": {}, "spinlocks": {"spinlocks": 8191}}},
                "firmware": {"uuid": "u", "serial": "u"},
                "devices": {
                    "disks": [{"name": "root", "bootOrder": 1, "disk": {"bus": "virtio"}}, {"name": "cd", "cdrom": {"bus": "sata"}}],
                    "interfaces": [{"name": "default", "model": "virtio", "macAddress": "02:00:00:00:00:01", "masquerade": {}}],
                },
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "web-root"}}, {"name": "cd", "containerDisk": {"image": "i"}}],
        });
        let started = json!({
            "architecture": "amd64",
            "domain": {
                "cpu": {"cores": 2, "threads": 1, "sockets": 1, "maxSockets": 4, "model": "host-model"},
                "memory": {"guest": "4Gi", "maxGuest": "16Gi"}, "machine": {"type": "q35"},
                "features": {"hyperv": {"relaxed": {"enabled": true}, "spinlocks": {"enabled": true, "spinlocks": 8191}}},
                "firmware": {"uuid": "u", "serial": "u"}, "resources": {"requests": {"memory": "4Gi"}},
                "devices": {
                    "disks": [
                        {"name": "root", "bootOrder": 1, "disk": {"bus": "virtio"}},
                        {"name": "cd", "cdrom": {"bus": "sata", "readonly": true, "tray": "closed"}},
                        {"name": "plugged", "disk": {"bus": "scsi"}, "serial": "s"},
                    ],
                    "interfaces": [{"name": "default", "model": "virtio", "macAddress": "02:00:00:00:00:01", "masquerade": {}, "state": "up"}],
                },
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [
                {"name": "root", "persistentVolumeClaim": {"claimName": "web-root"}},
                {"name": "cd", "containerDisk": {"image": "i", "imagePullPolicy": "Always"}},
                {"name": "plugged", "persistentVolumeClaim": {"claimName": "p", "hotpluggable": true}},
            ],
        });
        assert_eq!(comparable_spec(&started), comparable_spec(&template));
    }

    #[test]
    fn strange_specs_are_read_all_the_same() {
        for spec in [json!(null), json!(7), json!({"domain": [], "volumes": {"a": 1}, "networks": [1, "x", null]})] {
            let _ = comparable_spec(&spec);
        }
    }
}
