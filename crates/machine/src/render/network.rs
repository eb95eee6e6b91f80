//! The NetworkAttachmentDefinition of a NetworkConfiguration: a bridge with an optional VLAN, for Multus.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::Serialize;
use serde_json::{Value, json};
use vitivirt_api::machine::{API_VERSION, LABEL_MANAGED_BY, MANAGED_BY};

use crate::observed::NetworkView;

/// Without `apiVersion` and `kind`, which the executor adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NetworkAttachmentDefinition {
    pub metadata: ObjectMeta,
    pub spec: NetworkAttachmentSpec,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NetworkAttachmentSpec {
    pub config: String,
}

/// The whole object, for its first write. The NetworkConfiguration owns it.
pub fn render(name: &str, network: &NetworkView) -> NetworkAttachmentDefinition {
    let owner = OwnerReference {
        api_version: API_VERSION.to_owned(),
        kind: "NetworkConfiguration".to_owned(),
        name: name.to_owned(),
        uid: network.uid.clone(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    };
    NetworkAttachmentDefinition {
        metadata: ObjectMeta { labels: Some(labels()), owner_references: Some(vec![owner]), ..ObjectMeta::default() },
        spec: spec(name, network),
    }
}

/// It has no label of a Machine, because all Machines of the network share it.
pub fn labels() -> BTreeMap<String, String> {
    [(LABEL_MANAGED_BY.to_owned(), MANAGED_BY.to_owned())].into()
}

pub fn spec(name: &str, network: &NetworkView) -> NetworkAttachmentSpec {
    NetworkAttachmentSpec { config: cni_config(name, network) }
}

/// The CNI configuration, which a NetworkAttachmentDefinition contains as JSON text.
pub(crate) fn cni_config(name: &str, network: &NetworkView) -> String {
    let mut config = json!({
        "cniVersion": "0.3.1",
        "name": name,
        "type": "bridge",
        "bridge": network.bridge,
        "ipam": {},
    });
    if let (Some(vlan), Value::Object(fields)) = (network.vlan, &mut config) {
        fields.insert("vlan".to_owned(), vlan.into());
    }
    config.to_string()
}
