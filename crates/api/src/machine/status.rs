//! The status of a Machine.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{MachinePhase, schema};

/// Observed state of the virtual machine. The operator writes it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("default" = {"phase": "Pending"}))]
pub struct MachineStatus {
    /// Phase of the machine: Pending, Creating, Running, Stopped or Failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("enum" = ["Pending", "Creating", "Running", "Stopped", "Failed"]))]
    pub phase: Option<MachinePhase>,
    /// Conditions: Ready, VirtualMachineReady, StorageReady, NetworkReady, RestartRequired while a change is
    /// waiting for a restart, and ChangesRejected while the spec has a change that is impossible.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        schema_with = "schema::conditions",
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
    /// Why the machine is not ready, and what to do, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diagnosis: Option<String>,
    /// Name of the VirtualMachine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_name: Option<String>,
    /// Name of the VirtualMachineInstance, while it exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmi_name: Option<String>,
    /// IP addresses of all interfaces, as the guest or KubeVirt reports them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_addresses: Vec<String>,
    /// Name of the node that the machine runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Disks, with the PVC and the volume that hold each. If a PVC of the Machine in this list no longer exists, the
    /// operator does not replace it without consent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub disks: Vec<DiskStatus>,
    /// CPU and memory that result from the template and the overrides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<EffectiveResources>,
    /// Generation of the Machine that this status is based on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Time of the last change to this status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub last_updated: Option<String>,
    /// Resource version of the Machine that this status is based on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_version: Option<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskStatus {
    /// Name of the disk.
    pub name: String,
    /// Name of its PVC.
    pub pvc: String,
    /// Name of the PersistentVolume. Empty if it is not known: KubeVirt restored the disk into a PVC that is not bound yet,
    /// or the PVC is external.
    pub volume: String,
    /// True if the disk was moved to a PVC that does not belong to the Machine. The operator neither changes nor deletes
    /// that PVC.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub external: bool,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EffectiveResources {
    /// Number of virtual CPUs.
    pub cpu: u32,
    /// Memory of the guest.
    pub memory: String,
}
