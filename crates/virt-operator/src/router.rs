//! When the KubeVirt resource gets a pass: whenever anything that its installation consists of or depends on changes.
//!
//! While this replica does not lead there is no queue, and nothing is remembered: whoever begins to lead looks once.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::RwLock;
use vitivirt_api::{ObjectKey, kubevirt::KubeVirt};
use vitivirt_install::{Kind, LiveObject, certificates};
use vitivirt_runtime::{
    queue::Queue,
    telemetry::{self, LogLevel},
    watch::Change,
};

use crate::{
    arguments::level,
    cache::{Caches, CrdEntry},
    metrics::OperatorMetrics,
    webhook::ServerTls,
};

/// Many objects change at once while an installation goes on; one pass looks at all of them.
const COALESCE: Duration = Duration::from_millis(20);

pub(crate) struct EventRouter {
    queue: RwLock<Option<Queue<ObjectKey>>>,
    caches: OnceLock<Caches>,
    serving: ServerTls,
    metrics: Arc<OperatorMetrics>,
    /// What the command line says; the resource may say otherwise.
    level: LogLevel,
}

impl EventRouter {
    pub(crate) fn new(serving: ServerTls, metrics: Arc<OperatorMetrics>, level: LogLevel) -> Arc<Self> {
        Arc::new(Self { queue: RwLock::default(), caches: OnceLock::new(), serving, metrics, level })
    }

    /// A listener for a cache.
    pub(crate) fn on<V: 'static>(
        self: &Arc<Self>,
        tell: fn(&Self, &Change<V>),
    ) -> impl Fn(&Change<V>) + Send + Sync + use<V> + 'static {
        let router = self.clone();
        move |change| tell(&router, change)
    }

    /// The caches exist.
    pub(crate) fn know(&self, caches: Caches) {
        let _ = self.caches.set(caches);
        self.serve();
    }

    /// A queue with every resource in it, for a leader that begins.
    pub(crate) fn begin(&self) -> Queue<ObjectKey> {
        let queue = Queue::new(COALESCE);
        *self.queue.write() = Some(queue.clone());
        self.all();
        queue
    }

    pub(crate) fn end(&self) {
        *self.queue.write() = None;
    }

    pub(crate) fn all(&self) {
        let Some(caches) = self.caches.get() else { return };
        for key in caches.kubevirts.keys() {
            self.add(key);
        }
    }

    fn add(&self, key: ObjectKey) {
        if let Some(queue) = &*self.queue.read() {
            queue.add_coalesced(key);
        }
    }

    /// Whether one is the first decides about the others.
    pub(crate) fn kubevirt_changed(&self, change: &Change<KubeVirt>) {
        self.serve();
        // At once: somebody is waiting.
        let spec_changed = change.old.as_ref().map(|old| &old.spec) != change.new.as_ref().map(|new| &new.spec);
        if let (Some(queue), true) = (&*self.queue.read(), spec_changed) {
            queue.add(change.key.clone());
        }
        self.add(change.key.clone());
        self.all();
    }

    pub(crate) fn object_changed(&self, kind: Kind, change: &Change<LiveObject>) {
        if kind == Kind::Secret && change.key.name() == certificates::VIRT_OPERATOR {
            self.serve();
        }
        if kind == Kind::ApiService {
            // `v1.route.openshift.io` is the version and the group.
            let name = change.key.name();
            self.retry_now(|resource| format!("{}.{}", resource.version, resource.group) == name);
        }
        self.all();
    }

    pub(crate) fn crd_changed(&self, change: &Change<CrdEntry>) {
        let name = change.key.name();
        self.retry_now(|resource| format!("{}.{}", resource.plural, resource.group) == name);
        let digest = |crd: &Option<Arc<CrdEntry>>| crd.as_ref().map(|crd| crd.live.digest);
        if digest(&change.old) != digest(&change.new) {
            self.all();
        }
    }

    /// What the resource says about the operator itself: how it serves, what it logs, what it counts.
    fn serve(&self) {
        let Some(caches) = self.caches.get() else { return };
        let kubevirt = caches.first_kubevirt();
        let tls = kubevirt.as_ref().and_then(|kubevirt| kubevirt.spec.configuration.tls_configuration.as_ref());
        if let Some(kubevirt) = &kubevirt {
            self.metrics.set_emulation(kubevirt);
            let developer = kubevirt.spec.configuration.developer_configuration.as_ref();
            let verbosity = developer.and_then(|developer| developer.log_verbosity.as_ref()?.virt_operator);
            let level = |verbosity: i64| level(u8::try_from(verbosity.max(0)).unwrap_or(u8::MAX));
            telemetry::set_level(verbosity.map_or(self.level, level));
        }
        self.serving.set(caches.key_pair(certificates::VIRT_OPERATOR).as_ref(), tls);
    }

    fn retry_now(&self, is_about: impl Fn(&vitivirt_api::ApiResource) -> bool) {
        if let Some(caches) = self.caches.get() {
            caches.retry_now(is_about);
        }
    }

    pub(crate) fn changed<V>(&self, _: &Change<V>) {
        self.all();
    }
}
