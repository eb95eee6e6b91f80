//! The Secrets that `cloudInit.secretRef` of Machines names. Each namespace with such a Machine has one watch of the
//! metadata of its Secrets; so the number of watches does not grow with the number of Machines. The operator keeps only
//! names and versions. The data is read only when a cloud-init Secret must be written.
//!
//! A reconcile waits a moment for the first list of a namespace, and reads the Secret if the list takes longer. A Machine
//! with a secretRef costs one read, and one more for each change of the Secret. The cloud-init Secret names the version that
//! it was written from, so a new leader reads none of them.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, core::PartialObjectMeta};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use vitivirt_api::{Failure, ObjectKey, Target};
use vitivirt_machine::{SecretBytes, resolve::SecretSource};
use vitivirt_runtime::{
    health::Health,
    reconcile::classify,
    watch::{Cache, Subscribers, SyncState, WatchConfig, watch},
};

/// A page of metadata may contain annotations of a quarter of a megabyte each.
const PAGE_SIZE: u32 = 50;

/// How long reconciles wait for the first list of a namespace.
const LIST_PATIENCE: Duration = Duration::from_secs(3);

pub(crate) struct SourceSecrets {
    client: Client,
    /// For watches only. They do not delay those of the caches.
    watch_client: Client,
    changes: Arc<Subscribers<ObjectKey>>,
    health: Arc<Health>,
    stop: CancellationToken,
    namespaces: Mutex<HashMap<Box<str>, NamespaceWatch>>,
}

/// The watch of one namespace.
struct NamespaceWatch {
    /// The resource versions of its Secrets.
    versions: Cache<Box<str>>,
    /// The names that Machines refer to. Without one the watch stops.
    names: HashSet<Box<str>>,
    started: Instant,
    stop: CancellationToken,
}

impl Drop for NamespaceWatch {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// What the watch knows about a Secret.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SecretState {
    /// The watch has not listed the namespace yet.
    Unknown,
    Missing,
    Version(Box<str>),
}

/// One key of a Secret, and the resource version of the Secret.
pub(crate) struct SecretRead {
    pub(crate) version: Box<str>,
    /// None: the Secret has no such key.
    pub(crate) bytes: Option<SecretBytes>,
}

impl SourceSecrets {
    pub(crate) fn new(client: Client, watch_client: Client, health: Arc<Health>, stop: CancellationToken) -> Arc<Self> {
        Arc::new(Self { client, watch_client, changes: Arc::default(), health, stop, namespaces: Mutex::default() })
    }

    /// Calls `handler` with the key of a Secret whenever it changes. It may be a Secret that no Machine names.
    pub(crate) fn subscribe(&self, handler: impl Fn(&ObjectKey) + Send + Sync + 'static) {
        self.changes.subscribe(handler);
    }

    /// The state of a Secret. The first call for a namespace starts its watch.
    pub(crate) async fn state(&self, key: &ObjectKey) -> SecretState {
        let (versions, started) = self.watched(key);
        // The wait ends once for all Machines of the namespace: the operator may not be allowed to list.
        let left = LIST_PATIENCE.saturating_sub(started.elapsed());
        if versions.sync_state() == SyncState::Pending && !left.is_zero() {
            let _ = timeout(left, versions.ready()).await;
        }
        match (versions.sync_state(), versions.get(key)) {
            (SyncState::Synced, Some(version)) => SecretState::Version((*version).clone()),
            (SyncState::Synced, None) => SecretState::Missing,
            _ => SecretState::Unknown,
        }
    }

    /// The cache of the namespace, and when its watch started.
    fn watched(&self, key: &ObjectKey) -> (Cache<Box<str>>, Instant) {
        let namespace = key.namespace().unwrap_or_default();
        let mut namespaces = self.namespaces.lock();
        let watched = namespaces.entry(namespace.into()).or_insert_with(|| self.watch(namespace));
        if !watched.names.contains(key.name()) {
            watched.names.insert(key.name().into());
        }
        (watched.versions.clone(), watched.started)
    }

    fn watch(&self, namespace: &str) -> NamespaceWatch {
        let api: Api<PartialObjectMeta<Secret>> = Api::namespaced(self.watch_client.clone(), namespace);
        let config = WatchConfig { page_size: PAGE_SIZE, ..WatchConfig::default() };
        let stop = self.stop.child_token();
        let (versions, watching) = watch(api, config, &[], version, stop.clone());
        let changes = self.changes.clone();
        versions.subscribe(move |change| changes.notify(&change.key));
        self.health.spawn("the watch of source Secrets", watching);
        NamespaceWatch { versions, names: HashSet::new(), started: Instant::now(), stop }
    }

    /// Stops the watch of this Secret if no Machine names it any more. A reconcile that began before its Machine was deleted
    /// may call [`Self::state`] afterwards, so it calls this too. `is_named` is called while no watch can begin.
    pub(crate) fn stop_unless(&self, key: &ObjectKey, is_named: impl FnOnce() -> bool) {
        let mut namespaces = self.namespaces.lock();
        if is_named() {
            return;
        }
        let namespace = key.namespace().unwrap_or_default();
        let Some(watched) = namespaces.get_mut(namespace) else { return };
        watched.names.remove(key.name());
        if watched.names.is_empty() {
            namespaces.remove(namespace);
        }
    }

    /// A replica that does not lead watches no Secrets.
    pub(crate) fn stop_all(&self) {
        self.namespaces.lock().clear();
    }

    /// Reads one key of a Secret from the API server. None: the Secret does not exist.
    pub(crate) async fn read(&self, namespace: &str, source: &SecretSource) -> Result<Option<SecretRead>, Failure> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let target = Target::of_kind::<Secret>(ObjectKey::namespaced(namespace, &source.name));
        let secret = api.get_opt(&source.name).await.map_err(|error| classify(&error, "get", &target))?;
        Ok(secret.map(|secret| SecretRead {
            version: secret.metadata.resource_version.unwrap_or_default().into(),
            bytes: secret.data.and_then(|mut data| data.remove(&source.key)).map(|bytes| SecretBytes(bytes.0)),
        }))
    }
}

fn version(secret: PartialObjectMeta<Secret>) -> Box<str> {
    secret.metadata.resource_version.unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reconcile in flight asks for the Secret of a Machine that was deleted meanwhile.
    #[tokio::test]
    async fn a_watch_that_begins_after_its_machine_was_deleted_ends() {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = Client::try_from(config).unwrap();
        let sources = SourceSecrets::new(client.clone(), client, Arc::default(), CancellationToken::new());
        let key = |name: &str| ObjectKey::namespaced("shop", name);
        sources.stop_unless(&key("a"), || false);
        let (_, _) = (sources.watched(&key("a")), sources.watched(&key("b")));
        let stop = sources.namespaces.lock()["shop"].stop.clone();
        sources.stop_unless(&key("a"), || false);
        sources.stop_unless(&key("b"), || true);
        assert!(!stop.is_cancelled(), "a Machine names b");
        sources.stop_unless(&key("b"), || false);
        assert!(stop.is_cancelled() && sources.namespaces.lock().is_empty());
    }
}
