//! The VirtualMachine, and whether one that exists is what it should be.

use serde_json::{Value, json};
use vitivirt_api::Operation;
use vitivirt_api::machine::{CLOUD_INIT_DISK, Machine};

use super::vm_types::{
    Bootloader, CdromTarget, ClaimVolume, Clock, CloudInitNoCloud, ContainerDisk, Cpu, Devices, Disk, DiskTarget,
    Domain, Efi, Empty, Features, Firmware, Hyperv, InstanceSpec, Interface, LocalReference, MachineType, Memory,
    Multus, Network, Template, TemplateMetadata, Toggle, VirtualMachineSpec, Volume,
};
use super::{cloud_init, labels, owner};
use crate::resolve::{Attachment, BootKind, Content, DiskKind, Power, Resolved, ResolvedDisk};

/// The whole object, for its first write.
pub fn render(machine: &Machine, resolved: &Resolved) -> Value {
    json!({
        "metadata": {"labels": labels(machine), "ownerReferences": [owner(machine)]},
        "spec": spec(machine, resolved),
    })
}

pub fn spec(machine: &Machine, resolved: &Resolved) -> Value {
    let name = machine.metadata.name.as_deref().unwrap_or_default();
    let order = BootOrder::of(resolved);
    let mut disks: Vec<Disk> = resolved.disks.iter().map(|disk| render_disk(disk, order.disk(&disk.name))).collect();
    let mut volumes: Vec<Volume> = resolved.disks.iter().map(render_volume).collect();
    if let Some(cloud_init) = &resolved.cloud_init {
        disks.push(Disk {
            name: CLOUD_INIT_DISK.to_owned(),
            boot_order: None,
            disk: Some(DiskTarget { bus: "virtio", readonly: false }),
            cdrom: None,
        });
        let secret = LocalReference { name: cloud_init::secret_name(name) };
        volumes.push(Volume {
            cloud_init_no_cloud: Some(CloudInitNoCloud {
                network_data_secret_ref: cloud_init.network_data.then(|| secret.clone()),
                secret_ref: secret,
            }),
            ..empty_volume(CLOUD_INIT_DISK)
        });
    }
    let interfaces: Vec<Interface> = resolved
        .networks
        .iter()
        .map(|network| Interface {
            name: network.name.clone(),
            boot_order: order.interface(&network.name),
            model: network.model.clone(),
            mac_address: network.mac.clone(),
            masquerade: (network.attachment == Attachment::Pod).then_some(Empty {}),
            bridge: (network.attachment != Attachment::Pod).then_some(Empty {}),
        })
        .collect();
    let networks = resolved
        .networks
        .iter()
        .map(|network| Network {
            name: network.name.clone(),
            pod: (network.attachment == Attachment::Pod).then_some(Empty {}),
            multus: network.configuration().map(|name| Multus { network_name: name.to_owned() }),
        })
        .collect();
    let multiqueue = resolved.cpu.cpus() > 1 && resolved.networks.iter().any(|network| network.model == "virtio");
    let toggle = |enabled| Toggle { enabled };
    let spec = VirtualMachineSpec {
        run_strategy: match resolved.power {
            Power::Running => "Always",
            Power::Stopped => "Halted",
        },
        template: Template {
            metadata: TemplateMetadata { labels: labels(machine) },
            spec: InstanceSpec {
                domain: Domain {
                    cpu: Cpu {
                        cores: resolved.cpu.cores,
                        threads: resolved.cpu.threads,
                        sockets: resolved.cpu.sockets,
                    },
                    memory: Memory { guest: resolved.memory.to_string() },
                    devices: Devices { disks, interfaces, network_interface_multiqueue: multiqueue },
                    machine: MachineType { kind: resolved.machine_type.clone() },
                    features: Features {
                        acpi: resolved.acpi.map(toggle),
                        apic: resolved.apic.map(toggle),
                        hyperv: resolved.hyperv.then(Hyperv::default),
                        smm: resolved.secure_boot.then(|| toggle(true)),
                    },
                    firmware: Firmware {
                        // KubeVirt would choose both and write them into the VM; ours survive a VM that is made anew.
                        uuid: machine.metadata.uid.clone().unwrap_or_default(),
                        serial: machine.metadata.uid.clone().unwrap_or_default(),
                        bootloader: resolved
                            .efi
                            .then_some(Bootloader { efi: Efi { secure_boot: resolved.secure_boot } }),
                    },
                    clock: resolved.hyperv.then(Clock::default),
                },
                networks,
                volumes,
            },
        },
    };
    serde_json::to_value(spec).unwrap_or_default()
}

fn render_disk(disk: &ResolvedDisk, boot_order: Option<u32>) -> Disk {
    let target = DiskTarget { bus: "virtio", readonly: disk.read_only() };
    Disk {
        name: disk.name.clone(),
        boot_order,
        disk: (disk.kind == DiskKind::Disk).then_some(target),
        // A CD drive has no virtio.
        cdrom: (disk.kind == DiskKind::Cdrom).then_some(CdromTarget { bus: "sata" }),
    }
}

fn empty_volume(name: &str) -> Volume {
    Volume { name: name.to_owned(), persistent_volume_claim: None, container_disk: None, cloud_init_no_cloud: None }
}

fn render_volume(disk: &ResolvedDisk) -> Volume {
    match &disk.content {
        Content::ContainerDisk { image } => {
            Volume { container_disk: Some(ContainerDisk { image: image.clone() }), ..empty_volume(&disk.name) }
        }
        Content::Pvc { pvc, .. } => Volume {
            persistent_volume_claim: Some(ClaimVolume { claim_name: pvc.clone() }),
            ..empty_volume(&disk.name)
        },
    }
}

/// Which device boots when. Without a wish only the boot disk has a number.
struct BootOrder<'a> {
    disks: Vec<&'a str>,
    interfaces: Vec<&'a str>,
    interfaces_after: usize,
}

impl<'a> BootOrder<'a> {
    fn of(resolved: &'a Resolved) -> Self {
        let of_kind = |kind| resolved.disks.iter().filter(move |disk| disk.kind == kind).map(|disk| disk.name.as_str());
        // The boot disk is the one named root, else the first.
        let mut hard: Vec<&str> = of_kind(DiskKind::Disk).collect();
        hard.sort_by_key(|name| *name != "root");
        if resolved.boot_order.is_empty() {
            let first = hard.first().copied().or_else(|| of_kind(DiskKind::Cdrom).next());
            return BootOrder { disks: first.into_iter().collect(), interfaces: Vec::new(), interfaces_after: 0 };
        }
        let mut order = BootOrder { disks: Vec::new(), interfaces: Vec::new(), interfaces_after: 0 };
        for kind in &resolved.boot_order {
            match kind {
                BootKind::Disk => order.disks.extend(&hard),
                BootKind::Cdrom => order.disks.extend(of_kind(DiskKind::Cdrom)),
                BootKind::Network => {
                    order.interfaces_after = order.disks.len();
                    order.interfaces = resolved.networks.iter().map(|network| network.name.as_str()).collect();
                }
            }
        }
        order
    }

    fn disk(&self, name: &str) -> Option<u32> {
        let at = self.disks.iter().position(|disk| *disk == name)?;
        let before = if at < self.interfaces_after { 0 } else { self.interfaces.len() };
        u32::try_from(1 + at + before).ok()
    }

    fn interface(&self, name: &str) -> Option<u32> {
        let at = self.interfaces.iter().position(|interface| *interface == name)?;
        u32::try_from(1 + at + self.interfaces_after).ok()
    }
}

/// A VM's spec without what KubeVirt adds by itself: what is left can be compared with [`spec`].
pub fn without_defaults(mut spec: Value) -> Value {
    remove(&mut spec, "/template/metadata", "creationTimestamp");
    remove(&mut spec, "/template/metadata/annotations", "kubevirt.io/pci-topology-version");
    remove(&mut spec, "/template/spec", "architecture");
    // What KubeVirt's types write down although nothing is in it.
    for (parent, key) in [
        ("/template/metadata", "annotations"),
        ("/template/spec/domain", "resources"),
        ("/template/spec/domain/features", "acpi"),
    ] {
        if spec.pointer(&format!("{parent}/{key}")).is_some_and(|value| *value == json!({})) {
            remove(&mut spec, parent, key);
        }
    }
    spec
}

/// What turns `live` into `wanted`, without touching what KubeVirt added around it: replacing the whole spec would take
/// its defaults away, and some of them are the guest's hardware.
pub fn changes(live: &Value, wanted: &Value) -> Vec<Operation> {
    let mut operations = Vec::new();
    collect("/spec", live, wanted, &mut operations);
    operations
}

fn collect(path: &str, live: &Value, wanted: &Value, operations: &mut Vec<Operation>) {
    let (Value::Object(have), Value::Object(want)) = (live, wanted) else {
        if live != wanted {
            operations.push(Operation::set(path, wanted.clone()));
        }
        return;
    };
    for key in have.keys().filter(|key| !want.contains_key(*key)) {
        operations.push(Operation::remove(format!("{path}/{}", Operation::escape(key))));
    }
    for (key, value) in want {
        let path = format!("{path}/{}", Operation::escape(key));
        match have.get(key) {
            Some(current) => collect(&path, current, value, operations),
            None => operations.push(Operation::set(path, value.clone())),
        }
    }
}

fn remove(value: &mut Value, parent: &str, key: &str) {
    if let Some(Value::Object(map)) = value.pointer_mut(parent) {
        map.remove(key);
    }
}
