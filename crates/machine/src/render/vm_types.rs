//! The fields of KubeVirt's VirtualMachine that a Machine sets. Names of fields are KubeVirt's.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;

/// Without `apiVersion` and `kind`, which the executor adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VirtualMachine {
    pub metadata: ObjectMeta,
    pub spec: VirtualMachineSpec,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSpec {
    pub run_strategy: &'static str,
    pub template: VmiTemplate,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmiTemplate {
    pub metadata: TemplateMetadata,
    pub spec: VmiSpec,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TemplateMetadata {
    pub labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmiSpec {
    pub domain: VmDomain,
    pub networks: Vec<VmNetwork>,
    pub volumes: Vec<Volume>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmDomain {
    pub cpu: VmCpu,
    pub memory: VmMemory,
    pub devices: Devices,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineType>,
    #[serde(skip_serializing_if = "VmFeatures::is_empty")]
    pub features: VmFeatures,
    pub firmware: VmFirmware,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<Clock>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmCpu {
    pub cores: u32,
    pub threads: u32,
    pub sockets: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmMemory {
    pub guest: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Devices {
    pub disks: Vec<VmDisk>,
    pub interfaces: Vec<Interface>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub network_interface_multiqueue: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VmDisk {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskTarget>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdrom: Option<CdromTarget>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskTarget {
    pub bus: &'static str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub readonly: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CdromTarget {
    pub bus: &'static str,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Interface {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<u32>,
    pub model: String,
    pub mac_address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<Empty>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bridge: Option<Empty>,
}

/// The empty object `{}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Empty {}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineType {
    #[serde(rename = "type")]
    pub kind: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VmFeatures {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub acpi: Option<VmToggle>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apic: Option<VmToggle>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hyperv: Option<Hyperv>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smm: Option<VmToggle>,
}

impl VmFeatures {
    fn is_empty(&self) -> bool {
        *self == VmFeatures::default()
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmToggle {
    pub enabled: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Hyperv {
    pub relaxed: Empty,
    pub spinlocks: Spinlocks,
    pub vapic: Empty,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spinlocks {
    pub spinlocks: u32,
}

impl Default for Spinlocks {
    fn default() -> Self {
        Spinlocks { spinlocks: 8191 }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmFirmware {
    pub uuid: String,
    pub serial: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootloader: Option<VmBootloader>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmBootloader {
    pub efi: Efi,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Efi {
    pub secure_boot: bool,
}

/// Clock settings for Windows guests.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Clock {
    pub utc: Empty,
    pub timer: Timer,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timer {
    pub hpet: Presence,
    pub pit: TickPolicy,
    pub rtc: TickPolicy,
    pub hyperv: Empty,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Presence {
    pub present: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TickPolicy {
    pub tick_policy: &'static str,
}

impl Default for Timer {
    fn default() -> Self {
        Timer {
            hpet: Presence { present: false },
            pit: TickPolicy { tick_policy: "delay" },
            rtc: TickPolicy { tick_policy: "catchup" },
            hyperv: Empty {},
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmNetwork {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Empty>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multus: Option<Multus>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Multus {
    pub network_name: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<PvcVolume>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_disk: Option<ContainerDisk>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_init_no_cloud: Option<CloudInitNoCloud>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PvcVolume {
    pub claim_name: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ContainerDisk {
    pub image: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CloudInitNoCloud {
    pub secret_ref: LocalReference,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_data_secret_ref: Option<LocalReference>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LocalReference {
    pub name: String,
}
