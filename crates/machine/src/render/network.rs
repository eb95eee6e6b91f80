//! The NetworkAttachmentDefinition of a NetworkConfiguration: a bridge, with or without a VLAN, for Multus.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vitivirt_api::machine::{LABEL_MANAGED_BY, MANAGED_BY};

use crate::observed::NetworkView;

/// The whole object, for its first write. The NetworkConfiguration owns it.
pub fn render(name: &str, network: &NetworkView) -> Value {
    json!({
        "metadata": {
            "labels": labels(),
            "ownerReferences": [{
                "apiVersion": "vitistack.io/v1alpha1",
                "kind": "NetworkConfiguration",
                "name": name,
                "uid": network.uid,
                "controller": true,
                "blockOwnerDeletion": true,
            }],
        },
        "spec": spec(name, network),
    })
}

/// It is of the network, not of one of the Machines on it.
pub fn labels() -> BTreeMap<String, String> {
    [(LABEL_MANAGED_BY.to_owned(), MANAGED_BY.to_owned())].into()
}

pub fn spec(name: &str, network: &NetworkView) -> Value {
    json!({"config": config(name, network)})
}

/// The CNI configuration, which a NetworkAttachmentDefinition holds as text.
pub fn config(name: &str, network: &NetworkView) -> String {
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
