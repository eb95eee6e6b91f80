//! Which watch events enqueue the KubeVirt resource: "When X changes, enqueue it, because Z", one method per watch.
//!
//! A replica that does not lead has no queue and drops every event: a new leader enqueues every resource once.

use std::{sync::Arc, time::Duration};

use parking_lot::RwLock;
use vitivirt_api::{ApiResource, ObjectKey, kubevirt::KubeVirt};
use vitivirt_install::{Kind, LiveObject, pods::Pod};
use vitivirt_runtime::{program::Context, queue::Queue, watch::Change};

use crate::cache::{Caches, CrdEntry, installed_kinds};

/// Many objects change at once during an installation; one reconcile handles all of them.
const DEBOUNCE: Duration = Duration::from_millis(20);

pub(crate) struct EventRouter {
    queue: RwLock<Option<Queue<ObjectKey>>>,
    caches: Caches,
}

impl EventRouter {
    pub(crate) fn new(caches: Caches) -> Arc<Self> {
        Arc::new(Self { queue: RwLock::default(), caches })
    }

    /// One line per watch. The methods say what each event enqueues, and why.
    pub(crate) fn subscribe(self: &Arc<Self>, context: &Context) {
        let caches = &self.caches;
        caches.kubevirts.subscribe(self.handler(Self::kubevirt_changed));
        caches.crds.subscribe(self.handler(Self::crd_changed));
        caches.own_namespace.subscribe(self.handler(Self::dependency_changed));
        caches.nodes.subscribe(self.handler(Self::dependency_changed));
        caches.component_pods.subscribe(self.handler(Self::pod_changed));
        caches.operator_pods.subscribe(self.handler(Self::pod_changed));
        for (kind, cache) in caches.installed_objects() {
            let router = self.clone();
            cache.subscribe(move |change| router.object_changed(kind, change));
        }
        // When a kind of the installation becomes served or ceases to be, enqueue every resource, because the
        // installation depends on which APIs the cluster has.
        let router = self.clone();
        let is_installed = |resource: &ApiResource| installed_kinds().any(|kind| kind.resource() == *resource);
        caches.kinds.on_served_change(context, is_installed, move || router.enqueue_all());
    }

    pub(crate) fn handler<E: 'static>(
        self: &Arc<Self>,
        handle: fn(&Self, &E),
    ) -> impl Fn(&E) + Send + Sync + use<E> + 'static {
        let router = self.clone();
        move |event| handle(&router, event)
    }

    /// Creates the queue of a new leader, with every resource in it.
    pub(crate) fn start_queue(&self) -> Queue<ObjectKey> {
        let queue = Queue::new(DEBOUNCE);
        *self.queue.write() = Some(queue.clone());
        self.enqueue_all();
        queue
    }

    pub(crate) fn stop_queue(&self) {
        *self.queue.write() = None;
    }

    pub(crate) fn enqueue_all(&self) {
        for key in self.caches.kubevirts.keys() {
            self.enqueue_debounced(key);
        }
    }

    fn enqueue_debounced(&self, key: ObjectKey) {
        if let Some(queue) = &*self.queue.read() {
            queue.add_coalesced(key);
        }
    }

    /// When a KubeVirt resource changes, enqueue it, at once if its spec changed, because a user waits for the result;
    /// and all others, because the oldest one is installed and the others are rejected.
    fn kubevirt_changed(&self, change: &Change<KubeVirt>) {
        let spec_changed = change.old.as_ref().map(|old| &old.spec) != change.new.as_ref().map(|new| &new.spec);
        if let (Some(queue), true) = (&*self.queue.read(), spec_changed) {
            queue.add(change.key.clone());
        }
        self.enqueue_debounced(change.key.clone());
        self.enqueue_all();
    }

    /// When an installed object changes, enqueue every resource, because drift must be repaired and the next wave may
    /// wait for the object. When an APIService changes, also list the kinds of its group again that are not served yet.
    fn object_changed(&self, kind: Kind, change: &Change<LiveObject>) {
        if kind == Kind::ApiService {
            // An APIService is named `version.group`.
            let name = change.key.name();
            self.caches
                .kinds
                .retry(|resource| name.split_once('.') == Some((resource.version.as_str(), resource.group.as_str())));
        }
        self.enqueue_all();
    }

    /// When a CRD changes, enqueue every resource if its content changed, because drift must be repaired; and list its
    /// kind again if that is not served yet.
    fn crd_changed(&self, change: &Change<CrdEntry>) {
        self.caches.kinds.retry_crd(change.key.name());
        let digest = |crd: &Option<Arc<CrdEntry>>| crd.as_ref().map(|crd| crd.live.digest);
        if digest(&change.old) != digest(&change.new) {
            self.enqueue_all();
        }
    }

    /// When a pod of the installation changes, enqueue every resource, because conditions name why pods do not start.
    fn pod_changed(&self, _: &Change<Pod>) {
        self.enqueue_all();
    }

    /// When the operator's namespace, a node, or an object that the installation depends on changes, enqueue every
    /// resource, because labels of the namespace are managed and replica counts follow the number of nodes.
    pub(crate) fn dependency_changed<V>(&self, _: &Change<V>) {
        self.enqueue_all();
    }
}
