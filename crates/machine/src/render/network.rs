//! The NetworkAttachmentDefinition of a NetworkConfiguration: a bridge with an optional VLAN, for Multus.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vitivirt_api::machine::{ANNOTATION_SEGMENTS, API_VERSION, LABEL_MANAGED_BY, MANAGED_BY};

use crate::observed::{NetworkAttachmentView, NetworkView};

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
        metadata: ObjectMeta {
            labels: Some(labels()),
            annotations: Some([(ANNOTATION_SEGMENTS.to_owned(), json!([Segment::of(network)]).to_string())].into()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
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

/// A bridge and VLAN of a network. A guest keeps those that the network had when its pod started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    pub bridge: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// When the network got others, in seconds since 1970. The present ones have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<i64>,
}

/// Earlier segments that are kept.
const MAX_EARLIER: usize = 8;

impl Segment {
    fn of(network: &NetworkView) -> Self {
        Self { bridge: network.bridge.clone(), vlan: network.vlan, until: None }
    }

    fn is_same(&self, other: &Self) -> bool {
        (&self.bridge, self.vlan) == (&other.bridge, other.vlan)
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bridge {}", self.bridge.as_deref().unwrap_or("unknown"))?;
        self.vlan.map_or(Ok(()), |vlan| write!(f, " VLAN {vlan}"))
    }
}

/// The segments of a network: those of the annotation, or that of the configuration. A configuration that another client
/// changed is drift, and the operator repairs it at once; only a new NetworkConfiguration is another segment.
fn segments(attachment: &NetworkAttachmentView) -> Vec<Segment> {
    let recorded = attachment.segments.as_deref().and_then(|json| serde_json::from_str::<Vec<Segment>>(json).ok());
    recorded.filter(|all| !all.is_empty()).unwrap_or_else(|| {
        let configured = serde_json::from_str::<Segment>(&attachment.config).ok();
        configured.filter(|segment| segment.bridge.is_some()).into_iter().collect()
    })
}

/// The segments after the present one was replaced. None if it stays.
pub(crate) fn next_segments(attachment: &NetworkAttachmentView, network: &NetworkView, now: i64) -> Option<String> {
    let (desired, mut all) = (Segment::of(network), segments(attachment));
    match all.last_mut() {
        Some(current) if current.is_same(&desired) => return None,
        Some(current) => current.until = Some(now),
        None => {}
    }
    let excess = all.len().saturating_sub(MAX_EARLIER);
    all.drain(..excess);
    all.push(desired);
    Some(json!(all).to_string())
}

/// The segment that a guest has whose pod started at `since`, and the present one, if they differ.
pub(crate) fn outdated_segment(attachment: &NetworkAttachmentView, since: i64) -> Option<(Segment, Segment)> {
    let all = segments(attachment);
    let present = all.last()?;
    let started_with = all.iter().find(|segment| segment.until.is_some_and(|until| until > since))?;
    (!started_with.is_same(present)).then(|| (started_with.clone(), present.clone()))
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
