//! Caches that follow the cluster: a list, a watch, and a store that keeps of each object only what is read.
//!
//! A cache tells whoever it was given about every change that matters to its readers, including our own writes, which
//! it shows before the watch does. A kind whose API is not installed is not an error: the cache is `Absent`, looks
//! again from time to time, and is `Absent` again when the CRD goes.

mod object_id;
mod scope;
mod store;
mod subscribers;
#[cfg(test)]
mod tests;
mod watcher;
mod watches;

use std::{sync::Arc, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use parking_lot::RwLock;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use vitivirt_api::ObjectKey;

pub use self::{
    object_id::{ResourceVersion, Uid},
    store::{Change, Entry, IndexFn},
    subscribers::Subscribers,
    watcher::{WatchConfig, watch},
    watches::{WatchedKinds, Watches},
};
use self::{scope::Scope, store::Store};

/// How far the content of a cache can be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncState {
    /// The first list has not ended.
    Pending,
    /// The content is a complete list with the changes since.
    Synced,
    /// The API server does not know the kind.
    KindNotServed,
}

type Project<V> = Box<dyn Fn(Value) -> Result<Entry<V>, serde_json::Error> + Send + Sync>;

/// A handle to a cache; clones share it.
pub struct Cache<V>(Arc<Shared<V>>);

impl<V> Clone for Cache<V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Shared<V> {
    store: RwLock<Store<V>>,
    sync: watch::Sender<SyncState>,
    health: RwLock<Health>,
    retry_now: Notify,
    subscribers: Subscribers<Change<V>>,
    /// Makes an entry of the JSON that the server answered to a write of ours.
    project: Project<V>,
    /// What the server is asked for: what a write made that is not in it, the watch would never take back.
    scope: Scope,
    /// After an error of a watch, how long without another until its connection is trusted again.
    settling: Duration,
}

#[derive(Default)]
struct Health {
    listing: bool,
    last_error: Option<Instant>,
}

impl<V: PartialEq + Send + Sync + 'static> Cache<V> {
    fn new<K>(indexes: &[(&'static str, IndexFn<V>)], project: fn(K) -> V, scope: Scope, settling: Duration) -> Self
    where
        K: Resource + DeserializeOwned + 'static,
    {
        Self(Arc::new(Shared {
            store: RwLock::new(Store::new(indexes)),
            sync: watch::Sender::new(SyncState::Pending),
            health: RwLock::default(),
            retry_now: Notify::new(),
            subscribers: Subscribers::default(),
            project: Box::new(move |json| Ok(entry(serde_json::from_value::<K>(json)?, project))),
            scope,
            settling,
        }))
    }

    pub fn get(&self, key: &ObjectKey) -> Option<Arc<V>> {
        self.entry(key).map(|entry| entry.value)
    }

    pub fn entry(&self, key: &ObjectKey) -> Option<Entry<V>> {
        self.0.store.read().get(key).map(clone_entry)
    }

    /// All objects, in no order.
    pub fn all(&self) -> Vec<(ObjectKey, Entry<V>)> {
        self.0.store.read().iter().map(|(key, entry)| (key.clone(), clone_entry(entry))).collect()
    }

    pub fn keys(&self) -> Vec<ObjectKey> {
        self.0.store.read().iter().map(|(key, _)| key.clone()).collect()
    }

    /// Objects that an index has under `value`, by key.
    pub fn by_index(&self, index: &str, value: &str) -> Vec<(ObjectKey, Entry<V>)> {
        let store = self.0.store.read();
        store.keys_by(index, value).filter_map(|key| Some((key.clone(), clone_entry(store.get(key)?)))).collect()
    }

    pub fn len(&self) -> usize {
        self.0.store.read().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn sync_state(&self) -> SyncState {
        *self.0.sync.borrow()
    }

    /// Follows changes of `sync`, for readiness.
    pub fn sync_changes(&self) -> watch::Receiver<SyncState> {
        self.0.sync.subscribe()
    }

    /// Returns when the content can be believed: listed, or known to be absent.
    pub async fn ready(&self) {
        // The sender lives as long as this handle.
        let _ = self.sync_changes().wait_for(|sync| *sync != SyncState::Pending).await;
    }

    /// Whether absence from this cache may be taken for absence from the cluster, as far as a cache can know: a
    /// complete list, no relist under way, and a watch that works. Destructive steps ask this first and then read the
    /// object live.
    pub fn is_complete(&self) -> bool {
        let health = self.0.health.read();
        let settled = health.last_error.is_none_or(|at| at.elapsed() > self.0.settling);
        self.sync_state() != SyncState::Pending && !health.listing && settled
    }

    /// Tries an absent kind again now, because somebody saw its CRD appear.
    pub fn retry_now(&self) {
        self.0.retry_now.notify_one();
    }

    /// Calls `handler` for every change, the program's own writes included. Subscribe before the watch starts.
    pub fn subscribe(&self, handler: impl Fn(&Change<V>) + Send + Sync + 'static) {
        self.0.subscribers.subscribe(handler);
    }

    /// Notifies the subscribers of one change of the store.
    fn notify(&self, change: &Option<Change<V>>) {
        self.notify_all(change.as_slice());
    }

    fn notify_all(&self, changes: &[Change<V>]) {
        changes.iter().for_each(|change| self.0.subscribers.notify(change));
    }
}

/// What the executor tells about writes, so that the next pass sees them before the watch does, and asks before it
/// writes.
pub trait WriteObserver: Send + Sync {
    /// The server answered a write of ours with this object.
    fn on_written(&self, object: &Value);

    /// A live read showed this object of ours, which the cache did not have when it was planned.
    fn on_found(&self, object: &Value) {
        self.on_written(object);
    }

    fn on_deleted(&self, key: &ObjectKey, uid: &str);

    /// The newest version known of this very object.
    fn version(&self, _key: &ObjectKey, _uid: &str) -> Option<ResourceVersion> {
        None
    }

    /// Whether the kind itself is known not to be served.
    fn is_absent(&self) -> bool {
        false
    }
}

impl<V: PartialEq + Send + Sync + 'static> WriteObserver for Cache<V> {
    fn on_written(&self, object: &Value) {
        let selected = self.0.scope.selects(object);
        self.apply_own_write(object, |store, key, entry| store.wrote(key, entry, selected));
    }

    fn on_found(&self, object: &Value) {
        self.apply_own_write(object, Store::found);
    }

    fn on_deleted(&self, key: &ObjectKey, uid: &str) {
        let change = self.0.store.write().deleted(key.clone(), &uid.into());
        self.notify(&change);
    }

    fn version(&self, key: &ObjectKey, uid: &str) -> Option<ResourceVersion> {
        let (store, uid) = (self.0.store.read(), uid.into());
        store.get(key).filter(|entry| entry.uid == uid).map(|entry| entry.resource_version.clone())
    }

    fn is_absent(&self) -> bool {
        self.sync_state() == SyncState::KindNotServed
    }
}

impl<V: PartialEq + Send + Sync + 'static> Cache<V> {
    fn apply_own_write(
        &self,
        object: &Value,
        put: impl FnOnce(&mut Store<V>, ObjectKey, Entry<V>) -> Option<Change<V>>,
    ) {
        let metadata =
            |field: &str| object.pointer(&format!("/metadata/{field}")).and_then(Value::as_str).unwrap_or_default();
        let key = ObjectKey::namespaced(metadata("namespace"), metadata("name"));
        if !self.0.scope.covers(&key) {
            return;
        }
        match (self.0.project)(object.clone()) {
            Ok(entry) => {
                let change = put(&mut self.0.store.write(), key, entry);
                self.notify(&change);
            }
            // The watch will bring it, or say why it cannot be read. The error may quote the object: it is not shown.
            Err(_) => tracing::warn!("the answer to a write could not be read into its cache"),
        }
    }
}

fn entry<K: Resource, V>(object: K, project: impl Fn(K) -> V) -> Entry<V> {
    let metadata = object.meta();
    let uid = metadata.uid.as_deref().unwrap_or_default().into();
    let resource_version = metadata.resource_version.as_deref().unwrap_or_default().into();
    Entry { uid, resource_version, value: Arc::new(project(object)) }
}

fn clone_entry<V>(entry: &Entry<V>) -> Entry<V> {
    Entry { uid: entry.uid.clone(), resource_version: entry.resource_version.clone(), value: entry.value.clone() }
}

/// The UID of an object's controller: what an index from owners to what they own is made of.
pub fn controller_uid(metadata: &ObjectMeta) -> Option<Uid> {
    let references = metadata.owner_references.as_deref()?;
    references.iter().find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.as_str().into())
}
