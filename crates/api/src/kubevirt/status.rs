//! The status that virt-operator reports. KubeVirt's other components and scripts read these field names.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeVirtStatus {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub phase: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<KubeVirtCondition>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub operator_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub target_kube_virt_registry: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub target_kube_virt_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub target_deployment_config: String,
    #[serde(rename = "targetDeploymentID", skip_serializing_if = "String::is_empty")]
    pub target_deployment_id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub observed_kube_virt_registry: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub observed_kube_virt_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub observed_deployment_config: String,
    #[serde(rename = "observedDeploymentID", skip_serializing_if = "String::is_empty")]
    pub observed_deployment_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub default_architecture: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub generations: Vec<Generation>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub synchronization_addresses: Vec<String>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtCondition {
    #[serde(rename = "type")]
    pub condition_type: String,
    pub status: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_probe_time: Option<Time>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// The generation that an object had when the operator last wrote it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Generation {
    pub group: String,
    pub resource: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    pub name: String,
    pub last_generation: i64,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hash: String,
}
