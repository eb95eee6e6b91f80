//! Which watch events enqueue the KubeVirt resource: "When X changes, enqueue it, because Z", one method per watch. Each
//! lane has a queue, and an event enqueues the resource only in the lanes that it concerns.
//!
//! A replica that does not lead has no queue and drops every event: a new leader enqueues every resource once.

use std::{sync::Arc, time::Duration};

use parking_lot::RwLock;
use vitivirt_api::{ApiResource, ObjectKey, kubevirt::KubeVirt};
use vitivirt_install::{
    Kind, Lane, LiveObject, TRUSTING_KINDS, pods::Pod, recorded_namespaces, removal::has_finalizer,
};
use vitivirt_runtime::{program::Context, queue::Queue, watch::Change};

use crate::cache::{Caches, CrdEntry, installed_kinds};

/// Many objects change at once during an installation; one reconcile handles all of them.
const DEBOUNCE: Duration = Duration::from_millis(20);

pub(crate) struct EventRouter {
    queues: RwLock<Option<LaneQueues>>,
    caches: Caches,
}

#[derive(Clone)]
pub(crate) struct LaneQueues {
    pub(crate) certificates: Queue<ObjectKey>,
    pub(crate) components: Queue<ObjectKey>,
    pub(crate) monitoring: Queue<ObjectKey>,
    pub(crate) instancetypes: Queue<ObjectKey>,
}

impl LaneQueues {
    fn new() -> Self {
        let queue = || Queue::new(DEBOUNCE);
        Self { certificates: queue(), components: queue(), monitoring: queue(), instancetypes: queue() }
    }

    fn of(&self, lane: Lane) -> &Queue<ObjectKey> {
        match lane {
            Lane::Certificates => &self.certificates,
            Lane::Components => &self.components,
            Lane::Monitoring => &self.monitoring,
            Lane::Instancetypes => &self.instancetypes,
        }
    }
}

impl EventRouter {
    pub(crate) fn new(caches: Caches) -> Arc<Self> {
        Arc::new(Self { queues: RwLock::default(), caches })
    }

    /// One line per watch. The methods say what each event enqueues, and why.
    pub(crate) fn subscribe(self: &Arc<Self>, context: &Context) {
        let caches = &self.caches;
        caches.kubevirts.subscribe(self.handler(Self::kubevirt_changed));
        caches.crds.subscribe(self.handler(Self::crd_changed));
        caches.own_namespace.subscribe(self.handler(Self::dependency_changed));
        caches.component_pods.subscribe(self.handler(Self::pod_changed));
        caches.operator_pods.subscribe(self.handler(Self::operator_pod_changed));
        for (kind, cache) in caches.installed_objects() {
            let router = self.clone();
            cache.subscribe(move |change| router.object_changed(kind, change));
        }
        // When a kind of the installation becomes served or ceases to be, enqueue every resource, because the
        // installation depends on which APIs the cluster has.
        let router = self.clone();
        let is_installed = |resource: &ApiResource| installed_kinds().any(|kind| kind.resource() == *resource);
        caches.kinds.on_served_change(&context.health, is_installed, move || router.enqueue_all());
    }

    pub(crate) fn handler<E: 'static>(
        self: &Arc<Self>,
        handle: fn(&Self, &E),
    ) -> impl Fn(&E) + Send + Sync + use<E> + 'static {
        let router = self.clone();
        move |event| handle(&router, event)
    }

    /// Creates the queues of a new leader, with every resource in them.
    pub(crate) fn start_queues(&self) -> LaneQueues {
        let queues = LaneQueues::new();
        *self.queues.write() = Some(queues.clone());
        self.enqueue_all();
        queues
    }

    pub(crate) fn stop_queues(&self) {
        *self.queues.write() = None;
    }

    fn enqueue_all(&self) {
        for lane in Lane::ALL {
            self.enqueue_lane(lane);
        }
    }

    /// Enqueues every resource in one lane. Also for a lane that has news for another one.
    pub(crate) fn enqueue_lane(&self, lane: Lane) {
        if let Some(queues) = &*self.queues.read() {
            let queue = queues.of(lane);
            self.caches.kubevirts.keys().into_iter().for_each(|key| queue.add_coalesced(key));
        }
    }

    /// When a KubeVirt resource changes, enqueue it: at once in every lane if a user edited or deleted it, or if it got
    /// the finalizer. When one appears or disappears, enqueue all, because only the oldest is installed.
    fn kubevirt_changed(&self, change: &Change<KubeVirt>) {
        let (old, new) = (change.old.as_deref(), change.new.as_deref());
        let deleting =
            |kubevirt: Option<&KubeVirt>| kubevirt.is_some_and(|it| it.metadata.deletion_timestamp.is_some());
        let finalized = |kubevirt: Option<&KubeVirt>| kubevirt.is_some_and(has_finalizer);
        let changed = old.map(|old| &old.spec) != new.map(|new| &new.spec)
            || deleting(old) != deleting(new)
            || finalized(old) != finalized(new);
        if let (Some(queues), true) = (&*self.queues.read(), changed) {
            Lane::ALL.into_iter().for_each(|lane| queues.of(lane).add_urgent(change.key.clone()));
        }
        if change.old.is_none() || change.new.is_none() {
            self.enqueue_all();
        } else {
            // Only this lane reads more of the status than the records of objects.
            self.enqueue_lane(Lane::Components);
            // No lane writes before the status has the version of this operator.
            let version = |kubevirt: &KubeVirt| kubevirt.status.as_ref().map(|status| status.operator_version.clone());
            if old.map(version) != new.map(version) {
                Lane::ALL.into_iter().for_each(|lane| self.enqueue_lane(lane));
            }
            // This one writes into a namespace after the status has recorded it.
            if old.map(recorded_namespaces) != new.map(recorded_namespaces) {
                self.enqueue_lane(Lane::Monitoring);
            }
        }
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
        lanes_of(kind).iter().for_each(|lane| self.enqueue_lane(*lane));
    }

    /// When a CRD changes, enqueue every resource if its content changed, because drift must be repaired; and list its
    /// kind again if that is not served yet. When only the status of an installed CRD changes, enqueue the lane
    /// `Components`, because an upgrade may wait for `status.storedVersions`. The watch shows only that the status
    /// changed; it rarely does, and a reconcile with nothing to do sends no request.
    fn crd_changed(&self, change: &Change<CrdEntry>) {
        self.caches.kinds.retry_crd(change.key.name());
        let digest = |crd: &Option<Arc<CrdEntry>>| crd.as_ref().map(|crd| crd.live.digest);
        if digest(&change.old) != digest(&change.new) {
            self.enqueue_lane(Lane::Components);
            self.enqueue_lane(Lane::Instancetypes);
        } else if change.new.as_ref().is_some_and(|crd| crd.live.is_installed()) {
            self.enqueue_lane(Lane::Components);
        }
    }

    /// When pods serve other certificates than before, enqueue every resource, because conditions report it, and a pod
    /// that does not load its certificate is replaced.
    pub(crate) fn served_certificates_changed(&self) {
        self.enqueue_lane(Lane::Components);
        self.enqueue_lane(Lane::Certificates);
    }

    /// When a pod of the installation changes, enqueue every resource, because conditions name why pods do not start. If
    /// a Deployment owns the pod, also in the lane `Certificates`: the next pod that does not load its certificate is
    /// deleted when the last one was replaced.
    fn pod_changed(&self, change: &Change<Pod>) {
        self.enqueue_lane(Lane::Components);
        let is_of_deployment = |pod: &Pod| pod.workload.as_ref().is_some_and(|(kind, _)| *kind == Kind::Deployment);
        if change.new.as_deref().or(change.old.as_deref()).is_some_and(is_of_deployment) {
            self.enqueue_lane(Lane::Certificates);
        }
    }

    /// When a pod of the operator or of its Job changes, enqueue every resource in every lane, because a replica does not
    /// change the installation of a newer one, and conditions name why the Job does not start.
    fn operator_pod_changed(&self, _: &Change<Pod>) {
        self.enqueue_all();
    }

    /// When the number of nodes changes, enqueue every resource, because replica counts follow it.
    pub(crate) fn nodes_changed(&self) {
        self.enqueue_lane(Lane::Components);
        self.enqueue_lane(Lane::Monitoring);
    }

    /// When the operator's namespace or an object that the installation depends on changes, enqueue every resource,
    /// because labels of the namespace are managed, and a ServiceAccount shows where the monitoring stack is.
    pub(crate) fn dependency_changed<V>(&self, _: &Change<V>) {
        self.enqueue_lane(Lane::Components);
        self.enqueue_lane(Lane::Monitoring);
    }
}

/// The lanes that read objects of a kind. The lane `Components` waits for those of the others.
fn lanes_of(kind: Kind) -> &'static [Lane] {
    match kind {
        Kind::Secret | Kind::ConfigMap => &[Lane::Certificates, Lane::Components],
        kind if TRUSTING_KINDS.contains(&kind) => &[Lane::Certificates, Lane::Components, Lane::Instancetypes],
        Kind::ServiceMonitor | Kind::PrometheusRule => &[Lane::Monitoring, Lane::Components],
        Kind::Instancetype | Kind::Preference => &[Lane::Instancetypes, Lane::Components],
        // virt-api must be ready to validate instancetypes, and before another pod without a valid certificate goes.
        Kind::Deployment => &[Lane::Instancetypes, Lane::Certificates, Lane::Components],
        _ => &[Lane::Components],
    }
}
