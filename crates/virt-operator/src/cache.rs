//! Everything that a reconcile of a KubeVirt resource reads: one watch per kind, on every replica, projected to the
//! fields that are read.
//!
//! Kinds that only some clusters serve are watched too: their cache knows whether the kind is served. They are not
//! polled: the event of a CRD or an APIService retries them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::{
    ByteString,
    api::core::v1::{Namespace, Pod as KubernetesPod},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kube::{
    Api,
    core::{DynamicObject, PartialObjectMeta},
};
use vitivirt_api::{ApiResource, ObjectKey, kubevirt::KubeVirt};
use vitivirt_install::{
    Cluster, Kind, LiveObject, Objects,
    certificates::KeyPair,
    names::VIRT_HANDLER,
    pods::{FOREIGN_PODS, OPERATOR_PODS, Pod, Pods},
};
use vitivirt_runtime::{
    backoff::Backoff,
    reconcile::Executor,
    watch::{Cache, Expression, Selector, SyncState, WatchConfig, WatchedKinds, Watches},
};

use crate::stored_objects::StoredObjectRecorder;

/// An event of a CRD or an APIService retries a kind that is not served; this is the fallback.
const ABSENT_RETRY: Backoff = Backoff::new(Duration::from_secs(3600), Duration::from_secs(3600));

/// Selects the objects that virt-operator manages, by both values of the label that KubeVirt releases use.
pub(crate) fn managed_selector() -> Selector {
    let values = ["virt-operator", "kubevirt-operator"].map(str::to_owned);
    Expression::In("app.kubernetes.io/managed-by".to_owned(), values.into()).into()
}

/// Selects the nodes on which virt-handler runs.
pub(crate) fn schedulable_selector() -> Selector {
    Expression::Equal("kubevirt.io/schedulable".to_owned(), "true".to_owned()).into()
}

/// Selects the pods of the installation's components. virt-launcher pods are not among them.
pub(crate) fn component_pods_selector() -> Selector {
    let (key, value) = FOREIGN_PODS;
    let mut selector = managed_selector();
    selector.extend(Selector::from(Expression::NotIn(key.to_owned(), [value.to_owned()].into())));
    selector
}

/// Selects the operator's own pods and those of its Job. They have no label in common with those of the components.
fn operator_pods_selector() -> Selector {
    let (key, values) = OPERATOR_PODS;
    Expression::In(key.to_owned(), values.map(str::to_owned).into()).into()
}

/// The first KubeVirt resource of a namespace in this order is installed.
pub(crate) fn kubevirt_order(KubeVirt { metadata, .. }: &KubeVirt) -> (Option<Timestamp>, ObjectKey) {
    (metadata.creation_timestamp.as_ref().map(|time| time.0), ObjectKey::from_metadata(metadata))
}

/// Handles to the caches. Clones share the content.
#[derive(Clone)]
pub(crate) struct Caches {
    pub(crate) kubevirts: Cache<KubeVirt>,
    objects: Arc<BTreeMap<Kind, Cache<LiveObject>>>,
    pub(crate) crds: Cache<CrdEntry>,
    /// The namespace of the operator, as the only object.
    pub(crate) own_namespace: Cache<LiveObject>,
    pub(crate) component_pods: Cache<Pod>,
    pub(crate) operator_pods: Cache<Pod>,
    pub(crate) kinds: WatchedKinds,
    /// The name of the operator's namespace.
    namespace: Arc<str>,
}

/// Any CRD of the cluster. Its resource version changes when it becomes established.
#[derive(PartialEq)]
pub(crate) struct CrdEntry {
    pub(crate) live: Arc<LiveObject>,
    version: Box<str>,
}

impl Caches {
    /// Declares the watches. `namespace` is that of the operator.
    pub(crate) fn new(watches: &mut Watches, namespace: &str) -> Self {
        let client = watches.client.clone();
        let client = || client.clone();
        let of = ApiResource::erase::<KubeVirt>(&());
        let api = Api::<KubeVirt>::all(client());
        let kubevirts = watches.add("kubevirts", &of, api, WatchConfig::default(), &[], |kubevirt| kubevirt);
        let objects = installed_kinds().map(|kind| {
            let of = kind.resource();
            let api: Api<DynamicObject> = if is_watched_in_one_namespace(kind) {
                Api::namespaced_with(client(), namespace, &of)
            } else {
                Api::all_with(client(), &of)
            };
            let config = WatchConfig {
                // All APIServices are watched: they show which APIs the cluster has.
                labels: if kind == Kind::ApiService { Selector::default() } else { managed_selector() },
                page_size: 50,
                absent_retry: if is_optional(kind) { ABSENT_RETRY } else { WatchConfig::default().absent_retry },
                ..WatchConfig::default()
            };
            (kind, watches.add(kind.name(), &of, api, config, &[], project))
        });
        let objects: Arc<BTreeMap<Kind, Cache<LiveObject>>> = Arc::new(objects.collect());
        let of = Kind::CustomResourceDefinition.resource();
        let api = Api::<PartialObjectMeta<CustomResourceDefinition>>::all(client());
        let crds = watches.add("customresourcedefinitions", &of, api, WatchConfig::default(), &[], |crd| CrdEntry {
            live: Arc::new(LiveObject::from_metadata(&crd.metadata)),
            version: crd.metadata.resource_version.unwrap_or_default().into(),
        });
        let of = ApiResource::erase::<Namespace>(&());
        let api = Api::<PartialObjectMeta<Namespace>>::all(client());
        let by_name = WatchConfig { fields: Some(format!("metadata.name={namespace}")), ..WatchConfig::default() };
        let own_namespace = watches
            .add("namespace", &of, api, by_name, &[], |namespace| LiveObject::from_metadata(&namespace.metadata));
        let of = ApiResource::erase::<KubernetesPod>(&());
        let mut pods = |name: &'static str, selector: Selector| {
            let api = Api::<KubernetesPod>::namespaced(client(), namespace);
            watches.add(name, &of, api, WatchConfig { page_size: 50, ..WatchConfig::labels(selector) }, &[], Pod::new)
        };
        let component_pods = pods("pods of components", component_pods_selector());
        let operator_pods = pods("pods of the operator", operator_pods_selector());
        let kinds = watches.kinds();
        let namespace = namespace.into();
        Self { kubevirts, objects, crds, own_namespace, component_pods, operator_pods, kinds, namespace }
    }

    /// Notifies the caches of the executor's writes, and records what the API server stored.
    pub(crate) fn observe_writes(&self, executor: Executor, stored_objects: &Arc<StoredObjectRecorder>) -> Executor {
        let executor = executor.notify(self.kinds.write_observers());
        Kind::ALL
            .into_iter()
            .fold(executor, |executor, kind| executor.observe_writes(&kind.resource(), stored_objects.observer(kind)))
    }

    /// The caches of the kinds that an installation consists of, except CRDs.
    pub(crate) fn installed_objects(&self) -> impl Iterator<Item = (Kind, &Cache<LiveObject>)> {
        self.objects.iter().map(|(kind, cache)| (*kind, cache))
    }

    /// Every managed object.
    pub(crate) fn objects(&self) -> Objects {
        let mut objects = Objects::default();
        for (kind, cache) in &*self.objects {
            for (key, entry) in cache.entries() {
                objects.insert(*kind, key, entry.value);
            }
        }
        for (key, entry) in self.crds.entries() {
            objects.insert(Kind::CustomResourceDefinition, key, entry.value.live.clone());
        }
        objects
    }

    /// The pods of the installation and of the operator. Which nodes are not ready is not known here.
    pub(crate) fn pods(&self) -> Pods {
        let caches = [&self.component_pods, &self.operator_pods];
        caches.into_iter().flat_map(Cache::entries).map(|(key, entry)| (key, entry.value)).collect()
    }

    /// The oldest KubeVirt resource in the operator's namespace: the one that is installed. Resources in other
    /// namespaces do not count, because every namespace administrator may create one.
    pub(crate) fn first_kubevirt(&self) -> Option<Arc<KubeVirt>> {
        let all = self.kubevirts.entries().into_iter().filter(|(key, _)| key.namespace() == Some(&*self.namespace));
        all.map(|(_, entry)| entry.value).min_by_key(|kubevirt| kubevirt_order(kubevirt))
    }

    /// The certificate and key in a Secret.
    pub(crate) fn key_pair(&self, secret: &str) -> Option<KeyPair> {
        let key = ObjectKey::namespaced(&self.namespace, secret);
        certificate(&*self.objects.get(&Kind::Secret)?.get(&key)?)
    }

    /// A CA bundle in a ConfigMap.
    pub(crate) fn bundle(&self, config_map: &str, key: &str) -> Option<String> {
        let name = ObjectKey::namespaced(&self.namespace, config_map);
        self.objects.get(&Kind::ConfigMap)?.get(&name)?.data(key)
    }

    /// Whether an object that is not in the caches is not in the cluster. An API server that does not serve a kind that
    /// every cluster has, or whose CRD exists, is still starting.
    pub(crate) fn are_complete(&self) -> bool {
        let is_absent =
            |kind: Kind| self.objects.get(&kind).is_some_and(|cache| cache.sync_state() == SyncState::KindNotServed);
        let is_plausible = |kind: Kind| {
            let resource = kind.resource();
            let crd = ObjectKey::cluster(&format!("{}.{}", resource.plural, resource.group));
            !is_absent(kind) || is_optional(kind) && self.crds.get(&crd).is_none()
        };
        let policies = [Kind::ValidatingAdmissionPolicy, Kind::ValidatingAdmissionPolicyBinding].map(is_absent);
        self.kubevirts.is_complete()
            && self.crds.is_complete()
            && self.objects.values().all(Cache::is_complete)
            && self.objects.keys().all(|kind| is_plausible(*kind))
            && policies.iter().all(|absent| *absent == policies.contains(&true))
    }

    pub(crate) fn namespace(&self, name: &str) -> Option<Arc<LiveObject>> {
        self.own_namespace.get(&ObjectKey::cluster(name))
    }

    /// The number of nodes on which virt-handler is ready.
    pub(crate) fn ready_handlers(&self) -> usize {
        let key = ObjectKey::namespaced(&self.namespace, VIRT_HANDLER);
        self.objects.get(&Kind::DaemonSet).and_then(|cache| cache.get(&key)).map_or(0, |live| live.ready_pods())
    }

    /// The features of the cluster, except for its monitoring stack.
    pub(crate) fn cluster(&self, schedulable_nodes: usize) -> Cluster {
        let has = |kind: Kind| self.objects.get(&kind).is_some_and(|cache| cache.sync_state() == SyncState::Synced);
        Cluster::from_kinds(has, schedulable_nodes)
    }
}

/// The content of a Secret of type `kubernetes.io/tls`.
pub(crate) fn certificate(secret: &LiveObject) -> Option<KeyPair> {
    let bytes = |key: &str| {
        let text = secret.data(key)?;
        serde_json::from_value::<ByteString>(text.into()).ok().map(|bytes| bytes.0)
    };
    Some(KeyPair { certificate: bytes("tls.crt")?, key: bytes("tls.key")? })
}

/// The other kinds are cluster-scoped, or may be installed in another namespace.
fn is_watched_in_one_namespace(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::ServiceAccount
            | Kind::Service
            | Kind::Secret
            | Kind::ConfigMap
            | Kind::Deployment
            | Kind::DaemonSet
            | Kind::PodDisruptionBudget
            | Kind::PrometheusRule
            | Kind::Route
            | Kind::Job
    )
}

/// Kinds that a cluster may not serve.
fn is_optional(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::ServiceMonitor
            | Kind::PrometheusRule
            | Kind::SecurityContextConstraints
            | Kind::Route
            | Kind::Instancetype
            | Kind::Preference
            | Kind::ValidatingAdmissionPolicy
            | Kind::ValidatingAdmissionPolicyBinding
    )
}

/// The kinds that are watched with their content. Of CRDs only the metadata is watched.
pub(crate) fn installed_kinds() -> impl Iterator<Item = Kind> {
    Kind::ALL.into_iter().filter(|kind| *kind != Kind::CustomResourceDefinition)
}

/// The response to the write of a large object has only metadata. All other objects have their content.
fn project(object: DynamicObject) -> LiveObject {
    let is_metadata_only = object.types.as_ref().is_some_and(|types| types.kind == "PartialObjectMetadata");
    if is_metadata_only {
        LiveObject::from_metadata_response(&object.metadata)
    } else {
        LiveObject::new(&object.metadata, object.data)
    }
}

#[cfg(test)]
mod tests {
    use kube::core::SelectorExt;
    use vitivirt_install::names::label;

    use super::*;

    #[test]
    fn the_selector_matches_the_label_of_this_operator() {
        let (key, value) = (label::MANAGED_BY, label::MANAGED_BY_VALUE);
        assert!(managed_selector().matches(&BTreeMap::from([(key.to_owned(), value.to_owned())])));
    }

    #[test]
    fn virt_launcher_pods_are_not_selected() {
        let labels = |app: &str| {
            [("kubevirt.io", app), (label::MANAGED_BY, label::MANAGED_BY_VALUE)]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into()
        };
        assert!(component_pods_selector().matches(&labels("virt-api")));
        assert!(!component_pods_selector().matches(&labels("virt-launcher")));
        assert!(operator_pods_selector().matches(&labels("virt-operator")));
    }

    /// Otherwise the operator would delete the strategy, and create it again, before the watch delivers its content.
    #[test]
    fn the_metadata_response_to_the_write_of_a_strategy_is_a_strategy() {
        let projected = |kind: &str| {
            project(
                serde_json::from_value(serde_json::json!({
                    "apiVersion": "v1", "kind": kind, "metadata": {"name": "s", "labels": {(label::INSTALL_STRATEGY): ""}},
                }))
                .unwrap(),
            )
        };
        assert!(projected("PartialObjectMetadata").is_strategy);
        assert!(!projected("ConfigMap").is_strategy, "it has lost its content");
    }
}
