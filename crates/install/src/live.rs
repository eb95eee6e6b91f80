//! What is known of a live object: enough to judge it, small enough to keep of every object of an installation.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value};
use vitivirt_api::{Failure, reason};

use crate::{
    names::{FIELD_MANAGER, annotation, label},
    strategy::MANIFESTS,
};

/// Not content: who it is and how it fares.
const ASIDE: [&str; 4] = ["apiVersion", "kind", "metadata", "status"];
const MANAGERS: [&str; 2] = [label::MANAGED_BY_VALUE, "kubevirt-operator"];

/// Annotations that others write and that may be big or change often.
const NOISE: [&str; 3] = [
    "deployment.kubernetes.io/revision",
    "deprecated.daemonset.template.generation",
    "kubectl.kubernetes.io/last-applied-configuration",
];

/// It has no `Debug`, because it may be a Secret.
#[derive(Clone, PartialEq, Eq)]
pub struct LiveObject {
    pub uid: String,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub generation: i64,
    pub created: Option<Timestamp>,
    pub deleting: bool,
    pub rollout: Option<Rollout>,
    /// Of a Job: how it ended.
    pub end: Option<End>,
    /// Whether it holds the text of an install strategy.
    pub is_strategy: bool,
    /// Of everything that is compared: two of the same digest are judged alike.
    pub digest: u64,
    /// The fields of the object and what others than us have set of them, as JSON: a tenth of what a tree of them takes.
    /// Nothing for objects of which only metadata is followed.
    json: Option<Box<[u8]>>,
}

/// How far the pods of a workload are what its template says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rollout {
    /// Whether the numbers are about the template as it is now.
    pub current: bool,
    /// Of a DaemonSet: the nodes that should have a pod. Of a Deployment: the pods that there are.
    pub pods: i64,
    pub updated: i64,
    pub ready: i64,
    pub every_node: bool,
}

/// How a Job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    pub at: Timestamp,
    pub failed: bool,
}

impl End {
    fn of(data: &Value) -> Option<Self> {
        let conditions = data.pointer("/status/conditions")?.as_array()?;
        conditions.iter().filter(|condition| condition.get("status").is_some_and(|status| status == "True")).find_map(
            |condition| {
                let failed = match condition.get("type")?.as_str()? {
                    "Complete" => false,
                    "Failed" => true,
                    _ => return None,
                };
                Some(Self { at: condition.get("lastTransitionTime")?.as_str()?.parse().ok()?, failed })
            },
        )
    }
}

impl Rollout {
    fn of(generation: i64, data: &Value) -> Option<Self> {
        data.pointer("/spec/template/spec/containers")?;
        let number = |field: &str| data.pointer(&format!("/status/{field}")).and_then(Value::as_i64);
        let current = number("observedGeneration").is_some_and(|observed| observed >= generation);
        let of_nodes = number("desiredNumberScheduled").map(|pods| Self {
            current,
            pods,
            updated: number("updatedNumberScheduled").unwrap_or_default(),
            ready: number("numberReady").unwrap_or_default(),
            every_node: true,
        });
        Some(of_nodes.unwrap_or_else(|| Self {
            current,
            pods: number("replicas").unwrap_or_default(),
            updated: number("updatedReplicas").unwrap_or_default(),
            ready: number("readyReplicas").unwrap_or_default(),
            every_node: false,
        }))
    }

    /// No pod of an older template is left, and enough of them are ready: one of a Deployment, all of a DaemonSet.
    pub fn is_over(self) -> bool {
        let enough = if self.every_node { self.pods } else { 1 };
        self.current && self.pods > 0 && self.updated >= self.pods && self.ready >= enough
    }

    /// What is missing, for people.
    pub fn missing(self) -> String {
        match self {
            Self { current: false, .. } => "its pods are not counted yet".to_owned(),
            Self { pods: 0, every_node: true, .. } => "no node is selected for it".to_owned(),
            Self { pods: 0, .. } => "it has no pods yet".to_owned(),
            // Without numbers: each would be another write of the status.
            Self { pods, updated, .. } if updated < pods => "not all of its pods are of this version".to_owned(),
            Self { ready: 0, .. } => "none of its pods is ready".to_owned(),
            Self { .. } => "not all of its pods are ready".to_owned(),
        }
    }
}

/// The fields of a live object, unpacked.
pub(crate) struct Fields {
    pub(crate) content: Value,
    /// What others have set, as the server tells it in `managedFields`, one tree each.
    pub(crate) foreign: Vec<Value>,
}

impl LiveObject {
    /// `data` is the object without its metadata; its status is looked at and dropped.
    pub fn new(metadata: &ObjectMeta, data: Value) -> Self {
        let mut live = Self::of_metadata(metadata);
        live.rollout = Rollout::of(live.generation, &data);
        live.end = End::of(&data);
        live.is_strategy = holds_a_strategy(&live, &data);
        if live.is_strategy {
            // Its text is big, and never compared.
            return live;
        }
        let content: Map<String, Value> = match data {
            Value::Object(fields) => fields.into_iter().filter(|(key, _)| !ASIDE.contains(&key.as_str())).collect(),
            _ => Map::new(),
        };
        let foreign = metadata.managed_fields.iter().flatten().filter(|entry| is_foreign(entry));
        let foreign: Vec<&Value> = foreign.filter_map(|entry| Some(&entry.fields_v1.as_ref()?.0)).collect();
        let json = serde_json::to_vec(&(&content, &foreign)).unwrap_or_default();
        let mut hasher = DefaultHasher::new();
        live.digest.hash(&mut hasher);
        json.hash(&mut hasher);
        live.digest = hasher.finish();
        live.json = Some(json.into());
        live
    }

    /// What a write was answered with whose answer would have been big. We wrote the rest, so it is what we wanted.
    pub fn answered(metadata: &ObjectMeta) -> Self {
        let live = Self::of_metadata(metadata);
        Self { is_strategy: live.labels.contains_key(label::INSTALL_STRATEGY), ..live }
    }

    /// For objects whose content is not followed: their generation tells when it changed.
    pub fn of_metadata(metadata: &ObjectMeta) -> Self {
        let mut live = Self {
            uid: metadata.uid.clone().unwrap_or_default(),
            labels: metadata.labels.clone().unwrap_or_default(),
            annotations: metadata.annotations.clone().unwrap_or_default(),
            generation: metadata.generation.unwrap_or_default(),
            created: metadata.creation_timestamp.as_ref().map(|time| time.0),
            deleting: metadata.deletion_timestamp.is_some(),
            rollout: None,
            end: None,
            is_strategy: false,
            digest: 0,
            json: None,
        };
        live.annotations.retain(|key, _| !NOISE.contains(&key.as_str()));
        let mut hasher = DefaultHasher::new();
        (&live.uid, &live.labels, &live.annotations, live.generation, live.deleting).hash(&mut hasher);
        live.digest = hasher.finish();
        live
    }

    pub(crate) fn fields(&self) -> Result<Option<Fields>, Failure> {
        let Some(json) = &self.json else { return Ok(None) };
        // The error of a parser quotes what it could not read.
        let unreadable = |_| Failure::bug(reason::UNREADABLE_ANSWER, "an object in the cache is no JSON");
        let (content, foreign) = serde_json::from_slice(json).map_err(unreadable)?;
        Ok(Some(Fields { content, foreign }))
    }

    /// The fields of the object as the server has them.
    pub fn content(&self) -> Option<Value> {
        self.fields().ok()?.map(|fields| fields.content)
    }

    /// Text under `data` of a Secret or ConfigMap, as it is in JSON.
    pub fn data(&self, key: &str) -> Option<String> {
        let fields = self.fields().ok()??;
        fields.content.get("data")?.get(key)?.as_str().map(ToOwned::to_owned)
    }

    /// Whether an operator of KubeVirt made it: by its label together with the annotations that only it writes. What
    /// has lost the label is known by the annotations alone, or a stripped label could never be put back.
    pub fn is_ours(&self) -> bool {
        let by_label = self.labels.get(label::MANAGED_BY).is_none_or(|manager| MANAGERS.contains(&manager.as_str()));
        let marks = [annotation::VERSION, annotation::REGISTRY];
        by_label && marks.iter().all(|mark| self.annotations.contains_key(*mark))
    }

    pub fn annotation(&self, key: &str) -> &str {
        self.annotations.get(key).map(String::as_str).unwrap_or_default()
    }
}

/// The label alone says little: anybody may put it on anything.
fn holds_a_strategy(live: &LiveObject, data: &Value) -> bool {
    let is_config_map = data.get("type").is_none() && data.get("spec").is_none();
    let text = data.get("data").and_then(|data| data.get(MANIFESTS));
    is_config_map && text.is_some() && live.labels.contains_key(label::INSTALL_STRATEGY)
}

/// What is changed through a subresource is not the specification.
fn is_foreign(entry: &ManagedFieldsEntry) -> bool {
    let subresource = entry.subresource.as_deref().unwrap_or_default();
    subresource.is_empty() && entry.manager.as_deref() != Some(FIELD_MANAGER)
}
