//! The watches of one program, declared as a table: each call of [`Watches::add`] creates the cache of one kind.
//!
//! No watch runs before [`Watches::start`], so every handler can subscribe to the caches first and misses no event.

use std::{
    fmt::{self, Debug},
    pin::Pin,
    sync::Arc,
};

use kube::{Api, Client, Resource};
use prometheus_client::{
    collector::Collector,
    encoding::DescriptorEncoder,
    metrics::{family::Family, gauge::Gauge},
};
use serde::de::DeserializeOwned;
use tokio::sync::watch::Receiver;
use tokio_util::sync::CancellationToken;
use vitivirt_api::ApiResource;

use super::{Cache, IndexFn, SyncState, WatchConfig, WriteObserver, watch};
use crate::{
    health::Health,
    metrics::{Metrics, ResourceLabel, encode_unreadable},
};

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Watches that are declared and not yet started.
pub struct Watches {
    pub client: Client,
    health: Arc<Health>,
    stop: CancellationToken,
    tasks: Vec<(&'static str, Task)>,
    kinds: Vec<WatchedKind>,
}

impl Watches {
    pub fn new(client: Client, health: Arc<Health>, stop: CancellationToken) -> Self {
        Self { client, health, stop, tasks: Vec::new(), kinds: Vec::new() }
    }

    /// Declares the watch of one kind and returns its cache. The program is ready only after the first list.
    pub fn add<K, V>(
        &mut self,
        name: &'static str,
        resource: &ApiResource,
        api: Api<K>,
        config: WatchConfig,
        indexes: &[(&'static str, IndexFn<V>)],
        project: fn(K) -> V,
    ) -> Cache<V>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
        V: PartialEq + Send + Sync + 'static,
    {
        let cache = self.add_optional(name, api, config, indexes, project);
        let handle = cache.clone();
        self.health.add_readiness_check(name, move || handle.sync_state() != SyncState::Pending);
        self.kinds.push(WatchedKind { resource: resource.clone(), cache: Arc::new(cache.clone()) });
        cache
    }

    /// Declares a watch whose first list neither readiness nor the leader waits for.
    pub fn add_optional<K, V>(
        &mut self,
        name: &'static str,
        api: Api<K>,
        config: WatchConfig,
        indexes: &[(&'static str, IndexFn<V>)],
        project: fn(K) -> V,
    ) -> Cache<V>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
        V: PartialEq + Send + Sync + 'static,
    {
        let (cache, task) = watch(api, config, indexes, project, self.stop.clone());
        self.tasks.push((name, Box::pin(task)));
        cache
    }

    /// The kinds that were added so far.
    pub fn kinds(&self) -> WatchedKinds {
        WatchedKinds(self.kinds.clone().into())
    }

    /// Runs every watch until the program stops.
    pub fn start(self, metrics: &Metrics) {
        let unreadable = UnreadableGauge(self.kinds().0);
        metrics.register(|registry| registry.register_collector(Box::new(unreadable)));
        for (name, task) in self.tasks {
            self.health.spawn(name, task);
        }
    }
}

/// The number of objects that the caches skip. The log names them.
#[derive(Debug)]
struct UnreadableGauge(Arc<[WatchedKind]>);

impl Collector for UnreadableGauge {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauge = Family::<ResourceLabel, Gauge>::default();
        for kind in &*self.0 {
            let count = i64::try_from(kind.cache.unreadable_count()).unwrap_or(i64::MAX);
            gauge.get_or_create(&ResourceLabel { resource: kind.resource.plural.clone() }).set(count);
        }
        encode_unreadable(&gauge, encoder)
    }
}

#[derive(Clone)]
struct WatchedKind {
    resource: ApiResource,
    cache: Arc<dyn AnyCache>,
}

impl Debug for WatchedKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.resource.plural.fmt(f)
    }
}

/// A cache of any kind.
trait AnyCache: WriteObserver {
    fn synced(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
    fn sync_changes(&self) -> Receiver<SyncState>;
    fn retry_now(&self);
    fn unreadable_count(&self) -> usize;
    fn as_write_observer(self: Arc<Self>) -> Arc<dyn WriteObserver>;
}

impl<V: PartialEq + Send + Sync + 'static> AnyCache for Cache<V> {
    fn synced(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(self.ready())
    }

    fn sync_changes(&self) -> Receiver<SyncState> {
        Cache::sync_changes(self)
    }

    fn retry_now(&self) {
        if self.sync_state() != SyncState::Synced {
            Cache::retry_now(self);
        }
    }

    fn unreadable_count(&self) -> usize {
        Cache::unreadable_count(self)
    }

    fn as_write_observer(self: Arc<Self>) -> Arc<dyn WriteObserver> {
        self
    }
}

/// The kinds that a program watches; clones share the caches.
#[derive(Clone)]
pub struct WatchedKinds(Arc<[WatchedKind]>);

impl WatchedKinds {
    /// Returns when every kind was listed, or is known not to be served.
    pub async fn synced(&self) {
        for kind in &*self.0 {
            kind.cache.synced().await;
        }
    }

    /// Retries the matching kinds that are not synced, because the API server may serve them now.
    pub fn retry(&self, matches: impl Fn(&ApiResource) -> bool) {
        self.0.iter().filter(|kind| matches(&kind.resource)).for_each(|kind| kind.cache.retry_now());
    }

    /// Retries the kind of a CRD, which is named `plural.group`.
    pub fn retry_crd(&self, name: &str) {
        self.retry(|resource| name.split_once('.') == Some((resource.plural.as_str(), resource.group.as_str())));
    }

    /// Every cache by its kind, for the executor to notify of writes.
    pub fn write_observers(&self) -> impl Iterator<Item = (&ApiResource, Arc<dyn WriteObserver>)> {
        self.0.iter().map(|kind| (&kind.resource, kind.cache.clone().as_write_observer()))
    }

    /// Calls `handler` whenever the API server begins or ceases to serve one of the matching kinds.
    pub fn on_served_change(
        &self,
        health: &Arc<Health>,
        matches: impl Fn(&ApiResource) -> bool,
        handler: impl Fn() + Clone + Send + 'static,
    ) {
        for kind in self.0.iter().filter(|kind| matches(&kind.resource)) {
            let (mut changes, handler) = (kind.cache.sync_changes(), handler.clone());
            health.spawn("a handler of kinds that are installed or removed", async move {
                while changes.changed().await.is_ok() {
                    handler();
                }
            });
        }
    }
}
