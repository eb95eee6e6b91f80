//! Which Machines a change is about, and how soon they get a pass.
//!
//! What may change a Machine's phase or readiness, and every drift, is looked at now. Steps of a guest or a PVC on its
//! way (`is_intermediate`) wait 500 ms for each other: they only move words inside the status. So a guest that runs is
//! reported at once, and its four steps before that cost one status write.
//!
//! While this replica does not lead there is no queue, and nothing is remembered: whoever begins to lead looks at
//! everything once.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use vitivirt_api::ObjectKey;
use vitivirt_api::machine::MachinePhase;
use vitivirt_runtime::queue::Queue;
use vitivirt_runtime::watch::Change;

use crate::cache::{
    AttachmentEntry, Caches, ClassEntry, ImportEntry, MachineEntry, NetworkEntry, PvcEntry, SecretEntry, VmEntry,
    VmiEntry, in_namespace,
};
use crate::metrics::MachineMetrics;
use crate::source_secrets::SourceSecrets;

/// How long progress that changes neither phase nor Ready lets more of it come.
const COALESCE: Duration = Duration::from_millis(500);

/// What the replica that leads works on.
#[derive(Clone)]
pub(crate) struct Queues {
    pub(crate) machines: Queue<ObjectKey>,
    /// NetworkConfigurations that may have lost their last user.
    pub(crate) networks: Queue<ObjectKey>,
}

pub(crate) struct EventRouter {
    queues: RwLock<Option<Queues>>,
    caches: OnceLock<Caches>,
    sources: OnceLock<Arc<SourceSecrets>>,
    /// How many Machines that are to stay name a network, by `namespace/name`.
    users: Mutex<HashMap<Box<str>, u32>>,
    /// How many interfaces have an address, as [`crate::cache::mac_hash`] numbers them.
    addresses: Mutex<HashMap<u64, u32>>,
    /// The PVCs that carry a Machine's UID; also those of disks that have left its spec.
    pvcs: Mutex<HashMap<u128, Vec<Box<str>>>>,
    metrics: Arc<MachineMetrics>,
}

impl EventRouter {
    pub(crate) fn new(metrics: Arc<MachineMetrics>) -> Arc<Self> {
        Arc::new(Self {
            queues: RwLock::default(),
            caches: OnceLock::new(),
            sources: OnceLock::new(),
            users: Mutex::default(),
            addresses: Mutex::default(),
            pvcs: Mutex::default(),
            metrics,
        })
    }

    /// A listener for a cache.
    pub(crate) fn on<V>(
        self: &Arc<Self>,
        tell: fn(&Self, &Change<V>),
    ) -> impl Fn(&Change<V>) + Send + Sync + use<V> + 'static
    where
        V: 'static,
    {
        let router = self.clone();
        move |change| tell(&router, change)
    }

    /// The caches exist; their changes begin after this.
    pub(crate) fn know(&self, caches: Caches) {
        let _ = self.caches.set(caches);
    }

    pub(crate) fn know_sources(&self, sources: Arc<SourceSecrets>) {
        let _ = self.sources.set(sources);
    }

    /// Queues with every Machine and every protected network in them, for a leader that begins.
    pub(crate) fn begin(&self) -> Queues {
        let queues = Queues { machines: Queue::new(COALESCE), networks: Queue::new(COALESCE) };
        *self.queues.write() = Some(queues.clone());
        self.all();
        for (key, entry) in self.caches.get().map(|caches| caches.networks.all()).unwrap_or_default() {
            if entry.value.finalizer_index.is_some() {
                self.network(key);
            }
        }
        queues
    }

    pub(crate) fn end(&self) {
        *self.queues.write() = None;
    }

    pub(crate) fn all(&self) {
        self.each(|_, _| true);
    }

    fn each(&self, wanted: impl Fn(&ObjectKey, &MachineEntry) -> bool) {
        if self.queues.read().is_none() {
            return;
        }
        let all = self.caches.get().map(|caches| caches.machines.all()).unwrap_or_default();
        for (key, entry) in all {
            if wanted(&key, &entry.value) {
                self.now(key);
            }
        }
    }

    fn now(&self, key: ObjectKey) {
        if let Some(queues) = &*self.queues.read() {
            queues.machines.add(key);
        }
    }

    fn soon(&self, key: ObjectKey) {
        if let Some(queues) = &*self.queues.read() {
            queues.machines.add_coalesced(key);
        }
    }

    fn network(&self, key: ObjectKey) {
        if let Some(queues) = &*self.queues.read() {
            queues.networks.add(key);
        }
    }

    fn by_index(&self, index: &str, value: &str) {
        for (key, _) in self.caches.get().map(|caches| caches.machines.by_index(index, value)).unwrap_or_default() {
            self.now(key);
        }
    }

    /// Whether Machines that are to stay name this network, apart from one of them.
    pub(crate) fn has_other_users(&self, key: &ObjectKey, network: &str, own: &MachineEntry) -> bool {
        let itself = u32::from(!own.deleting && own.networks.iter().any(|name| **name == *network));
        self.users.lock().get(&in_namespace(key, network)).is_some_and(|count| *count > itself)
    }

    /// Names of the PVCs that carry this UID.
    pub(crate) fn pvcs_of(&self, uid: &str) -> Vec<Box<str>> {
        self.pvcs.lock().get(&compact(uid)).cloned().unwrap_or_default()
    }

    pub(crate) fn machine_changed(&self, change: &Change<MachineEntry>) {
        let (old, new) = (change.old.as_deref(), change.new.as_deref());
        self.metrics.machine_changed(&change.key, old, new);
        self.count_users(&change.key, old, new);
        match (old, new) {
            // Our own finalizer or status, which needs no pass; or somebody else's idea of it, which can wait.
            (Some(old), Some(new)) if old.same_desired_state(new) => self.soon(change.key.clone()),
            _ => self.now(change.key.clone()),
        }
        let shared = self.count_addresses(old, new);
        if !shared.is_empty() {
            // Who waits for an address that this one had, or has one that this one has now.
            self.each(|_, entry| entry.mac_hashes.iter().any(|address| shared.contains(address)));
        }
        let Some(old) = old else { return };
        let named = |name: &str| new.is_some_and(|new| new.networks.iter().any(|have| **have == *name));
        for left in old.networks.iter().filter(|name| !named(name)) {
            self.network(ObjectKey::namespaced(change.key.namespace().unwrap_or_default(), left));
        }
        if let Some(source) =
            old.source.as_deref().filter(|name| new.and_then(|new| new.source.as_deref()) != Some(name))
        {
            self.release_source(&change.key, source);
        }
    }

    fn count_users(&self, key: &ObjectKey, old: Option<&MachineEntry>, new: Option<&MachineEntry>) {
        let mut users = self.users.lock();
        let named = |entry: Option<&MachineEntry>| -> Vec<Box<str>> {
            let entry = entry.filter(|entry| !entry.deleting);
            entry.iter().flat_map(|entry| entry.networks.iter()).map(|name| in_namespace(key, name)).collect()
        };
        for value in named(new) {
            *users.entry(value).or_default() += 1;
        }
        for value in named(old) {
            if let Some(count) = users.get_mut(&value) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    users.remove(&value);
                }
            }
        }
    }

    /// Returns the addresses that this change gave or took and that others have too.
    fn count_addresses(&self, old: Option<&MachineEntry>, new: Option<&MachineEntry>) -> Vec<u64> {
        let of = |entry: Option<&MachineEntry>| entry.map(|entry| entry.mac_hashes.to_vec()).unwrap_or_default();
        let (had, has) = (of(old), of(new));
        let mut counts = self.addresses.lock();
        let mut shared = Vec::new();
        for address in has.iter().filter(|address| !had.contains(address)) {
            let count = counts.entry(*address).or_default();
            *count += 1;
            shared.extend((*count > 1).then_some(*address));
        }
        for address in had.iter().filter(|address| !has.contains(address)) {
            let left = counts.get_mut(address).map_or(0, |count| {
                *count = count.saturating_sub(1);
                *count
            });
            if left == 0 {
                counts.remove(address);
            } else {
                shared.push(*address);
            }
        }
        shared
    }

    /// Whether more than one interface has this address.
    pub(crate) fn is_shared(&self, address: u64) -> bool {
        self.addresses.lock().get(&address).is_some_and(|count| *count > 1)
    }

    fn release_source(&self, key: &ObjectKey, source: &str) {
        let (Some(caches), Some(sources)) = (self.caches.get(), self.sources.get()) else { return };
        if caches.machines.by_index(MachineEntry::BY_SOURCE, &in_namespace(key, source)).is_empty() {
            sources.end(&ObjectKey::namespaced(key.namespace().unwrap_or_default(), source));
        }
    }

    /// A Secret that Machines refer to.
    pub(crate) fn source_changed(&self, key: &ObjectKey) {
        self.by_index(MachineEntry::BY_SOURCE, &in_namespace(key, key.name()));
    }

    pub(crate) fn network_changed(&self, change: &Change<NetworkEntry>) {
        let name = in_namespace(&change.key, change.key.name());
        self.by_index(MachineEntry::BY_NETWORK, &name);
        match &change.new {
            Some(new) if new.finalizer_index.is_some() => self.network(change.key.clone()),
            Some(_) => {}
            None => self.metrics.network_gone(change.key.name()),
        }
    }

    /// Classes change seldom. Who runs does not wait for one.
    pub(crate) fn class_changed(&self, _: &Change<ClassEntry>) {
        self.each(|_, entry| entry.phase != MachinePhase::Running || !entry.ready);
    }

    pub(crate) fn secret_changed(&self, change: &Change<SecretEntry>) {
        let machine = sides(change).find_map(|secret| secret.machine().map(str::to_owned));
        self.child(&change.key, machine.as_deref(), true);
    }

    pub(crate) fn pvc_changed(&self, change: &Change<PvcEntry>) {
        self.index_pvc(change);
        self.metrics.pvc_changed(change, self.caches.get());
        let urgent = match (&change.old, &change.new) {
            (Some(old), Some(new)) => !old.is_intermediate(new),
            (None, Some(_)) => false,
            (_, None) => true,
        };
        for pvc in sides(change) {
            self.child(&change.key, pvc.machine(), urgent);
        }
    }

    fn index_pvc(&self, change: &Change<PvcEntry>) {
        let mut pvcs = self.pvcs.lock();
        if let Some(uid) = change.old.as_ref().and_then(|old| old.machine_uid()).map(compact)
            && let Some(names) = pvcs.get_mut(&uid)
        {
            names.retain(|name| **name != *change.key.name());
            if names.is_empty() {
                pvcs.remove(&uid);
            }
        }
        if let Some(uid) = change.new.as_ref().and_then(|new| new.machine_uid()).map(compact) {
            pvcs.entry(uid).or_default().push(change.key.name().into());
        }
    }

    pub(crate) fn import_changed(&self, change: &Change<ImportEntry>) {
        for source in sides(change) {
            self.child(&change.key, source.machine.as_deref(), change.new.is_none());
        }
    }

    /// A NetworkAttachmentDefinition has its network's name.
    pub(crate) fn attachment_changed(&self, change: &Change<AttachmentEntry>) {
        self.by_index(MachineEntry::BY_NETWORK, &in_namespace(&change.key, change.key.name()));
    }

    /// A VirtualMachine has its Machine's name.
    pub(crate) fn vm_changed(&self, change: &Change<VmEntry>) {
        self.metrics.vm_changed(change.old.as_deref(), change.new.as_deref());
        match (&change.old, &change.new) {
            (Some(old), Some(new)) if old.is_intermediate(new, self.is_being_made(&change.key)) => {
                self.soon(change.key.clone());
            }
            // We made it.
            (None, Some(_)) => self.soon(change.key.clone()),
            _ => self.now(change.key.clone()),
        }
    }

    pub(crate) fn vmi_changed(&self, change: &Change<VmiEntry>) {
        match (&change.old, &change.new) {
            (Some(old), Some(new)) if old.is_intermediate(new) => self.soon(change.key.clone()),
            (None, Some(new)) if new.is_intermediate(new) => self.soon(change.key.clone()),
            _ => self.now(change.key.clone()),
        }
    }

    pub(crate) fn crd_changed(&self, change: &Change<Option<Box<str>>>) {
        if let Some(caches) = self.caches.get() {
            caches.retry_now(change.key.name());
        }
    }

    fn is_being_made(&self, key: &ObjectKey) -> bool {
        let machine = self.caches.get().and_then(|caches| caches.machines.get(key));
        machine.is_some_and(|machine| [MachinePhase::Pending, MachinePhase::Creating].contains(&machine.phase))
    }

    fn child(&self, key: &ObjectKey, machine: Option<&str>, urgent: bool) {
        let Some(machine) = machine else { return };
        let key = ObjectKey::namespaced(key.namespace().unwrap_or_default(), machine);
        if urgent { self.now(key) } else { self.soon(key) }
    }
}

/// Both sides of a change: a label that was changed tells of two Machines.
fn sides<V>(change: &Change<V>) -> impl Iterator<Item = &V> {
    [&change.old, &change.new].into_iter().filter_map(|side| side.as_deref())
}

/// A UID in 16 bytes; one that is no UUID by its hash. Two that fall together only show a Machine one PVC too many,
/// which the plan then leaves alone because of its label.
fn compact(uid: &str) -> u128 {
    u128::from_str_radix(&uid.replace('-', ""), 16).unwrap_or_else(|_| {
        let mut hasher = DefaultHasher::new();
        uid.hash(&mut hasher);
        u128::from(hasher.finish())
    })
}

#[cfg(test)]
mod tests;
