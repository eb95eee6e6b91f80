//! A live object as the cache keeps it: enough to compare it, small enough for every object of an installation.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta},
    jiff::Timestamp,
};
use serde_json::{Map, Value};
use vitivirt_api::{Failure, ObjectKey, Target, Write, reason};

use crate::{
    kind::Kind,
    names::IDENTITY,
    names::{FIELD_MANAGER, STRATEGY_MANIFESTS, annotation, label},
    stable_text,
};

/// Fields that `drift` does not compare as content.
pub(crate) const NON_CONTENT: [&str; 4] = ["apiVersion", "kind", "metadata", "status"];
const MANAGERS: [&str; 2] = [label::MANAGED_BY_VALUE, "kubevirt-operator"];

/// Annotations of other clients that may be large or change often.
const IGNORED_ANNOTATIONS: [&str; 3] = [
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
    /// What keeps the object when it is deleted.
    pub(crate) finalizers: Box<[Finalizer]>,
    pub(crate) rollout: Option<Rollout>,
    /// Only of a finished Job.
    pub(crate) job_result: Option<JobResult>,
    /// Only of an APIService that the API server does not reach.
    pub(crate) unavailable: Option<Unavailable>,
    /// Whether it contains an install strategy.
    pub is_strategy: bool,
    /// Whether another object owns it, so that the garbage collector may delete it.
    pub(crate) has_owners: bool,
    own_keys: OwnKeys,
    /// Whether `managedFields` say that a KubeVirt operator has set something.
    written_by_operator: bool,
    /// A digest of everything that is compared.
    pub digest: u64,
    /// The fields of the object, and the `managedFields` and names of other clients, as JSON: a tenth of the memory of a tree of
    /// values. `None` for kinds of which only the metadata is watched.
    json: Option<Box<[u8]>>,
}

/// The labels and annotations that only a KubeVirt operator has set, according to `managedFields`. Bit n stands for the
/// key number n of the map: an installation has hundreds of objects, so the keys are not stored twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct OwnKeys {
    labels: u64,
    annotations: u64,
    /// Another client has set the annotation with the generation of the resource.
    foreign_generation: bool,
}

impl OwnKeys {
    fn new(live: &LiveObject, entries: &[ManagedFieldsEntry]) -> Self {
        let has = |is_own: bool, field: &str, key: &str| {
            let entries = entries.iter().filter(|entry| is_of_operator(entry) == is_own);
            let mut trees = entries.filter_map(|entry| Some(&entry.fields_v1.as_ref()?.0));
            trees.any(|tree| {
                tree.pointer(&format!("/f:metadata/f:{field}")).is_some_and(|map| map.get(format!("f:{key}")).is_some())
            })
        };
        let own = |field: &str, keys: &BTreeMap<String, String>| {
            let is_own = |key: &str| has(true, field, key) && !has(false, field, key);
            keys.keys().take(64).enumerate().fold(0, |own, (index, key)| own | u64::from(is_own(key)) << index)
        };
        Self {
            labels: own("labels", &live.labels),
            annotations: own("annotations", &live.annotations),
            foreign_generation: has(false, "annotations", annotation::GENERATION),
        }
    }
}

/// A finalizer of an object, and the client that set it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Finalizer {
    pub name: String,
    /// According to `managedFields`.
    pub manager: Option<String>,
}

impl Finalizer {
    pub fn all(metadata: &ObjectMeta) -> Vec<Self> {
        let manager = |name: &str| {
            let sets = |entry: &&ManagedFieldsEntry| {
                let finalizers = entry.fields_v1.as_ref().and_then(|tree| tree.0.pointer("/f:metadata/f:finalizers"));
                finalizers.is_some_and(|set| set.get(format!("v:\"{name}\"")).is_some())
            };
            metadata.managed_fields.iter().flatten().find(sets)?.manager.clone()
        };
        let names = metadata.finalizers.iter().flatten();
        names.map(|name| Self { name: name.clone(), manager: manager(name) }).collect()
    }
}

/// The rollout status of a workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rollout {
    /// Whether the numbers describe the current template.
    pub(crate) current: bool,
    /// Of a DaemonSet: the nodes that should run a pod. Of a Deployment: the pods that exist.
    pub(crate) pods: i64,
    pub(crate) updated: i64,
    pub(crate) ready: i64,
    pub(crate) every_node: bool,
}

/// Why the API server cannot use an APIService.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unavailable {
    pub(crate) since: Option<Timestamp>,
    pub(crate) message: String,
}

impl Unavailable {
    fn from_object(data: &Value) -> Option<Self> {
        data.pointer("/spec/groupPriorityMinimum")?;
        let conditions = data.pointer("/status/conditions")?.as_array()?;
        let has = |condition: &&Value, field: &str, value: &str| condition.get(field).is_some_and(|is| is == value);
        let condition = conditions
            .iter()
            .find(|condition| has(condition, "type", "Available") && has(condition, "status", "False"))?;
        let text = |field: &str| condition.get(field).and_then(Value::as_str).unwrap_or_default();
        Some(Self { since: text("lastTransitionTime").parse().ok(), message: stable_text::status(text("message")) })
    }
}

/// The result of a finished Job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobResult {
    pub(crate) at: Timestamp,
    pub(crate) failed: bool,
}

impl JobResult {
    fn from_object(data: &Value) -> Option<Self> {
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
    fn from_object(generation: i64, data: &Value) -> Option<Self> {
        data.pointer("/spec/template/spec/containers")?;
        let number = |field: &str| data.pointer(&format!("/status/{field}")).and_then(Value::as_i64);
        let current = number("observedGeneration").is_some_and(|observed| observed >= generation);
        let daemon_set = number("desiredNumberScheduled").map(|pods| Self {
            current,
            pods,
            updated: number("updatedNumberScheduled").unwrap_or_default(),
            ready: number("numberReady").unwrap_or_default(),
            every_node: true,
        });
        Some(daemon_set.unwrap_or_else(|| Self {
            current,
            pods: number("replicas").unwrap_or_default(),
            updated: number("updatedReplicas").unwrap_or_default(),
            ready: number("readyReplicas").unwrap_or_default(),
            every_node: false,
        }))
    }

    /// No pod of an older template is left, and enough pods are ready: one of a Deployment, all of a DaemonSet.
    pub(crate) fn is_complete(self) -> bool {
        let enough = if self.every_node { self.pods } else { 1 };
        self.current && self.pods > 0 && self.updated >= self.pods && self.ready >= enough
    }

    /// What the rollout waits for, for a message.
    pub(crate) fn missing(self) -> String {
        match self {
            Self { current: false, .. } => "its status is not up to date yet".to_owned(),
            Self { pods: 0, every_node: true, .. } => "no node matches its node selector".to_owned(),
            Self { pods: 0, .. } => "it has no pods yet".to_owned(),
            // Without numbers, because each change of a number would be a status write.
            Self { pods, updated, .. } if updated < pods => "not all of its pods have this version".to_owned(),
            Self { ready: 0, .. } => "none of its pods are ready".to_owned(),
            Self { .. } => "not all of its pods are ready".to_owned(),
        }
    }
}

/// The parsed fields of a live object.
pub(crate) struct LiveFields {
    pub(crate) content: Value,
    /// The fields that other clients have set, from `managedFields`, one tree per client.
    pub(crate) foreign: Vec<Value>,
    /// The names of these clients.
    pub(crate) managers: Vec<String>,
}

/// Whether the labels and annotations of other clients are removed too, and objects of other clients are adopted.
/// Upstream virt-operator does so for these kinds.
pub(crate) fn is_exclusive(kind: Kind) -> bool {
    matches!(kind, Kind::Instancetype | Kind::Preference)
}

impl LiveObject {
    /// `data` is the object; its status is evaluated and dropped.
    pub fn new(metadata: &ObjectMeta, data: Value) -> Self {
        let mut live = Self::from_metadata(metadata);
        live.rollout = Rollout::from_object(live.generation, &data);
        live.job_result = JobResult::from_object(&data);
        live.unavailable = Unavailable::from_object(&data).filter(|_| live.is_ours());
        live.is_strategy = contains_strategy(&live, &data);
        if live.is_strategy {
            // Its text is large and never compared.
            return live;
        }
        let content: Map<String, Value> = match data {
            Value::Object(fields) => {
                fields.into_iter().filter(|(key, _)| !NON_CONTENT.contains(&key.as_str())).collect()
            }
            _ => Map::new(),
        };
        let foreign = metadata.managed_fields.iter().flatten().filter(|entry| is_foreign(entry));
        let (managers, foreign): (Vec<&str>, Vec<&Value>) = foreign
            .filter_map(|entry| Some((entry.manager.as_deref().unwrap_or_default(), &entry.fields_v1.as_ref()?.0)))
            .unzip();
        let json = serde_json::to_vec(&(&content, &foreign, &managers)).unwrap_or_default();
        let mut hasher = DefaultHasher::new();
        live.digest.hash(&mut hasher);
        json.hash(&mut hasher);
        live.digest = hasher.finish();
        live.json = Some(json.into());
        live
    }

    /// The response to a write of a large object, which contains only metadata. The content is what the operator sent.
    pub fn from_metadata_response(metadata: &ObjectMeta) -> Self {
        let live = Self::from_metadata(metadata);
        Self { is_strategy: live.labels.contains_key(label::INSTALL_STRATEGY), ..live }
    }

    /// An object whose content is not watched. Its generation shows when the content changed.
    pub fn from_metadata(metadata: &ObjectMeta) -> Self {
        let mut live = Self {
            uid: metadata.uid.clone().unwrap_or_default(),
            labels: metadata.labels.clone().unwrap_or_default(),
            annotations: metadata.annotations.clone().unwrap_or_default(),
            generation: metadata.generation.unwrap_or_default(),
            created: metadata.creation_timestamp.as_ref().map(|time| time.0),
            deleting: metadata.deletion_timestamp.is_some(),
            finalizers: Finalizer::all(metadata).into(),
            rollout: None,
            job_result: None,
            unavailable: None,
            is_strategy: false,
            has_owners: metadata.owner_references.as_ref().is_some_and(|owners| !owners.is_empty()),
            own_keys: OwnKeys { labels: 0, annotations: 0, foreign_generation: false },
            written_by_operator: metadata.managed_fields.iter().flatten().any(is_of_operator),
            digest: 0,
            json: None,
        };
        live.annotations.retain(|key, _| !IGNORED_ANNOTATIONS.contains(&key.as_str()));
        live.own_keys = OwnKeys::new(&live, metadata.managed_fields.as_deref().unwrap_or_default());
        let mut hasher = DefaultHasher::new();
        (&live.uid, &live.labels, &live.annotations, live.generation, live.deleting).hash(&mut hasher);
        (live.own_keys, live.has_owners, &live.finalizers).hash(&mut hasher);
        live.digest = hasher.finish();
        live
    }

    pub(crate) fn fields(&self) -> Result<Option<LiveFields>, Failure> {
        let Some(json) = &self.json else { return Ok(None) };
        // The error of the parser is dropped, because it quotes the input, which may be a Secret.
        let unreadable = |_| Failure::bug(reason::UNREADABLE_ANSWER, "an object in the cache is not JSON");
        let (content, foreign, managers) = serde_json::from_slice(json).map_err(unreadable)?;
        Ok(Some(LiveFields { content, foreign, managers }))
    }

    /// The fields of the object.
    pub fn content(&self) -> Option<Value> {
        self.fields().ok()?.map(|fields| fields.content)
    }

    /// A value under `data` of a Secret or ConfigMap, as it is in JSON.
    pub fn data(&self, key: &str) -> Option<String> {
        let fields = self.fields().ok()??;
        fields.content.get("data")?.get(key)?.as_str().map(ToOwned::to_owned)
    }

    /// Whether a KubeVirt operator created the object, according to its label and to the annotations that only an
    /// operator writes. The operator deletes such an object when the installation does not contain it, so both must be
    /// there: any client can copy one of them.
    pub(crate) fn is_ours(&self) -> bool {
        let by_label = self.labels.get(label::MANAGED_BY).is_none_or(|manager| MANAGERS.contains(&manager.as_str()));
        let required = [annotation::VERSION, annotation::REGISTRY];
        by_label && required.iter().all(|key| self.annotations.contains_key(*key))
    }

    /// Whether a KubeVirt operator installed the object.
    pub fn is_installed(&self) -> bool {
        self.is_ours()
    }

    /// Whether the removal of an installation deletes the object if it is where an installation has objects. The label
    /// is enough, as for upstream virt-operator.
    pub(crate) fn is_managed(&self) -> bool {
        let by_label = self.labels.get(label::MANAGED_BY).is_some_and(|manager| MANAGERS.contains(&manager.as_str()));
        by_label || self.is_ours()
    }

    /// Whether an object with the name of an object of the installation is that object. One proof is enough: any of the
    /// labels and annotations of an operator, or an entry of an operator in `managedFields`. So an object that has lost
    /// its label or its annotations is repaired. Instancetypes and preferences of other clients are adopted, as
    /// upstream virt-operator does.
    pub(crate) fn is_recognized(&self, kind: Kind) -> bool {
        let by_label = self.labels.get(label::MANAGED_BY).is_some_and(|manager| MANAGERS.contains(&manager.as_str()));
        let by_annotation = IDENTITY.iter().any(|key| self.annotations.contains_key(*key));
        by_label || by_annotation || self.written_by_operator || is_exclusive(kind)
    }

    /// The labels that only a KubeVirt operator has set.
    pub(crate) fn own_labels(&self) -> impl Iterator<Item = &String> {
        own(&self.labels, self.own_keys.labels)
    }

    /// The annotations that only a KubeVirt operator has set.
    pub(crate) fn own_annotations(&self) -> impl Iterator<Item = &String> {
        own(&self.annotations, self.own_keys.annotations)
    }

    /// Whether another client has set the annotation with the generation of the resource.
    pub(crate) fn has_foreign_generation(&self) -> bool {
        self.own_keys.foreign_generation
    }

    /// The ready pods of a workload.
    pub fn ready_pods(&self) -> usize {
        self.rollout.and_then(|rollout| usize::try_from(rollout.ready).ok()).unwrap_or_default()
    }

    pub fn annotation(&self, key: &str) -> &str {
        self.annotations.get(key).map(String::as_str).unwrap_or_default()
    }
}

/// The label alone is not enough: any client can set it on any object.
fn contains_strategy(live: &LiveObject, data: &Value) -> bool {
    let is_config_map = data.get("type").is_none() && data.get("spec").is_none();
    let text = data.get("data").and_then(|data| data.get(STRATEGY_MANIFESTS));
    is_config_map && text.is_some() && live.labels.contains_key(label::INSTALL_STRATEGY)
}

fn own(map: &BTreeMap<String, String>, mask: u64) -> impl Iterator<Item = &String> {
    map.keys().take(64).enumerate().filter(move |(index, _)| mask >> index & 1 == 1).map(|(_, key)| key)
}

/// A subresource does not change the specification.
fn is_foreign(entry: &ManagedFieldsEntry) -> bool {
    has_no_subresource(entry) && entry.manager.as_deref() != Some(FIELD_MANAGER)
}

fn is_of_operator(entry: &ManagedFieldsEntry) -> bool {
    has_no_subresource(entry) && entry.manager.as_deref() == Some(FIELD_MANAGER)
}

fn has_no_subresource(entry: &ManagedFieldsEntry) -> bool {
    entry.subresource.as_deref().unwrap_or_default().is_empty()
}

/// The deletion of a live object.
pub(crate) fn delete(kind: Kind, key: &ObjectKey, live: &LiveObject) -> Write {
    let target = Target::new(kind.resource(), key.clone());
    Write::Delete { target, uid: live.uid.clone(), resource_version: None }
}
