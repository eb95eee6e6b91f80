//! Which objects a watch event enqueues: "When X changes, enqueue Y, because Z", one method per watch.
//!
//! A change that may alter a Machine's phase or readiness, and every drift, enqueues the Machine at once. Intermediate
//! states of a VMI or a PVC are debounced by [`DEBOUNCE`]: they only alter details of the status. So a running guest is
//! reported at once, and the four states before it cost one status write.
//!
//! A replica that does not lead has no queues and drops every event: a new leader enqueues everything once.

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use parking_lot::RwLock;
use vitivirt_api::{
    ApiResource, ObjectKey,
    machine::MachinePhase,
    resources::{
        import_source_resource, network_attachment_resource, virtual_machine_instance_resource,
        virtual_machine_resource,
    },
};
use vitivirt_runtime::{program::Context, queue::Queue, watch::Change};

use crate::{
    cache::{
        AttachmentEntry, Caches, ClassEntry, CrdVersion, ImportEntry, MachineEntry, NetworkEntry, PvcEntry,
        SecretEntry, VmEntry, VmiEntry, in_namespace,
    },
    source_secrets::SourceSecrets,
};

/// How long the router collects intermediate states before it enqueues their Machine.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// The work queues of the leader.
#[derive(Clone)]
pub(crate) struct Queues {
    pub(crate) machines: Queue<ObjectKey>,
    /// NetworkConfigurations that may have lost their last user.
    pub(crate) networks: Queue<ObjectKey>,
}

pub(crate) struct EventRouter {
    queues: RwLock<Option<Queues>>,
    caches: Caches,
    source_secrets: Arc<SourceSecrets>,
}

impl EventRouter {
    pub(crate) fn new(caches: Caches, source_secrets: Arc<SourceSecrets>) -> Arc<Self> {
        Arc::new(Self { queues: RwLock::default(), caches, source_secrets })
    }

    /// One line per watch. The methods say what each event enqueues, and why.
    pub(crate) fn subscribe(self: &Arc<Self>, context: &Context) {
        let caches = &self.caches;
        caches.machines.subscribe(self.handler(Self::machine_changed));
        caches.networks.subscribe(self.handler(Self::network_changed));
        caches.classes.subscribe(self.handler(Self::class_changed));
        caches.secrets.subscribe(self.handler(Self::secret_changed));
        caches.pvcs.subscribe(self.handler(Self::pvc_changed));
        caches.attachments.subscribe(self.handler(Self::attachment_changed));
        caches.imports.subscribe(self.handler(Self::import_changed));
        caches.vms.subscribe(self.handler(Self::vm_changed));
        caches.vmis.subscribe(self.handler(Self::vmi_changed));
        caches.crds.subscribe(self.handler(Self::crd_changed));
        self.source_secrets.subscribe(self.handler(Self::source_secret_changed));
        // When KubeVirt, Multus or CDI is installed or removed, enqueue every Machine, because it may wait for them.
        let router = self.clone();
        caches.kinds.on_served_change(&context.health, is_optional_dependency, move || router.enqueue_all());
    }

    fn handler<E: 'static>(self: &Arc<Self>, handle: fn(&Self, &E)) -> impl Fn(&E) + Send + Sync + use<E> + 'static {
        let router = self.clone();
        move |event| handle(&router, event)
    }

    /// Creates the queues of a new leader, with every Machine and every network that has the operator's finalizer in
    /// them.
    pub(crate) fn start_queues(&self) -> Queues {
        let queues = Queues { machines: Queue::new(DEBOUNCE), networks: Queue::new(DEBOUNCE) };
        *self.queues.write() = Some(queues.clone());
        self.enqueue_all();
        for (key, entry) in self.caches.networks.entries() {
            if entry.value.finalizer_index.is_some() {
                self.enqueue_network(key);
            }
        }
        queues
    }

    pub(crate) fn stop_queues(&self) {
        *self.queues.write() = None;
        self.source_secrets.stop_all();
    }

    fn enqueue_all(&self) {
        self.enqueue_where(|_| true);
    }

    fn enqueue_where(&self, matches: impl Fn(&MachineEntry) -> bool) {
        if self.queues.read().is_none() {
            return;
        }
        for (key, entry) in self.caches.machines.entries() {
            if matches(&entry.value) {
                self.enqueue(key);
            }
        }
    }

    fn enqueue(&self, key: ObjectKey) {
        if let Some(queues) = &*self.queues.read() {
            queues.machines.add(key);
        }
    }

    fn enqueue_urgent(&self, key: ObjectKey) {
        if let Some(queues) = &*self.queues.read() {
            queues.machines.add_urgent(key);
        }
    }

    fn enqueue_debounced(&self, key: ObjectKey) {
        if let Some(queues) = &*self.queues.read() {
            queues.machines.add_coalesced(key);
        }
    }

    fn enqueue_network(&self, key: ObjectKey) {
        if let Some(queues) = &*self.queues.read() {
            queues.networks.add(key);
        }
    }

    fn enqueue_by_index(&self, index: &str, value: &str) {
        for (key, _) in self.caches.machines.by_index(index, value) {
            self.enqueue(key);
        }
    }

    /// Enqueues the Machine that an object in its namespace names in a label.
    fn enqueue_owner(&self, object: &ObjectKey, machine: Option<&str>, at_once: bool) {
        let Some(machine) = machine else { return };
        let key = ObjectKey::namespaced(object.namespace().unwrap_or_default(), machine);
        if at_once { self.enqueue(key) } else { self.enqueue_debounced(key) }
    }

    /// When a Machine changes, enqueue it, because its spec or metadata may ask for something else; debounced if
    /// neither changed, because then the change is the operator's own finalizer or status. Also enqueue the Machines
    /// that got a MAC address from it or lost one to it; and the networks that it no longer names, because they may have
    /// lost their last user.
    fn machine_changed(&self, change: &Change<MachineEntry>) {
        let (old, new) = (change.old.as_deref(), change.new.as_deref());
        match (old, new) {
            (Some(old), Some(new)) if old.same_desired_state(new) => self.enqueue_debounced(change.key.clone()),
            _ => self.enqueue_urgent(change.key.clone()),
        }
        self.enqueue_mac_changes();
        let Some(old) = old else { return };
        let names = |name: &str| new.is_some_and(|new| new.networks.iter().any(|have| **have == *name));
        for left in old.networks.iter().filter(|name| !names(name)) {
            self.enqueue_network(ObjectKey::namespaced(change.key.namespace().unwrap_or_default(), left));
        }
        let source = new.and_then(|new| new.source.as_deref());
        if let Some(left) = old.source.as_deref().filter(|name| source != Some(name)) {
            self.stop_unused_secret_watch(&change.key, left);
        }
    }

    /// Enqueues the Machines that got or lost a MAC address.
    fn enqueue_mac_changes(&self) {
        for key in self.caches.index.mac_addresses.take_changed() {
            self.enqueue(key);
        }
    }

    fn stop_unused_secret_watch(&self, machine: &ObjectKey, secret: &str) {
        let secret = machine.sibling(secret);
        self.source_secrets.stop_unless(&secret, || self.caches.is_source(&secret));
    }

    /// When a Secret that a Machine's cloudInit.secretRef names changes, enqueue the Machine, because the cloud-init
    /// Secret contains a copy.
    fn source_secret_changed(&self, key: &ObjectKey) {
        self.enqueue_by_index(MachineEntry::BY_SOURCE, &in_namespace(key, key.name()));
    }

    /// When a NetworkConfiguration changes, enqueue the Machines that name it, because their VM or NAD may change; and
    /// the NetworkConfiguration itself if it has the operator's finalizer, because nothing may use it any more.
    fn network_changed(&self, change: &Change<NetworkEntry>) {
        self.enqueue_mac_changes();
        self.enqueue_by_index(MachineEntry::BY_NETWORK, &in_namespace(&change.key, change.key.name()));
        if change.new.as_ref().is_some_and(|new| new.finalizer_index.is_some()) {
            self.enqueue_network(change.key.clone());
        }
    }

    /// When a StorageClass changes, enqueue the Machines that do not run, because they may wait for it.
    fn class_changed(&self, _: &Change<ClassEntry>) {
        self.enqueue_where(|entry| entry.phase != MachinePhase::Running || !entry.ready);
    }

    /// When a cloud-init Secret changes, enqueue its Machine, because another client may have changed the user data.
    fn secret_changed(&self, change: &Change<SecretEntry>) {
        let machine = old_and_new(change).find_map(|secret| secret.machine().map(str::to_owned));
        self.enqueue_owner(&change.key, machine.as_deref(), true);
    }

    /// When a PVC changes, enqueue the Machine that its label names (before and after the change), because StorageReady
    /// follows it and a deleted PVC must be reported.
    fn pvc_changed(&self, change: &Change<PvcEntry>) {
        let at_once = match (&change.old, &change.new) {
            (Some(old), Some(new)) => !old.is_intermediate(new),
            (None, Some(_)) => false,
            (_, None) => true,
        };
        for pvc in old_and_new(change) {
            self.enqueue_owner(&change.key, pvc.machine(), at_once);
        }
    }

    /// When a VolumeImportSource changes, enqueue the Machine that its label names, because a disk import needs it.
    fn import_changed(&self, change: &Change<ImportEntry>) {
        for source in old_and_new(change) {
            self.enqueue_owner(&change.key, source.machine(), change.new.is_none());
        }
    }

    /// When a NAD changes, enqueue the Machines that name the NetworkConfiguration of the same name, because they
    /// created it.
    fn attachment_changed(&self, change: &Change<AttachmentEntry>) {
        self.enqueue_by_index(MachineEntry::BY_NETWORK, &in_namespace(&change.key, change.key.name()));
    }

    /// When a VM changes, enqueue the Machine of the same name, because phase and Ready follow the VM and drift must be
    /// repaired; debounced for intermediate states and for the operator's own creation.
    fn vm_changed(&self, change: &Change<VmEntry>) {
        self.enqueue_mac_changes();
        match (&change.old, &change.new) {
            (Some(old), Some(new)) if old.is_intermediate(new, self.is_being_created(&change.key)) => {
                self.enqueue_debounced(change.key.clone());
            }
            (None, Some(_)) => self.enqueue_debounced(change.key.clone()),
            _ => self.enqueue(change.key.clone()),
        }
    }

    /// When a VMI changes, enqueue the Machine of the same name, because phase, Ready and addresses follow the VMI;
    /// debounced for intermediate states. Also enqueue the Machines that got a MAC address that its guest had.
    fn vmi_changed(&self, change: &Change<VmiEntry>) {
        self.enqueue_mac_changes();
        match (&change.old, &change.new) {
            (Some(old), Some(new)) if old.is_intermediate(new) => self.enqueue_debounced(change.key.clone()),
            (None, Some(new)) if new.is_intermediate(new) => self.enqueue_debounced(change.key.clone()),
            _ => self.enqueue(change.key.clone()),
        }
    }

    /// When a CRD changes, enqueue nothing, but list its kind again if that is not served yet: the watch of the kind
    /// then enqueues its Machines.
    fn crd_changed(&self, change: &Change<CrdVersion>) {
        self.caches.kinds.retry_crd(change.key.name());
    }

    fn is_being_created(&self, key: &ObjectKey) -> bool {
        let machine = self.caches.machines.get(key);
        machine.is_some_and(|machine| [MachinePhase::Pending, MachinePhase::Creating].contains(&machine.phase))
    }
}

/// The kinds of KubeVirt, Multus and CDI, which a cluster may get after this operator.
fn is_optional_dependency(resource: &ApiResource) -> bool {
    [
        virtual_machine_resource(),
        virtual_machine_instance_resource(),
        network_attachment_resource(),
        import_source_resource(),
    ]
    .contains(resource)
}

/// Both sides of a change: a changed label concerns two Machines.
fn old_and_new<V>(change: &Change<V>) -> impl Iterator<Item = &V> {
    [&change.old, &change.new].into_iter().filter_map(|side| side.as_deref())
}
