//! The fields of the spec that virt-operator reads.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, LocalObjectReference, Toleration};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeVirtSpec {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_tag: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_registry: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_pull_policy: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_secrets: Option<Vec<LocalObjectReference>>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub monitor_namespace: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub service_monitor_namespace: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub monitor_account: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uninstall_strategy: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate_rotate_strategy: Option<CertificateRotation>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub product_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub product_name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub product_component: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub synchronization_port: String,
    #[serde(skip_serializing_if = "is_default")]
    pub configuration: Configuration,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infra: Option<ComponentConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workloads: Option<ComponentConfig>,
    #[serde(skip_serializing_if = "is_default")]
    pub customize_components: CustomizeComponents,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl KubeVirtSpec {
    pub fn self_signed(&self) -> Option<&SelfSigned> {
        self.certificate_rotate_strategy.as_ref()?.self_signed.as_ref()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CertificateRotation {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub self_signed: Option<SelfSigned>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// Lifetimes of self-signed certificates. Durations have Go's form: `168h`, `90m`. The three `…Interval` fields are the
/// deprecated form of `ca` and `server`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SelfSigned {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_rotate_interval: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_rotate_interval: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_overlap_interval: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<CertificateLifetime>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<CertificateLifetime>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CertificateLifetime {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renew_before: Option<String>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Configuration {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub developer_configuration: Option<DeveloperConfiguration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migrations: Option<Migrations>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture_configuration: Option<Architecture>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_machine_instances_per_node: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_configuration: Option<Tls>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub common_instancetypes_deployment: Option<Toggle>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_template_deployment: Option<Toggle>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hypervisors: Option<Vec<Hypervisor>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_aggregation_strategy: Option<String>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Configuration {
    /// The enabled feature gates.
    pub fn feature_gates(&self) -> &[String] {
        self.developer_configuration.as_ref().and_then(|developer| developer.feature_gates.as_deref()).unwrap_or(&[])
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeveloperConfiguration {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feature_gates: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disabled_feature_gates: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_emulation: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_verbosity: Option<LogVerbosity>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LogVerbosity {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virt_operator: Option<i64>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Migrations {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Architecture {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub default_architecture: String,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Tls {
    #[serde(rename = "minTLSVersion", skip_serializing_if = "String::is_empty")]
    pub min_tls_version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ciphers: Option<Vec<String>>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// An optional component that is deployed by default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Toggle {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Hypervisor {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ComponentConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_placement: Option<NodePlacement>,
    /// The schema accepts any number, so this type must too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i64>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodePlacement {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tolerations: Option<Vec<Toleration>>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// Changes to the generated objects. Upstream virt-operator hashes the fields in this order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CustomizeComponents {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<Customization>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flags: Option<Flags>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Customization {
    pub resource_name: String,
    pub resource_type: String,
    pub patch: String,
    #[serde(rename = "type")]
    pub patch_type: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Flags {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub api: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub controller: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub handler: BTreeMap<String, String>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
