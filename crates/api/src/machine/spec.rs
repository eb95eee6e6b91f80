//! The parts of a Machine's spec.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{limits, schema};

/// CPU and memory.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// Overrides the template field by field: cores alone keeps its threads and sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpu>,
    /// How much memory, overriding the template's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
}

/// The guest has cores × threads × sockets CPUs.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Cpu {
    /// Cores per socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 512))]
    pub cores: Option<u32>,
    /// Threads per core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 8))]
    pub threads: Option<u32>,
    /// Sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub sockets: Option<u32>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Memory {
    /// The guest's memory, for example 4Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = limits::SIZE_LENGTH),
        regex(pattern = limits::SIZE),
        extend("x-kubernetes-validations" = schema::size_rules())
    )]
    pub size: Option<String>,
}

/// A disk of the machine, backed by a PersistentVolumeClaim or by a container image.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::disk_rules()))]
pub struct Disk {
    /// What the disk is called. The PVC is named {machine}-{disk}; cloudinitdisk is reserved.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::LABEL))]
    pub name: String,
    /// How big, for example 20Gi. A running machine's disk can grow, never shrink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = limits::SIZE_LENGTH),
        regex(pattern = limits::SIZE),
        extend("x-kubernetes-validations" = schema::size_rules())
    )]
    pub size: Option<String>,
    /// The StorageClass; default or nothing means the cluster's default class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub storage_class: Option<String>,
    /// ReadWriteOnce (the default), ReadWriteMany (needed for live migration) or ReadOnlyMany (needs a source).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]))]
    pub access_mode: Option<String>,
    /// Filesystem (the default) or Block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["Filesystem", "Block"]))]
    pub volume_mode: Option<String>,
    /// disk (the default) or cdrom.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["disk", "cdrom"]))]
    pub kind: Option<String>,
    /// What is on it at first. Nothing: an empty disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<DiskSource>,
    /// What becomes of the PVC when the Machine is deleted: Delete (the default) or Retain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["Delete", "Retain"]))]
    pub on_delete: Option<String>,
}

/// Exactly one of these.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::source_rules()))]
pub struct DiskSource {
    /// The contents of a container image, read-only at the source and writable until the machine restarts. It has no
    /// PVC: size, storageClass, accessMode and volumeMode do not apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_disk: Option<ContainerDiskSource>,
    /// A copy of a PVC of the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<NamedSource>,
    /// A copy of a VolumeSnapshot of the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<NamedSource>,
    /// A disk image at a URL; needs CDI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<UrlSource>,
    /// A disk image in a container registry (docker://…); needs CDI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registry: Option<UrlSource>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerDiskSource {
    /// For example quay.io/containerdisks/fedora:42.
    #[schemars(length(min = 1, max = 512))]
    pub image: String,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NamedSource {
    /// What the PVC or the VolumeSnapshot is called. It is read once, when the disk is made.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UrlSource {
    /// Where the image is, for example https://images.example.com/fedora.qcow2 or docker://quay.io/containerdisks/fedora:42.
    #[schemars(length(min = 1, max = 2048))]
    pub url: String,
}

/// A network interface.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Network {
    /// What the interface is called in KubeVirt.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::LABEL))]
    pub name: String,
    /// A NetworkConfiguration of the namespace, or pod for the pod network.
    #[schemars(length(min = 1, max = 253))]
    pub network_name: String,
    /// virtio (the default), e1000 or rtl8139.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["virtio", "e1000", "rtl8139"]))]
    pub model: Option<String>,
    /// A unicast address. Without one it is made of the Machine's UID, so that it survives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 17, max = 17), regex(pattern = schema::UNICAST_MAC))]
    pub mac_address: Option<String>,
}

/// What cloud-init gets. It may hold passwords and keys, therefore `Debug` shows none of it.
#[derive(Serialize, Deserialize, Clone, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CloudInit {
    /// User data, for example a #cloud-config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 131072))]
    pub user_data: Option<String>,
    /// Network data (version 1 or 2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 131072))]
    pub network_data: Option<String>,
    /// More user data, from a Secret of the namespace. Together with userData both parts are given, inline first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretKeyRef>,
}

impl fmt::Debug for CloudInit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CloudInit").finish_non_exhaustive()
    }
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretKeyRef {
    /// What the Secret is called.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// userdata if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub key: Option<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Domain {
    /// The hardware that the guest sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<DomainMachine>,
    /// What the hardware offers to the guest beyond the usual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features: Option<Features>,
    /// What starts the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<Firmware>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DomainMachine {
    /// pc-q35 (the default), pc-i440fx, or a QEMU machine type that the cluster's KubeVirt allows.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[A-Za-z0-9._-]+$"))]
    pub kind: Option<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Features {
    /// ACPI; on if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acpi: Option<bool>,
    /// APIC; on if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apic: Option<bool>,
    /// What Windows guests like; off if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hyperv: Option<bool>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Firmware {
    /// BIOS (if absent) or EFI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootloader: Option<Bootloader>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::bootloader_rules()))]
pub struct Bootloader {
    /// EFI instead of BIOS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub efi: Option<bool>,
    /// Secure boot; needs efi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<bool>,
}
