//! The VirtualMachine, and the difference between a live one and the desired one.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};
use vitivirt_api::{Operation, machine::CLOUD_INIT_DISK};

use super::{
    cloud_init, labels, object_labels, owner_reference,
    vm_types::{
        CdromTarget, Clock, CloudInitNoCloud, ContainerDisk, Devices, DiskTarget, Efi, Empty, Hyperv, Interface,
        LocalReference, MachineType, Multus, PvcVolume, TemplateMetadata, VirtualMachine, VirtualMachineSpec,
        VmBootloader, VmCpu, VmDisk, VmDomain, VmFeatures, VmFirmware, VmMemory, VmNetwork, VmToggle, VmiSpec,
        VmiTemplate, Volume,
    },
};
use crate::resolve::{
    Attachment, BootKind, DiskBacking, DiskKind, PowerState, Resolved, ResolvedCloudInit, ResolvedDisk, ResolvedNetwork,
};

/// The whole object, for its first write.
pub fn render(resolved: &Resolved) -> VirtualMachine {
    VirtualMachine {
        metadata: ObjectMeta {
            labels: Some(object_labels(resolved)),
            owner_references: Some(vec![owner_reference(&resolved.id)]),
            ..ObjectMeta::default()
        },
        spec: spec(resolved),
    }
}

pub fn spec(resolved: &Resolved) -> VirtualMachineSpec {
    let order = BootOrder::new(resolved);
    let mut disks: Vec<VmDisk> = resolved.disks.iter().map(|disk| render_disk(disk, order.disk(&disk.name))).collect();
    let mut volumes: Vec<Volume> = resolved.disks.iter().map(render_volume).collect();
    if let Some(cloud_init) = &resolved.cloud_init {
        disks.push(VmDisk {
            name: CLOUD_INIT_DISK.to_owned(),
            boot_order: None,
            disk: Some(DiskTarget { bus: "virtio", readonly: false }),
            cdrom: None,
        });
        volumes.push(cloud_init_volume(resolved, cloud_init));
    }
    VirtualMachineSpec {
        run_strategy: match resolved.power {
            PowerState::Running => "Always",
            PowerState::Stopped => "Halted",
        },
        template: VmiTemplate {
            metadata: TemplateMetadata { labels: labels(resolved) },
            spec: VmiSpec { domain: domain(resolved, disks, &order), networks: networks(resolved), volumes },
        },
    }
}

fn domain(resolved: &Resolved, disks: Vec<VmDisk>, order: &BootOrder<'_>) -> VmDomain {
    let multiqueue = resolved.cpu.cpus() > 1 && resolved.networks.iter().any(|network| network.model == "virtio");
    let toggle = |enabled| VmToggle { enabled };
    VmDomain {
        cpu: VmCpu { cores: resolved.cpu.cores, threads: resolved.cpu.threads, sockets: resolved.cpu.sockets },
        memory: VmMemory { guest: resolved.memory.to_string() },
        devices: Devices { disks, interfaces: interfaces(resolved, order), network_interface_multiqueue: multiqueue },
        machine: resolved.machine_type.clone().map(|kind| MachineType { kind }),
        features: VmFeatures {
            acpi: resolved.acpi.map(toggle),
            apic: resolved.apic.map(toggle),
            hyperv: resolved.hyperv.then(Hyperv::default),
            smm: resolved.secure_boot.then(|| toggle(true)),
        },
        firmware: VmFirmware {
            // Otherwise KubeVirt chooses both and writes them into the VM, and a VM that is created again gets new
            // ones.
            uuid: resolved.id.identity().to_owned(),
            serial: resolved.id.identity().to_owned(),
            bootloader: resolved.efi.then_some(VmBootloader { efi: Efi { secure_boot: resolved.secure_boot } }),
        },
        clock: resolved.hyperv.then(Clock::default),
    }
}

fn interfaces(resolved: &Resolved, order: &BootOrder<'_>) -> Vec<Interface> {
    let interface = |network: &ResolvedNetwork| Interface {
        name: network.name.clone(),
        boot_order: order.interface(&network.name),
        model: network.model.clone(),
        mac_address: network.mac.clone(),
        masquerade: (network.attachment == Attachment::Pod).then_some(Empty {}),
        bridge: (network.attachment != Attachment::Pod).then_some(Empty {}),
    };
    resolved.networks.iter().map(interface).collect()
}

fn networks(resolved: &Resolved) -> Vec<VmNetwork> {
    let network = |network: &ResolvedNetwork| VmNetwork {
        name: network.name.clone(),
        pod: (network.attachment == Attachment::Pod).then_some(Empty {}),
        multus: network.configuration().map(|name| Multus { network_name: name.to_owned() }),
    };
    resolved.networks.iter().map(network).collect()
}

fn cloud_init_volume(resolved: &Resolved, cloud_init: &ResolvedCloudInit) -> Volume {
    let secret = LocalReference { name: cloud_init::secret_name(resolved.id.name()) };
    Volume {
        cloud_init_no_cloud: Some(CloudInitNoCloud {
            network_data_secret_ref: cloud_init.network_data.then(|| secret.clone()),
            secret_ref: secret,
        }),
        ..empty_volume(CLOUD_INIT_DISK)
    }
}

fn render_disk(disk: &ResolvedDisk, boot_order: Option<u32>) -> VmDisk {
    let target = DiskTarget { bus: "virtio", readonly: disk.read_only() };
    VmDisk {
        name: disk.name.clone(),
        boot_order,
        disk: (disk.kind == DiskKind::Disk).then_some(target),
        // virtio has no CD drives.
        cdrom: (disk.kind == DiskKind::Cdrom).then_some(CdromTarget { bus: "sata" }),
    }
}

fn empty_volume(name: &str) -> Volume {
    Volume { name: name.to_owned(), persistent_volume_claim: None, container_disk: None, cloud_init_no_cloud: None }
}

fn render_volume(disk: &ResolvedDisk) -> Volume {
    match &disk.backing {
        DiskBacking::ContainerDisk { image } => {
            Volume { container_disk: Some(ContainerDisk { image: image.clone() }), ..empty_volume(&disk.name) }
        }
        DiskBacking::Pvc { pvc, .. } => {
            Volume { persistent_volume_claim: Some(PvcVolume { claim_name: pvc.clone() }), ..empty_volume(&disk.name) }
        }
    }
}

/// The boot order of the devices. Without a `bootOrder` in the spec, only the boot disk has one.
pub(crate) struct BootOrder<'a> {
    pub(crate) disks: Vec<&'a str>,
    pub(crate) interfaces: Vec<&'a str>,
    interfaces_after: usize,
}

impl<'a> BootOrder<'a> {
    pub(crate) fn new(resolved: &'a Resolved) -> Self {
        let of_kind = |kind| resolved.disks.iter().filter(move |disk| disk.kind == kind).map(|disk| disk.name.as_str());
        // The boot disk is the disk named root, else the first disk.
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

/// A VM's spec without the defaults that KubeVirt adds, so that it can be compared with [`spec`].
pub fn without_defaults(mut spec: Value) -> Value {
    remove(&mut spec, "/template/metadata", "creationTimestamp");
    remove(&mut spec, "/template/metadata/annotations", "kubevirt.io/pci-topology-version");
    remove(&mut spec, "/template/spec", "architecture");
    // KubeVirt serializes these even if they are empty.
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

/// The operations that turn `live` into `desired` and keep what KubeVirt added: replacing the whole spec would remove
/// KubeVirt's defaults, and some of them are hardware of the guest. KubeVirt and virtctl change lists too, for example when they
/// restore or add a disk, so a list is replaced only if the server still has the one that was observed.
pub fn changes(live: &Value, desired: &Value) -> Vec<Operation> {
    let mut operations = Vec::new();
    collect("/spec", live, desired, &mut operations);
    operations
}

fn collect(path: &str, live: &Value, desired: &Value, operations: &mut Vec<Operation>) {
    let (Value::Object(have), Value::Object(want)) = (live, desired) else {
        if live != desired {
            let operation = Operation::set(path, desired.clone());
            operations.push(if live.is_array() { operation.expecting(live.clone()) } else { operation });
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
