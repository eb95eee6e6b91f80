//! Which Machine has a MAC address, in the whole cluster. Networks of several namespaces may name the same bridge and
//! VLAN, so an address belongs to a segment and not to a network of one namespace. The operator and the commands `plan`
//! and `render` share this decision.
//!
//! A Machine whose VM or guest has the address keeps it, whichever other Machine asks for it, and also after its spec has
//! changed or became invalid: a guest keeps the address until it restarts. Of several others the oldest gets it. The
//! index keeps the owner, so a reconcile reads one entry, however many Machines ask for one address.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    mem,
};

use parking_lot::Mutex;
use vitivirt_api::{ObjectKey, machine::POD_NETWORK};
use vitivirt_machine::resolve::Resolved;

/// A MAC address as a number.
pub(crate) type Mac = u64;

/// An interface of a Machine, of its VM or of its guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MachineInterface {
    pub(crate) network: Box<str>,
    pub(crate) mac: Mac,
}

/// A Machine that asks for addresses. The older one is smaller.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claimant {
    created: i64,
    key: ObjectKey,
}

/// The segment, by its hash, and the address.
pub(crate) type Address = (u64, Mac);

/// An address that a Machine asks for or has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    address: Address,
    /// Its VM or its guest has the address.
    held: bool,
}

/// The addresses that the spec of a Machine asks for, and those that its VM and its guest have.
pub(crate) fn claims<'a>(
    asked: &'a [MachineInterface],
    held: impl IntoIterator<Item = &'a MachineInterface>,
    segment: impl Fn(&str) -> u64,
) -> Box<[Claim]> {
    let address = |interface: &MachineInterface| (segment(&interface.network), interface.mac);
    let mut all: BTreeMap<Address, bool> = asked.iter().map(|interface| (address(interface), false)).collect();
    all.extend(held.into_iter().map(|interface| (address(interface), true)));
    all.into_iter().map(|(address, held)| Claim { address, held }).collect()
}

#[derive(Default)]
pub(crate) struct MacAddresses(Mutex<State>);

#[derive(Default)]
struct State {
    owners: HashMap<Address, Claimants>,
    /// The addresses of each Machine, as they are in `owners`.
    machines: Machines,
    /// Machines that got an address or lost it.
    changed: Vec<ObjectKey>,
}

/// The creation time and the addresses of each Machine.
type Machines = BTreeMap<ObjectKey, (i64, Box<[Claim]>)>;

/// Nearly every address has one claimant.
enum Claimants {
    One(Claimant),
    Many { claimants: BTreeSet<Claimant>, owner: Claimant },
}

impl MacAddresses {
    /// A Machine has or asks for these addresses, and for no others.
    pub(crate) fn set(&self, key: &ObjectKey, created: i64, claims: &[Claim]) {
        let state = &mut *self.0.lock();
        if state.machines.get(key).is_some_and(|have| (have.0, &*have.1) == (created, claims)) {
            return;
        }
        let old = match claims.is_empty() {
            true => state.machines.remove(key),
            false => state.machines.insert(key.clone(), (created, claims.into())),
        };
        let claimant = Claimant { created, key: key.clone() };
        if let Some((old_created, old)) = old {
            let old_claimant = Claimant { created: old_created, key: key.clone() };
            let stays = |old: &Claim| old_claimant == claimant && claims.iter().any(|new| new.address == old.address);
            for left in old.iter().filter(|old| !stays(old)) {
                state.remove(left.address, &old_claimant);
            }
        }
        for claim in claims {
            state.add(claim.address, &claimant);
        }
    }

    /// The Machines of a namespace that have or ask for an address on a segment.
    pub(crate) fn on_segment(&self, namespace: &str, segment: u64) -> Vec<ObjectKey> {
        let state = self.0.lock();
        let in_namespace = state.machines.range(ObjectKey::namespaced(namespace, "")..);
        let in_namespace = in_namespace.take_while(|(key, _)| key.namespace() == Some(namespace));
        let found = in_namespace.filter(|(_, (_, claims))| claims.iter().any(|claim| claim.address.0 == segment));
        found.map(|(key, _)| key.clone()).collect()
    }

    /// The addresses of a Machine that another one has, by network and address, with the name of that Machine.
    pub(crate) fn in_use(
        &self,
        key: &ObjectKey,
        resolved: &Resolved,
        segment: &dyn Fn(&str) -> u64,
    ) -> BTreeMap<(String, String), String> {
        let in_use = |(network, mac): (&str, &str)| {
            let owner = self.other_owner(key, (segment(network), mac_number(mac)))?;
            // The name of a Machine is of no concern to another tenant.
            let is_in_namespace = owner.namespace() == key.namespace();
            let owner = if is_in_namespace { owner.name() } else { "in another namespace" };
            Some(((network.to_owned(), mac.to_owned()), owner.to_owned()))
        };
        resolved.mac_addresses().filter_map(in_use).collect()
    }

    /// The Machine that has an address which this one asks for, if it is another one.
    fn other_owner(&self, key: &ObjectKey, address: Address) -> Option<ObjectKey> {
        match self.0.lock().owners.get(&address)? {
            Claimants::Many { owner, .. } if owner.key != *key => Some(owner.key.clone()),
            _ => None,
        }
    }

    /// The number of Machines that ask for addresses.
    #[cfg(test)]
    pub(crate) fn machines(&self) -> usize {
        self.0.lock().machines.len()
    }

    /// The Machines that got or lost an address since the last call.
    pub(crate) fn take_changed(&self) -> Vec<ObjectKey> {
        mem::take(&mut self.0.lock().changed)
    }
}

impl State {
    fn add(&mut self, address: Address, new: &Claimant) {
        match self.owners.get_mut(&address) {
            None => _ = self.owners.insert(address, Claimants::One(new.clone())),
            Some(Claimants::One(only)) if only == new => {}
            Some(found) => {
                match found {
                    Claimants::One(only) => {
                        let claimants = [only.clone(), new.clone()].into();
                        *found = Claimants::Many { claimants, owner: only.clone() };
                    }
                    Claimants::Many { claimants, .. } => _ = claimants.insert(new.clone()),
                }
                self.choose(address, new);
            }
        }
    }

    /// Whether another claimant replaces an owner that does not hold the address: one that holds it, or `new`, if that is
    /// older.
    fn choose(&mut self, address: Address, new: &Claimant) {
        let Some(Claimants::Many { claimants, owner }) = self.owners.get_mut(&address) else { return };
        let holds = |claimant: &&Claimant| holds(&self.machines, claimant, address);
        if holds(&&*owner) {
            return;
        }
        let next = match owner == new {
            true => claimants.iter().find(holds),
            false => Some(new).filter(|new| holds(new) || *new < owner),
        };
        if let Some(next) = next.cloned() {
            self.changed.extend([owner.key.clone(), next.key.clone()]);
            *owner = next;
        }
    }

    fn remove(&mut self, address: Address, old: &Claimant) {
        match self.owners.get_mut(&address) {
            Some(Claimants::One(only)) if only == old => _ = self.owners.remove(&address),
            Some(Claimants::Many { claimants, owner }) => {
                claimants.remove(old);
                if owner == old {
                    let holder = claimants.iter().find(|other| holds(&self.machines, other, address));
                    let Some(next) = holder.or(claimants.first()).cloned() else { return };
                    self.changed.push(next.key.clone());
                    *owner = next;
                }
                if claimants.len() == 1 {
                    let only = owner.clone();
                    self.owners.insert(address, Claimants::One(only));
                }
            }
            _ => {}
        }
    }
}

fn holds(machines: &Machines, claimant: &Claimant, address: Address) -> bool {
    let claims = machines.get(&claimant.key).map(|(_, claims)| &**claims).unwrap_or_default();
    claims.iter().any(|claim| claim.held && claim.address == address)
}

/// The hash of the layer-2 segment that a network of a namespace is on. `bridge`: the bridge and VLAN of its
/// NetworkConfiguration, if it has one.
pub(crate) fn segment(namespace: &str, network: &str, bridge: Option<(&str, Option<u16>)>) -> u64 {
    let mut hasher = DefaultHasher::new();
    match bridge.filter(|_| network != POD_NETWORK) {
        Some((bridge, vlan)) => ("bridge", bridge, vlan).hash(&mut hasher),
        None => ("network", namespace, network).hash(&mut hasher),
    }
    hasher.finish()
}

/// A MAC address in any notation as a number.
pub(crate) fn mac_number(text: &str) -> Mac {
    text.chars().filter_map(|digit| digit.to_digit(16)).fold(0, |number, digit| (number << 4) | u64::from(digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Address = (7, 1);

    fn key(name: &str) -> ObjectKey {
        ObjectKey::namespaced("ns", name)
    }

    /// Machines ask for one address. `created` is the age; in `in_vm` are those whose VM has the address.
    struct Test {
        macs: MacAddresses,
        in_vm: Vec<&'static str>,
    }

    impl Test {
        fn set(&self, name: &str, created: i64, asks: bool) {
            let interface = || MachineInterface { network: "net".into(), mac: ADDRESS.1 };
            let asked: Vec<MachineInterface> = asks.then(interface).into_iter().collect();
            let held: Vec<MachineInterface> = self.in_vm.contains(&name).then(interface).into_iter().collect();
            self.macs.set(&key(name), created, &claims(&asked, &held, |_| ADDRESS.0));
        }

        fn owner(&self, of: &str) -> Option<String> {
            self.macs.other_owner(&key(of), ADDRESS).map(|owner| owner.name().to_owned())
        }

        fn changed(&self) -> Vec<String> {
            self.macs.take_changed().iter().map(|key| key.name().to_owned()).collect()
        }
    }

    fn test(in_vm: &[&'static str]) -> Test {
        Test { macs: MacAddresses::default(), in_vm: in_vm.to_vec() }
    }

    #[test]
    fn the_oldest_machine_has_an_address_that_no_vm_has() {
        let test = test(&[]);
        test.set("young", 2, true);
        test.set("old", 1, true);
        assert_eq!((test.owner("young").as_deref(), test.owner("old")), (Some("old"), None));
        assert_eq!(test.changed(), ["young", "old"]);
        test.set("old", 1, false);
        assert_eq!((test.owner("young"), test.changed()), (None, vec!["young".to_owned()]));
        test.set("young", 2, false);
        assert!(test.macs.0.lock().owners.is_empty() && test.macs.0.lock().machines.is_empty());
    }

    #[test]
    fn a_machine_keeps_the_address_that_its_vm_has_against_an_older_one() {
        let test = test(&["running"]);
        test.set("running", 5, true);
        test.set("older", 1, true);
        assert_eq!((test.owner("older").as_deref(), test.owner("running")), (Some("running"), None));
        assert!(test.changed().is_empty(), "the owner is not disturbed");
    }

    #[test]
    fn a_vm_that_is_found_later_decides_too() {
        let mut test = test(&[]);
        test.set("a", 1, true);
        test.set("b", 2, true);
        test.in_vm = vec!["b"];
        test.set("b", 2, true);
        assert_eq!((test.owner("a").as_deref(), test.changed()), (Some("b"), vec!["a".to_owned(), "b".to_owned()]));
    }

    #[test]
    fn a_machine_keeps_the_address_that_its_guest_has_and_its_spec_does_not_ask_for() {
        let mut test = test(&["running"]);
        test.set("running", 1, true);
        test.set("other", 2, true);
        test.set("running", 1, false);
        assert_eq!((test.owner("other").as_deref(), test.changed()), (Some("running"), Vec::new()));
        test.in_vm.clear();
        test.set("running", 1, false);
        assert_eq!((test.owner("other"), test.changed()), (None, vec!["other".to_owned()]));
    }

    /// Two guests have the address, because both were created when the operator did not see the other one.
    #[test]
    fn a_guest_that_has_the_address_gets_it_when_that_of_the_owner_is_gone() {
        let mut test = test(&["a", "b"]);
        test.set("a", 1, true);
        test.set("b", 2, true);
        assert_eq!((test.owner("b").as_deref(), test.owner("a")), (Some("a"), None));
        test.in_vm = vec!["b"];
        test.set("a", 1, true);
        assert_eq!((test.owner("a").as_deref(), test.owner("b")), (Some("b"), None));
    }

    #[test]
    fn machines_are_found_by_segment_and_namespace() {
        let test = test(&["b"]);
        test.set("a", 1, true);
        test.set("b", 1, false);
        assert_eq!(test.macs.on_segment("ns", ADDRESS.0), [key("a"), key("b")]);
        assert!(
            test.macs.on_segment("ns", ADDRESS.0 + 1).is_empty() && test.macs.on_segment("n", ADDRESS.0).is_empty()
        );
    }

    /// Each of thousands of Machines with one address costs the same, and enqueues no other.
    #[test]
    fn another_claimant_triggers_no_reconcile_of_the_others() {
        let test = test(&["owner"]);
        test.set("owner", 1, true);
        for number in 0..2_000 {
            test.set(&format!("m{number}"), 2, true);
        }
        assert!(test.changed().is_empty());
        assert_eq!(test.owner("m77").as_deref(), Some("owner"));
        for number in 0..2_000 {
            test.set(&format!("m{number}"), 2, false);
        }
        assert!(test.changed().is_empty());
        assert_eq!(test.owner("owner"), None);
    }

    #[test]
    fn a_segment_is_a_bridge_and_a_vlan_or_a_network_of_one_namespace() {
        assert_eq!(segment("a", "x", Some(("br1", Some(7)))), segment("b", "y", Some(("br1", Some(7)))));
        assert_ne!(segment("a", "x", Some(("br1", Some(7)))), segment("a", "x", Some(("br1", None))));
        assert_ne!(segment("a", "pod", None), segment("b", "pod", None));
        assert_eq!(mac_number("02:00:00:00:Aa:01"), 0x0200_0000_aa01);
    }
}
