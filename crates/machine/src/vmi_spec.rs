//! The part of a VMI's spec that a Machine decides. It makes a VMI comparable with the template of its VM: without
//! KubeVirt's defaults and without fields that follow from others. The difference is what waits for a restart. The
//! cache keeps it for every VMI, so it is small.

use serde_json::{Map, Value, json};

/// More devices than any Machine has. A VMI of another owner may have more.
const MAX_DEVICES: usize = 64;

/// The fields of a VMI's spec, or of a VM's `spec.template.spec`, that a Machine can change.
pub fn comparable_spec(spec: &Value) -> Value {
    let hotplugged: Vec<&str> =
        list(spec, "/volumes").filter(|volume| is_hotplugged(volume)).filter_map(name).collect();
    // Volumes that `virtctl addvolume` hotplugged are not part of a Machine.
    let fixed = |device: &&Value| !name(device).is_some_and(|name| hotplugged.contains(&name));
    let disks: Vec<Value> = list(spec, "/domain/devices/disks").filter(fixed).map(disk).collect();
    let volumes: Vec<Value> = list(spec, "/volumes").filter(fixed).map(volume).collect();
    let interfaces: Vec<Value> = list(spec, "/domain/devices/interfaces").map(interface).collect();
    let networks: Vec<Value> =
        list(spec, "/networks").map(|network| keep(network, &["name", "pod", "multus"])).collect();
    let domain = spec.get("domain").unwrap_or(&Value::Null);
    let part = |pointer: &str, keys: &[&str]| domain.pointer(pointer).map(|part| keep(part, keys));
    let comparable_domain = object([
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
    object([
        ("domain", Some(comparable_domain)),
        ("networks", Some(networks.into())),
        ("volumes", Some(volumes.into())),
    ])
}

/// Whether a volume of the VMI refers to the Secret. True if the spec is unreadable.
pub fn references_secret(spec: &Value, secret: &str) -> bool {
    !spec.is_object() || spec.get("volumes").is_some_and(|volumes| mentions(volumes, secret))
}

fn mentions(value: &Value, text: &str) -> bool {
    match value {
        Value::String(string) => string == text,
        Value::Array(items) => items.iter().any(|item| mentions(item, text)),
        Value::Object(fields) => fields.values().any(|field| mentions(field, text)),
        _ => false,
    }
}

/// The operator sets the Hyper-V features as a whole; KubeVirt adds their details. A feature without `enabled` is enabled, and
/// so is ACPI in a VM that does not mention it.
fn features(mut features: Value) -> Value {
    let Some(fields) = features.as_object_mut() else { return features };
    for (name, feature) in fields.iter_mut() {
        if name == "hyperv" || *feature == json!({"enabled": true}) {
            *feature = json!({});
        }
    }
    if fields.get("acpi") == Some(&json!({})) {
        fields.remove("acpi");
    }
    features
}

/// Without the bus of a disk, which follows from its type.
fn disk(disk: &Value) -> Value {
    object([
        ("name", disk.get("name").cloned()),
        ("bootOrder", disk.get("bootOrder").cloned()),
        ("disk", disk.get("disk").map(|target| keep(target, &["readonly"]))),
        ("cdrom", disk.get("cdrom").map(|_| json!({}))),
    ])
}

/// Without the names of PVCs and of the cloud-init Secret, which follow from the names of Machine and disk.
fn volume(volume: &Value) -> Value {
    let exists = |pointer: &str| volume.pointer(pointer).map(|_| json!({}));
    let network_data = exists("/cloudInitNoCloud/networkDataSecretRef");
    object([
        ("name", volume.get("name").cloned()),
        ("persistentVolumeClaim", exists("/persistentVolumeClaim")),
        ("containerDisk", volume.get("containerDisk").map(|part| keep(part, &["image"]))),
        ("cloudInitNoCloud", exists("/cloudInitNoCloud").map(|_| object([("networkDataSecretRef", network_data)]))),
    ])
}

/// Without the binding of an interface, which follows from its network.
fn interface(interface: &Value) -> Value {
    keep(interface, &["name", "bootOrder", "model", "macAddress"])
}

fn is_hotplugged(volume: &Value) -> bool {
    let parts = volume.as_object().into_iter().flat_map(Map::values);
    parts.into_iter().any(|part| part.get("hotpluggable") == Some(&Value::Bool(true)))
}

fn list<'a>(spec: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    spec.pointer(pointer).and_then(Value::as_array).into_iter().flatten().take(MAX_DEVICES)
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
    fn a_secret_is_found_in_every_kind_of_volume() {
        let with = |volume: Value| json!({"volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "web-root"}}, volume]});
        for volume in [
            json!({"name": "a", "cloudInitNoCloud": {"secretRef": {"name": "web-cloudinit"}}}),
            json!({"name": "a", "cloudInitNoCloud": {"networkDataSecretRef": {"name": "web-cloudinit"}}}),
            json!({"name": "a", "cloudInitConfigDrive": {"secretRef": {"name": "web-cloudinit"}}}),
            json!({"name": "a", "secret": {"secretName": "web-cloudinit"}}),
        ] {
            assert!(references_secret(&with(volume.clone()), "web-cloudinit"), "{volume}");
        }
        assert!(!references_secret(&with(json!({"name": "a", "secret": {"secretName": "other"}})), "web-cloudinit"));
        assert!(!references_secret(&json!({}), "web-cloudinit"));
        assert!(references_secret(&Value::Null, "web-cloudinit"), "unreadable spec");
    }

    /// The second spec is what virt-api v1.8.4 creates from the template.
    #[test]
    fn the_defaults_of_kubevirt_are_not_a_change() {
        let template = json!({
            "domain": {
                "cpu": {"cores": 2, "threads": 1, "sockets": 1}, "memory": {"guest": "4Gi"}, "machine": {"type": "q35"},
                "features": {"apic": {}, "hyperv": {"relaxed": {}, "spinlocks": {"spinlocks": 8191}}},
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
                "features": {
                    "acpi": {"enabled": true}, "apic": {"enabled": true},
                    "hyperv": {"relaxed": {"enabled": true}, "spinlocks": {"enabled": true, "spinlocks": 8191}},
                },
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
    fn malformed_specs_do_not_panic() {
        for spec in [json!(null), json!(7), json!({"domain": [], "volumes": {"a": 1}, "networks": [1, "x", null]})] {
            let _ = comparable_spec(&spec);
        }
    }
}
