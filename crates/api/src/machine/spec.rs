//! The parts of a Machine's spec. The doc comments are the descriptions of the CRD.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{limits, schema};

/// CPU and memory.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// CPU topology. The guest has cores × threads × sockets CPUs. Overrides the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpu>,
    /// Memory. Overrides the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
}

/// CPU topology. The guest has cores × threads × sockets CPUs.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Cpu {
    /// Number of cores per socket. Default: from the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 512))]
    pub cores: Option<u32>,
    /// Number of threads per core. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 8))]
    pub threads: Option<u32>,
    /// Number of sockets. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub sockets: Option<u32>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Memory {
    /// Memory of the guest, for example 4Gi. Default: from the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = limits::SIZE_LENGTH),
        extend("x-kubernetes-validations" = schema::size_rules())
    )]
    pub size: Option<String>,
}

/// A disk of the machine, backed by a PVC or a container image.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::disk_rules()))]
pub struct Disk {
    /// Name of the disk. Its PVC is named {machine}-{disk}. The name cloudinitdisk is reserved.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::LABEL))]
    pub name: String,
    /// Size, for example 20Gi. Required, except for a containerDisk and for the root disk of a template. A disk can be
    /// expanded, even while the machine runs, but it cannot shrink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = limits::SIZE_LENGTH),
        extend("x-kubernetes-validations" = schema::size_rules())
    )]
    pub size: Option<String>,
    /// Name of the StorageClass. Default: the default StorageClass of the cluster. The value
    /// "default" selects it too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = schema::SUBDOMAIN))]
    pub storage_class: Option<String>,
    /// Access mode: ReadWriteOnce, ReadWriteMany (required for live migration) or ReadOnlyMany (requires a source).
    /// Default: ReadWriteOnce.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]))]
    pub access_mode: Option<String>,
    /// Volume mode: Filesystem or Block. Default: Filesystem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["Filesystem", "Block"]))]
    pub volume_mode: Option<String>,
    /// Device type: disk or cdrom. Default: disk.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["disk", "cdrom"]))]
    pub kind: Option<String>,
    /// Initial content. Default: an empty disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<DiskSource>,
    /// What happens to the PVC when the Machine is deleted: Delete or Retain. Default: Delete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["Delete", "Retain"]))]
    pub on_delete: Option<String>,
}

/// Initial content of a disk. Exactly one field must be set.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::source_rules()))]
pub struct DiskSource {
    /// Container image that contains the disk. Changes that the guest makes are lost when its VirtualMachineInstance
    /// stops; a reboot inside the guest keeps them. The disk has no PVC: size is ignored, and storageClass, accessMode
    /// and volumeMode must not be set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_disk: Option<ContainerDiskSource>,
    /// PVC to copy, in the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<NamedSource>,
    /// VolumeSnapshot to restore, in the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<NamedSource>,
    /// Disk image at an HTTP or HTTPS URL. Requires CDI (Containerized Data Importer).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<UrlSource>,
    /// Disk image in a container registry (docker://…). Requires CDI (Containerized Data Importer).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registry: Option<UrlSource>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerDiskSource {
    /// Image name, for example quay.io/containerdisks/fedora:42.
    #[schemars(length(min = 1, max = 512))]
    pub image: String,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NamedSource {
    /// Name of the PVC (source pvc) or VolumeSnapshot (source snapshot). Its content is copied once, when
    /// the disk is created.
    #[schemars(length(min = 1, max = 253), regex(pattern = schema::SUBDOMAIN))]
    pub name: String,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UrlSource {
    /// URL of the image, for example https://images.example.com/fedora.qcow2 (source http) or
    /// docker://quay.io/containerdisks/fedora:42 (source registry).
    #[schemars(length(min = 1, max = 2048))]
    pub url: String,
}

/// A network interface.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Network {
    /// Name of the interface in the VirtualMachine.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::LABEL))]
    pub name: String,
    /// Name of a NetworkConfiguration in the same namespace, or "pod" for the pod network.
    #[schemars(length(min = 1, max = 253), regex(pattern = schema::SUBDOMAIN))]
    pub network_name: String,
    /// Device model: virtio, e1000 or rtl8139. Default: virtio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["virtio", "e1000", "rtl8139"]))]
    pub model: Option<String>,
    /// Unicast MAC address. Default: an address derived from the UID of the Machine, which stays the same when the
    /// VirtualMachine is created again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 17, max = 17), regex(pattern = schema::UNICAST_MAC))]
    pub mac_address: Option<String>,
}

/// Data for cloud-init. It may contain passwords and keys, so `Debug` shows none of it.
#[derive(Serialize, Deserialize, Clone, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CloudInit {
    /// User data, for example a #cloud-config document. Every user who can read the Machine can read it, so use secretRef
    /// for passwords and keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = limits::DATA_BYTES), extend("x-kubernetes-validations" = schema::data_rules()))]
    pub user_data: Option<String>,
    /// Network configuration for cloud-init, in format version 1 or 2. Every user who can read the Machine can read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = limits::DATA_BYTES), extend("x-kubernetes-validations" = schema::data_rules()))]
    pub network_data: Option<String>,
    /// User data from a Secret in the same namespace. If userData is also set, cloud-init gets both, userData first.
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
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253), regex(pattern = schema::SUBDOMAIN))]
    pub name: String,
    /// Key in the Secret. Default: userdata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = schema::SECRET_KEY))]
    pub key: Option<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Domain {
    /// Emulated machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<DomainMachine>,
    /// CPU and chipset features exposed to the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features: Option<Features>,
    /// Firmware settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<Firmware>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DomainMachine {
    /// Machine type: pc-q35, pc-i440fx, or a QEMU machine type that KubeVirt is configured to allow. Default: KubeVirt's
    /// default for the architecture (q35 on amd64). An existing VirtualMachine keeps its type when the field is removed.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[A-Za-z0-9._-]+$"))]
    pub kind: Option<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Features {
    /// Enable ACPI. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acpi: Option<bool>,
    /// Enable the APIC. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apic: Option<bool>,
    /// Enable Hyper-V enlightenments, recommended for Windows guests. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hyperv: Option<bool>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Firmware {
    /// Boot loader. Default: BIOS (EFI on arm64).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootloader: Option<Bootloader>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::bootloader_rules()))]
pub struct Bootloader {
    /// Boot with EFI instead of BIOS. Default: false; arm64 always uses EFI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub efi: Option<bool>,
    /// Enable Secure Boot. Requires efi. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<bool>,
}
