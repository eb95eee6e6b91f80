//! Everything that a pass over a KubeVirt resource reads, followed on every replica and pruned to what is read.
//!
//! Kinds that only some clusters have are followed too: whether they are there is what the cache itself says. They are
//! not asked for over and over; a definition or an aggregated API that appears says that it is time to look again.

use std::{collections::BTreeMap, fmt::Debug, sync::Arc, time::Duration};

use k8s_openapi::{
    ByteString,
    api::core::v1::{Namespace, Node},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Resource,
    core::{DynamicObject, PartialObjectMeta},
};
use serde::de::DeserializeOwned;
use vitivirt_api::{ApiResource, ObjectKey, kubevirt::KubeVirt};
use vitivirt_install::{Cluster, Kind, LiveObject, Objects, certificates::KeyPair};
use vitivirt_runtime::{
    program::Context,
    reconcile::{Backoff, Executor},
    watch::{Cache, Change, SyncState, WatchConfig, watch},
};

use crate::{router::EventRouter, stored_objects::StoredObjectRecorder};

pub(crate) const MANAGED: &str = "app.kubernetes.io/managed-by in (virt-operator,kubevirt-operator)";
/// A definition or an APIService says when it is time.
const SELDOM: Backoff = Backoff::new(Duration::from_secs(3600), Duration::from_secs(3600));
pub(crate) const SCHEDULABLE: &str = "kubevirt.io/schedulable=true";

/// Handles; clones share the content.
#[derive(Clone)]
pub(crate) struct Caches {
    pub(crate) kubevirts: Cache<KubeVirt>,
    objects: Arc<BTreeMap<Kind, Cache<LiveObject>>>,
    crds: Cache<CrdEntry>,
    namespace: Cache<LiveObject>,
    nodes: Cache<()>,
    /// The namespace that is followed.
    place: Arc<str>,
}

/// A definition, whoever's it is. Its version tells when it is established.
#[derive(PartialEq)]
pub(crate) struct CrdEntry {
    pub(crate) live: Arc<LiveObject>,
    version: Box<str>,
}

impl Caches {
    /// Follows everything from now on and until the program ends. `wake` learns of every change.
    pub(crate) fn start(context: &Context, namespace: &str, router: &Arc<EventRouter>) -> Self {
        let client = || context.clients.rate_limited.clone();
        let following = Following { context };
        let kubevirts = following.start(
            "kubevirts",
            Api::<KubeVirt>::all(client()),
            WatchConfig::default(),
            |kubevirt| kubevirt,
            router.on(EventRouter::kubevirt_changed),
        );
        let objects = Kind::ALL.into_iter().filter(|kind| *kind != Kind::CustomResourceDefinition).map(|kind| {
            let resource = kind.resource();
            let api: Api<DynamicObject> = match is_followed_in_one_namespace(kind) {
                true => Api::namespaced_with(client(), namespace, &resource),
                false => Api::all_with(client(), &resource),
            };
            let selection = WatchConfig {
                // Others' tell which APIs the cluster has.
                labels: (kind != Kind::ApiService).then(|| MANAGED.to_owned()),
                page_size: 50,
                absent_retry: if is_optional(kind) { SELDOM } else { WatchConfig::default().absent_retry },
                ..WatchConfig::default()
            };
            let router = router.clone();
            let tell = move |change: &Change<LiveObject>| router.object_changed(kind, change);
            (kind, following.start(kind.name(), api, selection, project, tell))
        });
        let objects: Arc<BTreeMap<Kind, Cache<LiveObject>>> = Arc::new(objects.collect());
        let caches = Self {
            kubevirts,
            objects,
            crds: following.start(
                "definitions",
                Api::<PartialObjectMeta<CustomResourceDefinition>>::all(client()),
                WatchConfig::default(),
                |crd| CrdEntry {
                    live: Arc::new(LiveObject::from_metadata(&crd.metadata)),
                    version: crd.metadata.resource_version.unwrap_or_default().into(),
                },
                router.on(EventRouter::crd_changed),
            ),
            namespace: following.start(
                "namespace",
                Api::<PartialObjectMeta<Namespace>>::all(client()),
                WatchConfig { fields: Some(format!("metadata.name={namespace}")), ..WatchConfig::default() },
                |namespace| LiveObject::from_metadata(&namespace.metadata),
                router.on(EventRouter::changed),
            ),
            nodes: following.start(
                "nodes",
                Api::<PartialObjectMeta<Node>>::all(client()),
                WatchConfig::labels(SCHEDULABLE),
                |_| (),
                router.on(EventRouter::changed),
            ),
            place: namespace.into(),
        };
        router.know(caches.clone());
        for cache in caches.objects.values() {
            context.spawn("APIs that come and go", tell_of_apis(cache.sync_changes(), router.clone()));
        }
        caches
    }

    /// Returns when all of them can be believed.
    pub(crate) async fn ready(&self) {
        self.kubevirts.ready().await;
        for cache in self.objects.values() {
            cache.ready().await;
        }
        self.crds.ready().await;
        self.namespace.ready().await;
        self.nodes.ready().await;
    }

    /// Lets every cache know of what the executor writes, and notes what the server made of it.
    pub(crate) fn over(&self, executor: Executor, stored_objects: &Arc<StoredObjectRecorder>) -> Executor {
        let crds = Kind::CustomResourceDefinition;
        let mut executor = executor
            .observe_writes(&ApiResource::erase::<KubeVirt>(&()), Arc::new(self.kubevirts.clone()))
            .observe_writes(&ApiResource::erase::<Namespace>(&()), Arc::new(self.namespace.clone()))
            .observe_writes(&crds.resource(), Arc::new(self.crds.clone()))
            .observe_writes(&crds.resource(), stored_objects.observer(crds));
        for (kind, cache) in &*self.objects {
            let resource = kind.resource();
            executor = executor
                .observe_writes(&resource, Arc::new(cache.clone()))
                .observe_writes(&resource, stored_objects.observer(*kind));
        }
        executor
    }

    /// Everything that is managed, as it is known now.
    pub(crate) fn objects(&self) -> Objects {
        let mut objects = Objects::default();
        for (kind, cache) in &*self.objects {
            for (key, entry) in cache.all() {
                objects.insert(*kind, key, entry.value);
            }
        }
        for (key, entry) in self.crds.all() {
            objects.insert(Kind::CustomResourceDefinition, key, entry.value.live.clone());
        }
        objects
    }

    /// The resource that was there first in the operator's namespace: the one that is installed. Elsewhere anybody who
    /// administers a namespace may create one, and none of those counts.
    pub(crate) fn first_kubevirt(&self) -> Option<Arc<KubeVirt>> {
        let all = self.kubevirts.all().into_iter().filter(|(key, _)| key.namespace() == Some(&*self.place));
        let all = all.map(|(_, entry)| entry.value);
        all.min_by_key(|kubevirt| {
            let metadata = &kubevirt.metadata;
            (metadata.creation_timestamp.as_ref().map(|time| time.0), ObjectKey::of(metadata))
        })
    }

    /// A certificate with its key, if its Secret holds one.
    pub(crate) fn key_pair(&self, secret: &str) -> Option<KeyPair> {
        let key = ObjectKey::namespaced(&self.place, secret);
        certificate(&*self.objects.get(&Kind::Secret)?.get(&key)?)
    }

    /// Whether absence from the caches is absence from the cluster. A kind that every cluster has, and whose definition
    /// is there, cannot be absent: whoever says so is starting.
    pub(crate) fn are_complete(&self) -> bool {
        let is_absent =
            |kind: Kind| self.objects.get(&kind).is_some_and(|cache| cache.sync_state() == SyncState::KindNotServed);
        let is_believable = |kind: Kind| {
            let resource = kind.resource();
            let crd = ObjectKey::cluster(&format!("{}.{}", resource.plural, resource.group));
            !is_absent(kind) || is_optional(kind) && self.crds.get(&crd).is_none()
        };
        let policies = [Kind::ValidatingAdmissionPolicy, Kind::ValidatingAdmissionPolicyBinding].map(is_absent);
        self.kubevirts.is_complete()
            && self.crds.is_complete()
            && self.objects.values().all(Cache::is_complete)
            && self.objects.keys().all(|kind| is_believable(*kind))
            && policies.iter().all(|absent| *absent == policies.contains(&true))
    }

    pub(crate) fn namespace(&self, name: &str) -> Option<Arc<LiveObject>> {
        self.namespace.get(&ObjectKey::cluster(name))
    }

    /// What the cluster offers, but for its monitoring stack.
    pub(crate) fn cluster(&self) -> Cluster {
        let has = |kind: Kind| self.objects.get(&kind).is_some_and(|cache| cache.sync_state() == SyncState::Synced);
        Cluster::from_kinds(has, self.nodes.len())
    }

    /// A definition or an aggregated API of this group, or of all that begin so, has come.
    pub(crate) fn retry_now(&self, is_about: impl Fn(&ApiResource) -> bool) {
        for (kind, cache) in &*self.objects {
            if cache.sync_state() == SyncState::KindNotServed && is_about(&kind.resource()) {
                cache.retry_now();
            }
        }
    }
}

/// What a Secret of the type `kubernetes.io/tls` holds.
pub(crate) fn certificate(secret: &LiveObject) -> Option<KeyPair> {
    let bytes = |key: &str| {
        let text = secret.data(key)?;
        serde_json::from_value::<ByteString>(text.into()).ok().map(|bytes| bytes.0)
    };
    Some(KeyPair { certificate: bytes("tls.crt")?, key: bytes("tls.key")? })
}

/// Those that may be elsewhere, or that have no namespace.
fn is_followed_in_one_namespace(kind: Kind) -> bool {
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

/// Kinds that a cluster may not have.
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

/// What is installed depends on which APIs there are.
async fn tell_of_apis(mut sync: tokio::sync::watch::Receiver<SyncState>, router: Arc<EventRouter>) {
    while sync.changed().await.is_ok() {
        router.all();
    }
}

struct Following<'a> {
    context: &'a Context,
}

impl Following<'_> {
    fn start<K, V>(
        &self,
        name: &'static str,
        api: Api<K>,
        selection: WatchConfig,
        project: fn(K) -> V,
        on_change: impl Fn(&Change<V>) + Send + Sync + 'static,
    ) -> Cache<V>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
        V: PartialEq + Send + Sync + 'static,
    {
        let (cache, following) = watch(api, selection, &[], project, on_change, self.context.shutdown.clone());
        let handle = cache.clone();
        self.context.health.require(name, move || handle.sync_state() != SyncState::Pending);
        self.context.spawn(name, following);
        cache
    }
}

/// StoredObjectRecorder to writes of big objects, and nothing else, are asked for without their content.
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
    use vitivirt_install::names::label;

    use super::*;

    #[test]
    fn what_is_selected_carries_our_label() {
        let (key, value) = (label::MANAGED_BY, label::MANAGED_BY_VALUE);
        assert!(MANAGED.starts_with(key) && MANAGED.contains(value));
    }

    /// It would be deleted and made again before the watch shows the whole.
    #[test]
    fn a_strategy_that_was_just_written_is_one() {
        let of = |kind: &str| {
            project(
                serde_json::from_value(serde_json::json!({
                    "apiVersion": "v1", "kind": kind, "metadata": {"name": "s", "labels": {(label::INSTALL_STRATEGY): ""}},
                }))
                .unwrap(),
            )
        };
        assert!(of("PartialObjectMetadata").is_strategy);
        assert!(!of("ConfigMap").is_strategy, "it has lost its content");
    }
}
