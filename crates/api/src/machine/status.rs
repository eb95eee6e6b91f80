//! What the operator says about a Machine.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schema;

/// How the machine is. The operator writes it; nobody else needs to.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("default" = {"phase": "Pending"}))]
pub struct MachineStatus {
    /// Pending, Creating, Running, Stopped or Failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Ready, VirtualMachineReady, StorageReady, NetworkReady, and RestartRequired when it applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        schema_with = "schema::conditions",
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
    /// One sentence: why the machine is not ready, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diagnosis: Option<String>,
    /// The VirtualMachine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_name: Option<String>,
    /// The VirtualMachineInstance, while there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmi_name: Option<String>,
    /// The addresses of all interfaces, as the guest or KubeVirt reports them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_addresses: Vec<String>,
    /// The node that the machine runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// CPU and memory after template and overrides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<EffectiveResources>,
    /// The generation that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When something in this status last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_updated: Option<String>,
    /// The resource version of the Machine that this status was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_version: Option<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EffectiveResources {
    /// All virtual CPUs.
    pub cpu: u32,
    /// All of the guest's memory.
    pub memory: String,
}
