//! Caches of watched kinds: a list, a watch, and a store that keeps only the fields that a reconcile reads.
//!
//! A cache calls its change handler for every change of those fields. That includes this operator's own writes, which
//! the cache contains before the watch delivers them. A kind that is not served is not an error: the cache is in state
//! `KindNotServed`, retries from time to time, and returns to that state when the CRD is deleted.

mod object_id;
mod parsed;
mod scope;
mod store;
#[cfg(test)]
mod tests;
mod watcher;
mod watches;

use std::{collections::HashMap, sync::Arc, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
pub use kube::core::{Expression, Selector};
use parking_lot::{Mutex, RwLock};
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
    watcher::{KnownAbsent, WatchConfig, watch},
    watches::{WatchedKinds, Watches},
};
use self::{scope::Scope, store::Store};

/// Whether the content of a cache is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncState {
    /// The first list has not ended.
    Pending,
    /// The content is a complete list and the changes since.
    Synced,
    /// The API server does not serve the kind.
    KindNotServed,
}

/// Handlers of events, called in the order in which they subscribed. Subscribe before the source of the events starts:
/// earlier events are not repeated. A handler must not block.
pub struct Subscribers<E>(RwLock<Vec<Handler<E>>>);

type Handler<E> = Box<dyn Fn(&E) + Send + Sync>;

impl<E> Default for Subscribers<E> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<E> Subscribers<E> {
    pub fn subscribe(&self, handler: impl Fn(&E) + Send + Sync + 'static) {
        self.0.write().push(Box::new(handler));
    }

    pub fn notify(&self, event: &E) {
        self.0.read().iter().for_each(|handler| handler(event));
    }
}

type Project<V> = Box<dyn Fn(Value) -> Result<Entry<V>, serde_json::Error> + Send + Sync>;

/// A handle to a cache. Clones share the content.
pub struct Cache<V>(Arc<SharedCache<V>>);

impl<V> Clone for Cache<V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct SharedCache<V> {
    store: RwLock<Store<V>>,
    sync: watch::Sender<SyncState>,
    status: RwLock<WatchStatus>,
    unreadable: RwLock<UnreadableObjects>,
    retry_now: Notify,
    subscribers: Subscribers<Change<V>>,
    /// Held from a change of the store until all subscribers know it. The watch and the workers change a cache
    /// concurrently, and a subscriber that counts objects must see the changes of one object in their order.
    order: Mutex<()>,
    /// Projects the JSON of the response to a write of this operator.
    project: Project<V>,
    /// The objects that the watch selects. The watch would never deliver the deletion of an object outside
    /// of it, so the cache ignores writes of such objects.
    scope: Scope,
    /// How long after an error of the watch it counts as working again, if no other error follows.
    error_cooldown: Duration,
}

#[derive(Default)]
struct WatchStatus {
    listing: bool,
    last_error: Option<Instant>,
}

/// Objects that do not have the form that the program expects, with their resource versions. The cache keeps what it knew
/// of them before.
#[derive(Default)]
struct UnreadableObjects {
    objects: HashMap<ObjectKey, ResourceVersion>,
    /// Those of the list that is in progress.
    listed: HashMap<ObjectKey, ResourceVersion>,
}

impl<V: PartialEq + Send + Sync + 'static> Cache<V> {
    fn new<K>(
        indexes: &[(&'static str, IndexFn<V>)],
        project: fn(K) -> V,
        scope: Scope,
        error_cooldown: Duration,
    ) -> Self
    where
        K: Resource + DeserializeOwned + 'static,
    {
        Self(Arc::new(SharedCache {
            store: RwLock::new(Store::new(indexes)),
            sync: watch::Sender::new(SyncState::Pending),
            status: RwLock::default(),
            unreadable: RwLock::default(),
            retry_now: Notify::new(),
            subscribers: Subscribers::default(),
            order: Mutex::default(),
            project: Box::new(move |json| Ok(entry(serde_json::from_value::<K>(json)?, project))),
            scope,
            error_cooldown,
        }))
    }

    pub fn get(&self, key: &ObjectKey) -> Option<Arc<V>> {
        self.entry(key).map(|entry| entry.value)
    }

    pub fn entry(&self, key: &ObjectKey) -> Option<Entry<V>> {
        self.0.store.read().get(key).map(clone_entry)
    }

    /// All objects, in no particular order.
    pub fn entries(&self) -> Vec<(ObjectKey, Entry<V>)> {
        self.0.store.read().iter().map(|(key, entry)| (key.clone(), clone_entry(entry))).collect()
    }

    pub fn keys(&self) -> Vec<ObjectKey> {
        self.0.store.read().iter().map(|(key, _)| key.clone()).collect()
    }

    /// The objects with `value` in an index, ordered by key.
    pub fn by_index(&self, index: &str, value: &str) -> Vec<(ObjectKey, Entry<V>)> {
        let store = self.0.store.read();
        store.keys_by(index, value).filter_map(|key| Some((key.clone(), clone_entry(store.get(key)?)))).collect()
    }

    /// Whether an object has `value` in an index.
    pub fn is_in_index(&self, index: &str, value: &str) -> bool {
        self.0.store.read().keys_by(index, value).next().is_some()
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

    /// The changes of `sync_state`.
    pub(crate) fn sync_changes(&self) -> watch::Receiver<SyncState> {
        self.0.sync.subscribe()
    }

    /// Returns when the first list is complete, or when the kind is known not to be served.
    pub async fn ready(&self) {
        // The sender lives as long as this handle.
        let _ = self.sync_changes().wait_for(|sync| *sync != SyncState::Pending).await;
    }

    /// Whether an object that is not in this cache does not exist in the cluster, as far as a cache can know: the list
    /// is complete and readable, no relist is in progress, and the watch works. A destructive step needs this and a live check.
    pub fn is_complete(&self) -> bool {
        let status = self.0.status.read();
        let watch_works = status.last_error.is_none_or(|at| at.elapsed() > self.0.error_cooldown);
        self.sync_state() != SyncState::Pending && !status.listing && watch_works && self.unreadable_count() == 0
    }

    /// The number of objects that do not have the form that the program expects.
    pub(crate) fn unreadable_count(&self) -> usize {
        self.0.unreadable.read().objects.len()
    }

    /// Lists a kind that is not served again now, because its CRD has been created.
    pub(crate) fn retry_now(&self) {
        self.0.retry_now.notify_one();
    }

    /// Calls `handler` for every change, the program's own writes included. Subscribe before the watch starts. The
    /// handler must not write to this cache.
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

/// Observes the writes of the executor, so that the next reconcile sees them before the watch delivers them. The
/// executor also asks it for the newest resource version.
pub trait WriteObserver: Send + Sync {
    /// The server responded to a write with this object.
    fn on_written(&self, object: &Value);

    /// A live read returned this object, which belongs to the operator and was not in the cache when it was planned.
    fn on_live_read(&self, object: &Value) {
        self.on_written(object);
    }

    fn on_deleted(&self, key: &ObjectKey, uid: &str);

    /// The newest known resource version of the object with this UID.
    fn version(&self, _key: &ObjectKey, _uid: &str) -> Option<ResourceVersion> {
        None
    }

    /// Whether the kind is known not to be served.
    fn is_absent(&self) -> bool {
        false
    }
}

impl<V: PartialEq + Send + Sync + 'static> WriteObserver for Cache<V> {
    fn on_written(&self, object: &Value) {
        let selected = self.0.scope.matches_labels(object);
        self.update(object, |store, key, entry| store.apply_own_write(key, entry, selected));
    }

    fn on_live_read(&self, object: &Value) {
        self.update(object, Store::apply_live_read);
    }

    fn on_deleted(&self, key: &ObjectKey, uid: &str) {
        let _order = self.0.order.lock();
        let change = self.0.store.write().apply_own_delete(key.clone(), &uid.into());
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
    fn update(&self, object: &Value, apply: impl FnOnce(&mut Store<V>, ObjectKey, Entry<V>) -> Option<Change<V>>) {
        let metadata =
            |field: &str| object.pointer(&format!("/metadata/{field}")).and_then(Value::as_str).unwrap_or_default();
        let key = ObjectKey::namespaced(metadata("namespace"), metadata("name"));
        if !self.0.scope.contains_key(&key) {
            return;
        }
        match (self.0.project)(object.clone()) {
            Ok(entry) => {
                let _order = self.0.order.lock();
                let change = apply(&mut self.0.store.write(), key, entry);
                self.notify(&change);
            }
            // The watch will deliver the object, or log why it is not readable. The error may quote the object, so it
            // is not logged.
            Err(_) => tracing::warn!("cannot add the response of a write to the cache"),
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

/// The UID of an object's controlling owner.
pub fn controller_uid(metadata: &ObjectMeta) -> Option<Uid> {
    let references = metadata.owner_references.as_deref()?;
    references.iter().find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.as_str().into())
}
