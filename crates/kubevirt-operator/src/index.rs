//! Indexes across objects: how many Machines use a network, which Machine has a MAC address, and which PVCs belong to a
//! Machine. Changes of the caches update the indexes before the router sees the change.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use parking_lot::Mutex;
use vitivirt_api::ObjectKey;
use vitivirt_machine::observed::Deletion;
use vitivirt_runtime::watch::{Cache, Change};

use crate::{
    cache::{MachineEntry, NetworkEntry, PvcEntry, VmEntry, VmiEntry, in_namespace},
    mac_addresses::{MacAddresses, claims, segment},
};

#[derive(Default)]
pub(crate) struct Index {
    pub(crate) network_users: NetworkUsers,
    pub(crate) mac_addresses: MacAddresses,
    /// Held from reading the caches until `mac_addresses` has the result.
    mac_order: Mutex<()>,
    pub(crate) pvcs: PvcsByMachine,
    pub(crate) deletions: Deletions,
}

/// The caches that show which addresses the Machines ask for, and which their VMs and guests have.
#[derive(Clone)]
pub(crate) struct MacSources {
    pub(crate) machines: Cache<MachineEntry>,
    pub(crate) networks: Cache<NetworkEntry>,
    pub(crate) vms: Cache<VmEntry>,
    pub(crate) vmis: Cache<VmiEntry>,
}

impl Index {
    pub(crate) fn subscribe(self: &Arc<Self>, sources: &MacSources, pvcs: &Cache<PvcEntry>) {
        let (index, from) = (self.clone(), sources.clone());
        sources.machines.subscribe(move |change| {
            index.network_users.machine_changed(change);
            index.update_macs(&change.key, &from);
            index.deletions.machine_changed(change);
        });
        let (index, from) = (self.clone(), sources.clone());
        sources.networks.subscribe(move |change| index.network_changed(change, &from));
        let (index, from) = (self.clone(), sources.clone());
        sources.vms.subscribe(move |change| index.update_macs(&change.key, &from));
        let (index, from) = (self.clone(), sources.clone());
        sources.vmis.subscribe(move |change| index.update_macs(&change.key, &from));
        let index = self.clone();
        pvcs.subscribe(move |change| index.pvcs.pvc_changed(change));
    }

    /// The addresses on a network move to another segment with it.
    fn network_changed(&self, change: &Change<NetworkEntry>, sources: &MacSources) {
        let segment = |network: &Option<Arc<NetworkEntry>>| segment_with(&change.key, network.as_deref());
        let (old, new) = (segment(&change.old), segment(&change.new));
        if old == new {
            return;
        }
        // A Machine that reads the network at this moment may still see the old one.
        let on_old_segment = {
            let _order = self.mac_order.lock();
            self.mac_addresses.on_segment(change.key.namespace().unwrap_or_default(), old)
        };
        on_old_segment.iter().for_each(|key| self.update_macs(key, sources));
    }

    /// A Machine that is being deleted keeps its addresses until its VM is gone. Changes of several caches arrive at the same
    /// time. Each of them reads the present state, one after the other, so the last one sees all of them.
    fn update_macs(&self, key: &ObjectKey, sources: &MacSources) {
        let _order = self.mac_order.lock();
        let Some(machine) = sources.machines.get(key) else {
            self.mac_addresses.set(key, 0, &[]);
            return;
        };
        let (vm, vmi) = (sources.vms.get(key), sources.vmis.get(key));
        let in_vm = vm.iter().flat_map(|vm| &vm.interfaces);
        let held = in_vm.chain(vmi.iter().flat_map(|vmi| &vmi.interfaces));
        let claims = claims(&machine.interfaces, held, |network| segment_of(key, network, &sources.networks));
        self.mac_addresses.set(key, machine.created, &claims);
    }
}

/// The segment of a network in the namespace of `key`.
pub(crate) fn segment_of(key: &ObjectKey, network: &str, networks: &Cache<NetworkEntry>) -> u64 {
    let key = key.sibling(network);
    segment_with(&key, networks.get(&key).as_deref())
}

/// The segment of the network with this key. `configuration`: its NetworkConfiguration.
fn segment_with(key: &ObjectKey, configuration: Option<&NetworkEntry>) -> u64 {
    let bridge = configuration.and_then(NetworkEntry::bridge_and_vlan);
    segment(key.namespace().unwrap_or_default(), key.name(), bridge)
}

/// How many Machines name a NetworkConfiguration, by `namespace/name`. A Machine that is being deleted does not count.
#[derive(Default)]
pub(crate) struct NetworkUsers(Mutex<HashMap<Box<str>, u32>>);

impl NetworkUsers {
    /// Whether a Machine other than this one names the network.
    pub(crate) fn has_other_users(&self, key: &ObjectKey, network: &str, own: &MachineEntry) -> bool {
        let itself = u32::from(!own.deleting && own.networks.iter().any(|name| **name == *network));
        self.0.lock().get(&in_namespace(key, network)).is_some_and(|count| *count > itself)
    }

    fn machine_changed(&self, change: &Change<MachineEntry>) {
        let named = |entry: &Option<Arc<MachineEntry>>| -> Vec<Box<str>> {
            let entry = entry.iter().filter(|entry| !entry.deleting);
            entry.flat_map(|entry| entry.networks.iter()).map(|name| in_namespace(&change.key, name)).collect()
        };
        let mut users = self.0.lock();
        for name in named(&change.new) {
            *users.entry(name).or_default() += 1;
        }
        for name in named(&change.old) {
            decrement(&mut users, &name);
        }
    }
}

/// How the Machines that are being deleted are deleted, as far as the watch has shown it. The garbage collector removes
/// the finalizer `orphan` within milliseconds, so the Machine itself does not show it for long.
#[derive(Default)]
pub(crate) struct Deletions(Mutex<HashMap<ObjectKey, Deletion>>);

impl Deletions {
    pub(crate) fn of(&self, key: &ObjectKey) -> Deletion {
        self.0.lock().get(key).copied().unwrap_or(Deletion::Unknown)
    }

    fn machine_changed(&self, change: &Change<MachineEntry>) {
        let mut deletions = self.0.lock();
        let Some(new) = change.new.as_deref().filter(|new| new.deleting) else {
            deletions.remove(&change.key);
            return;
        };
        // Another Machine may have had the name before.
        let old = change.old.as_deref().filter(|old| old.created == new.created);
        match old {
            _ if new.orphans => _ = deletions.insert(change.key.clone(), Deletion::Orphan),
            // The first state with a deletion timestamp has the finalizer, if there is one. Only the watch shows the first.
            Some(old) if !old.deleting && change.is_next => {
                deletions.insert(change.key.clone(), Deletion::Cascade);
            }
            Some(old) if old.deleting => {}
            _ => _ = deletions.remove(&change.key),
        }
    }
}

fn decrement<K: Eq + Hash>(counts: &mut HashMap<K, u32>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// The names of the PVCs of a Machine: those that carry its UID, also of disks that have left its spec; and those of restored
/// disks that name it. After a restore of the namespace from a backup these have the UID of the earlier Machine.
#[derive(Default)]
pub(crate) struct PvcsByMachine(Mutex<PvcNames>);

#[derive(Default)]
struct PvcNames {
    by_uid: HashMap<u128, Vec<Box<str>>>,
    restored: HashMap<ObjectKey, Vec<Box<str>>>,
}

impl PvcsByMachine {
    pub(crate) fn names(&self, machine_uid: &str) -> Vec<Box<str>> {
        self.0.lock().by_uid.get(&compact_uid(machine_uid)).cloned().unwrap_or_default()
    }

    pub(crate) fn restored(&self, machine: &ObjectKey) -> Vec<Box<str>> {
        self.0.lock().restored.get(machine).cloned().unwrap_or_default()
    }

    fn pvc_changed(&self, change: &Change<PvcEntry>) {
        let mut pvcs = self.0.lock();
        let restored_for =
            |pvc: &PvcEntry| pvc.is_restored().then(|| Some(change.key.sibling(pvc.machine()?))).flatten();
        if let Some(old) = &change.old {
            remove_name(&mut pvcs.by_uid, old.machine_uid().map(compact_uid).as_ref(), change.key.name());
            remove_name(&mut pvcs.restored, restored_for(old).as_ref(), change.key.name());
        }
        if let Some(new) = &change.new {
            if let Some(uid) = new.machine_uid().map(compact_uid) {
                pvcs.by_uid.entry(uid).or_default().push(change.key.name().into());
            }
            if let Some(machine) = restored_for(new) {
                pvcs.restored.entry(machine).or_default().push(change.key.name().into());
            }
        }
    }
}

fn remove_name<K: Eq + Hash>(names: &mut HashMap<K, Vec<Box<str>>>, key: Option<&K>, name: &str) {
    if let Some(key) = key
        && let Some(found) = names.get_mut(key)
    {
        found.retain(|found| **found != *name);
        if found.is_empty() {
            names.remove(key);
        }
    }
}

/// A UID in 16 bytes, or a hash of one that is not a UUID. After a collision a Machine sees the PVC of another one, and
/// the plan ignores that PVC because of its label.
fn compact_uid(uid: &str) -> u128 {
    u128::from_str_radix(&uid.replace('-', ""), 16).unwrap_or_else(|_| {
        let mut hasher = DefaultHasher::new();
        uid.hash(&mut hasher);
        u128::from(hasher.finish())
    })
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use serde_json::{Value, json};
    use vitivirt_runtime::watch::WriteObserver;

    use super::*;
    use crate::{
        cache::Caches,
        router::testing::{caches, change, key, machine, pvc, restored_pvc},
    };

    const MAC: &str = "52:54:00:12:34:ab";

    /// A Machine on network net.
    fn json_machine(name: &str, version: u32, spec: &Value) -> Value {
        json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {
                "name": name, "namespace": "ns", "uid": name, "resourceVersion": version.to_string(),
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": spec,
        })
    }

    fn on_net(mac: &str) -> Value {
        json!({"template": "small", "networks": [{"name": "a", "networkName": "net", "macAddress": mac}]})
    }

    /// The spec of a VMI on network net.
    fn guest_spec(mac: &str) -> Value {
        json!({
            "domain": {"devices": {"interfaces": [{"name": "a", "macAddress": mac, "bridge": {}}]}},
            "networks": [{"name": "a", "multus": {"networkName": "net"}}],
        })
    }

    fn kubevirt_object(kind: &str, name: &str, version: u32, spec: &Value, phase: &str) -> Value {
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": kind,
            "metadata": {
                "name": name, "namespace": "ns", "uid": format!("{kind}-{name}"), "resourceVersion": version.to_string(),
                "labels": {"vitistack.io/managed-by": "kubevirt-operator", "vitistack.io/machine": name},
            },
            "spec": spec, "status": {"phase": phase},
        })
    }

    fn vm(name: &str, version: u32, mac: &str) -> Value {
        let template = json!({"template": {"spec": guest_spec(mac)}});
        kubevirt_object("VirtualMachine", name, version, &template, "")
    }

    fn vmi(name: &str, version: u32, mac: &str, phase: &str) -> Value {
        kubevirt_object("VirtualMachineInstance", name, version, &guest_spec(mac), phase)
    }

    /// Which Machine has [`MAC`], as another one sees it.
    fn owner(caches: &Caches) -> Option<String> {
        let asking = serde_json::from_value(json_machine("other", 1, &on_net(MAC))).unwrap();
        let resolved = vitivirt_machine::resolve::resolve(&asking).unwrap();
        let segment = |network: &str| segment_of(&key("other"), network, &caches.networks);
        caches.index.mac_addresses.in_use(&key("other"), &resolved, &segment).into_values().next()
    }

    /// A Machine that runs with [`MAC`], and another one that asks for it.
    fn running_and_other() -> Caches {
        let caches = caches();
        caches.networks.on_written(&network(1, "br1"));
        caches.machines.on_written(&json_machine("running", 1, &on_net(MAC)));
        caches.vms.on_written(&vm("running", 1, MAC));
        caches.vmis.on_written(&vmi("running", 1, MAC, "Running"));
        caches.machines.on_written(&json_machine("other", 1, &on_net(MAC)));
        assert_eq!(owner(&caches).as_deref(), Some("running"));
        caches
    }

    #[tokio::test]
    async fn a_guest_keeps_its_address_until_it_restarts_with_another_one() {
        const NEXT: &str = "52:54:00:12:34:ac";
        let caches = running_and_other();
        caches.machines.on_written(&json_machine("running", 2, &on_net(NEXT)));
        assert_eq!(owner(&caches).as_deref(), Some("running"), "the VM has it");
        caches.vms.on_written(&vm("running", 2, NEXT));
        assert_eq!(owner(&caches).as_deref(), Some("running"), "the guest has it");
        let _ = caches.index.mac_addresses.take_changed();
        caches.vmis.on_written(&vmi("running", 2, MAC, "Succeeded"));
        assert_eq!((owner(&caches), caches.index.mac_addresses.take_changed()), (None, vec![key("other")]));
    }

    #[tokio::test]
    async fn a_machine_whose_spec_becomes_invalid_keeps_the_address_of_its_vm_and_guest() {
        let caches = running_and_other();
        let mut invalid = on_net(MAC);
        invalid["template"] = "huge".into();
        caches.machines.on_written(&json_machine("running", 2, &invalid));
        assert_eq!(owner(&caches).as_deref(), Some("running"));
        caches.vms.on_deleted(&key("running"), "VirtualMachine-running");
        assert_eq!(owner(&caches).as_deref(), Some("running"), "the guest is shutting down");
        caches.vmis.on_deleted(&key("running"), "VirtualMachineInstance-running");
        assert_eq!(owner(&caches), None);
    }

    #[tokio::test]
    async fn addresses_move_with_their_network_to_another_segment() {
        let caches = running_and_other();
        // The network is only in the VM and the guest.
        caches.machines.on_written(&json_machine("running", 2, &json!({"template": "small"})));
        caches.networks.on_written(&network(2, "br2"));
        assert_eq!(owner(&caches).as_deref(), Some("running"));
        assert_eq!(caches.index.mac_addresses.on_segment("ns", segment("ns", "net", Some(("br2", None)))).len(), 2);
        assert!(caches.index.mac_addresses.on_segment("ns", segment("ns", "net", Some(("br1", None)))).is_empty());
    }

    fn network(version: u32, bridge: &str) -> Value {
        json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "NetworkConfiguration",
            "metadata": {"name": "net", "namespace": "ns", "uid": "n", "resourceVersion": version.to_string()},
            "spec": {"bridge": bridge},
        })
    }

    /// A network with many Machines changes while one of them is deleted.
    #[tokio::test]
    async fn a_machine_that_is_deleted_while_its_network_changes_has_no_address() {
        const ROUNDS: u32 = 500;
        let caches = caches();
        let machine = |name: &str, version: u32| {
            json_machine(
                name,
                version,
                &json!({"template": "small", "networks": [{"name": "a", "networkName": "net"}]}),
            )
        };
        let others = 8;
        (0..others).for_each(|number| caches.machines.on_written(&machine(&format!("a{number}"), 1)));
        let ready = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    ready.wait();
                    caches.networks.on_written(&network(round, &format!("br{round}")));
                    ready.wait();
                }
            });
            for round in 1..=ROUNDS {
                let name = format!("z{round}");
                caches.machines.on_written(&machine(&name, 1));
                ready.wait();
                caches.machines.on_deleted(&key(&name), &name);
                ready.wait();
            }
        });
        assert_eq!(caches.index.mac_addresses.machines(), others);
    }

    /// Otherwise two Machines that are deleted together would each wait for the other to release the network.
    #[test]
    fn a_machine_that_is_being_deleted_does_not_use_its_network() {
        let users = NetworkUsers::default();
        let (stays, deleted) = (
            machine(|_| {}),
            machine(|object| object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into()),
        );
        users.machine_changed(&change("a", None, Some(&stays)));
        assert!(!users.has_other_users(&key("a"), "net", &stays));
        users.machine_changed(&change("b", None, Some(&stays)));
        assert!(users.has_other_users(&key("a"), "net", &stays));
        for name in ["a", "b"] {
            users.machine_changed(&change(name, Some(&stays), Some(&deleted)));
        }
        assert!(!users.has_other_users(&key("a"), "net", &deleted));
        assert!(!users.has_other_users(&key("b"), "net", &deleted));
        users.machine_changed(&change("a", Some(&deleted), None));
        users.machine_changed(&change("b", Some(&deleted), None));
        assert!(users.0.lock().is_empty());
    }

    #[test]
    fn a_deletion_as_an_orphan_is_remembered_when_the_finalizer_is_gone() {
        let deletions = Deletions::default();
        let deleted = |object: &mut Value| {
            object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        };
        let (live, cascade) = (machine(|_| {}), machine(deleted));
        let orphan = machine(|object| {
            deleted(object);
            object["metadata"]["finalizers"] = json!(["orphan"]);
        });
        assert_eq!(deletions.of(&key("a")), Deletion::Unknown);
        deletions.machine_changed(&change("a", None, Some(&cascade)));
        assert_eq!(deletions.of(&key("a")), Deletion::Unknown, "the beginning was not seen");
        deletions.machine_changed(&change("a", Some(&live), Some(&cascade)));
        assert_eq!(deletions.of(&key("a")), Deletion::Cascade);
        deletions.machine_changed(&change("b", Some(&live), Some(&orphan)));
        deletions.machine_changed(&change("b", Some(&orphan), Some(&cascade)));
        assert_eq!(deletions.of(&key("b")), Deletion::Orphan);
        // A list may skip the state with the finalizer.
        let listed = |old, new| Change { is_next: false, ..change("c", Some(old), Some(new)) };
        deletions.machine_changed(&listed(&live, &cascade));
        assert_eq!(deletions.of(&key("c")), Deletion::Unknown, "the finalizer may have been removed since");
        deletions.machine_changed(&listed(&live, &orphan));
        assert_eq!(deletions.of(&key("c")), Deletion::Orphan);
        let successor = machine(|object| {
            deleted(object);
            object["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z".into();
        });
        deletions.machine_changed(&listed(&orphan, &successor));
        assert_eq!(deletions.of(&key("c")), Deletion::Unknown, "another Machine of the same name");
        for name in ["a", "b"] {
            deletions.machine_changed(&change(name, Some(&cascade), None));
        }
        assert!(deletions.0.lock().is_empty());
    }

    #[test]
    fn pvcs_are_found_by_the_machine_uid_that_they_carry() {
        let pvcs = PvcsByMachine::default();
        let (first_uid, second_uid) = ("11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222");
        let (first, second) = (pvc(first_uid), pvc(second_uid));
        pvcs.pvc_changed(&change("vm-root", None, Some(&first)));
        assert_eq!(pvcs.names(first_uid), ["vm-root".into()]);
        pvcs.pvc_changed(&change("vm-root", Some(&first), Some(&second)));
        assert!(pvcs.names(first_uid).is_empty());
        assert_eq!(pvcs.names(second_uid).len(), 1);
        pvcs.pvc_changed(&change("vm-root", Some(&second), None));
        assert!(pvcs.0.lock().by_uid.is_empty());
    }

    #[test]
    fn restored_pvcs_are_found_by_the_machine_that_they_name() {
        let pvcs = PvcsByMachine::default();
        let restored = restored_pvc("web", "11111111-1111-1111-1111-111111111111");
        pvcs.pvc_changed(&change("restore-root", None, Some(&restored)));
        assert_eq!(pvcs.restored(&key("web")), ["restore-root".into()]);
        // The annotation was copied from a PVC of another name.
        pvcs.pvc_changed(&change("copy", None, Some(&pvc("11111111-1111-1111-1111-111111111111"))));
        assert_eq!(pvcs.restored(&key("web")).len(), 1);
        pvcs.pvc_changed(&change("restore-root", Some(&restored), None));
        assert!(pvcs.restored(&key("web")).is_empty() && pvcs.0.lock().restored.is_empty());
    }
}
