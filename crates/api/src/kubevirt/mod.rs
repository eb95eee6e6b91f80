//! The custom resource `kubevirt.io/v1 KubeVirt`: the desired and observed state of an installation of KubeVirt.
//!
//! Fields that virt-operator reads or writes are typed. Other components of KubeVirt read the other fields; they are
//! kept unchanged in `extra`. The schema is part of a KubeVirt release and is in the crate `vitivirt-install`.

mod spec;
mod status;

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube_core::Resource;
use serde::{Deserialize, Serialize};

pub use spec::{
    Architecture, CertificateLifetime, CertificateRotation, ComponentConfig, Configuration, Customization,
    CustomizeComponents, DeveloperConfiguration, Flags, Hypervisor, KubeVirtSpec, LogVerbosity, Migrations,
    NodePlacement, SelfSigned, Tls, Toggle,
};
pub use status::{Generation, KubeVirtCondition, KubeVirtStatus};

pub const GROUP: &str = "kubevirt.io";
pub const VERSION: &str = "v1";
pub const KIND: &str = "KubeVirt";
pub const PLURAL: &str = "kubevirts";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirt {
    #[serde(flatten)]
    pub types: KubeVirtTypeMeta,
    #[serde(default)]
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub spec: KubeVirtSpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<KubeVirtStatus>,
}

/// `apiVersion` and `kind`. The CRD serves two versions, which have the same fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeVirtTypeMeta {
    pub api_version: String,
    pub kind: String,
}

impl Default for KubeVirtTypeMeta {
    fn default() -> Self {
        Self { api_version: format!("{GROUP}/{VERSION}"), kind: KIND.to_owned() }
    }
}

impl Resource for KubeVirt {
    type DynamicType = ();
    type Scope = kube_core::NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        KIND.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn untyped_fields_survive_a_round_trip() {
        let object = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
            "spec": {
                "imageTag": "v1.8.4",
                "unheardOf": {"deep": [1, 2]},
                "workloadUpdateStrategy": {"workloadUpdateMethods": ["LiveMigrate"]},
                "configuration": {
                    "network": {"permitSlirpInterface": false},
                    "developerConfiguration": {"featureGates": ["NUMA"], "useEmulation": true, "memoryOvercommit": 150},
                    "tlsConfiguration": {"minTLSVersion": "VersionTLS13", "later": 1},
                },
                "infra": {"nodePlacement": {"affinity": {}}, "replicas": 2},
            },
        });
        let parsed: KubeVirt = serde_json::from_value(object.clone()).unwrap();
        assert_eq!(parsed.spec.configuration.feature_gates(), ["NUMA"]);
        assert_eq!(parsed.spec.infra.as_ref().and_then(|infra| infra.replicas), Some(2));
        assert_eq!(serde_json::to_value(&parsed).unwrap(), object);
    }

    #[test]
    fn an_empty_spec_stays_empty() {
        let parsed: KubeVirt = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt"}, "spec": {},
        }))
        .unwrap();
        assert_eq!(serde_json::to_value(&parsed).unwrap().get("spec"), Some(&Value::Object(Default::default())));
    }
}
