//! Which Machine has a MAC address, in the whole cluster. Networks of several namespaces may name the same bridge and
//! VLAN, so an address belongs to a segment and not to a network of one namespace. The operator and the commands `plan`
//! and `render` share this decision.
//!
//! A Machine whose VM has the address keeps it, whichever other Machine asks for it. Of several others the oldest gets
//! it. The index keeps the owner, so a reconcile reads one entry, however many Machines ask for one address.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
};

use parking_lot::Mutex;
use vitivirt_api::{ObjectKey, machine::POD_NETWORK};
use vitivirt_machine::resolve::Resolved;

/// A MAC address as a number.
pub(crate) type Mac = u64;

/// An interface of a Machine.
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

#[derive(Default)]
pub(crate) struct MacAddresses(Mutex<State>);

#[derive(Default)]
struct State {
    claims: HashMap<Address, Claims>,
    /// The addresses that each Machine asks for, as they are in `claims`.
    machines: HashMap<ObjectKey, (i64, Box<[Address]>)>,
    /// Machines that got an address or lost it.
    changed: Vec<ObjectKey>,
}

/// Nearly every address has one claimant.
enum Claims {
    One(Claimant),
    Many { claimants: BTreeSet<Claimant>, owner: Claimant },
}

impl MacAddresses {
    /// A Machine asks for these addresses, and for no others. `has_in_vm` reports whether the VM of a Machine has one.
    pub(crate) fn set(
        &self,
        key: &ObjectKey,
        created: i64,
        addresses: Box<[Address]>,
        has_in_vm: &dyn Fn(&ObjectKey, Mac) -> bool,
    ) {
        let mut state = self.0.lock();
        let old = state.machines.remove(key);
        let claimant = Claimant { created, key: key.clone() };
        if let Some((old_created, old)) = old {
            let old_claimant = Claimant { created: old_created, key: key.clone() };
            for address in old.iter().filter(|address| old_claimant != claimant || !addresses.contains(address)) {
                state.remove(*address, &old_claimant, has_in_vm);
            }
        }
        for address in &addresses {
            state.add(*address, &claimant, has_in_vm);
        }
        if !addresses.is_empty() {
            state.machines.insert(key.clone(), (created, addresses));
        }
    }

    /// The addresses of the VM of this Machine may have changed.
    pub(crate) fn vm_changed(&self, key: &ObjectKey, has_in_vm: &dyn Fn(&ObjectKey, Mac) -> bool) {
        let mut state = self.0.lock();
        let Some((created, addresses)) = state.machines.get(key).cloned() else { return };
        let claimant = Claimant { created, key: key.clone() };
        for address in addresses {
            state.choose(address, &claimant, has_in_vm);
        }
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
        match self.0.lock().claims.get(&address)? {
            Claims::Many { owner, .. } if owner.key != *key => Some(owner.key.clone()),
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
        std::mem::take(&mut self.0.lock().changed)
    }
}

impl State {
    fn add(&mut self, address: Address, new: &Claimant, has_in_vm: &dyn Fn(&ObjectKey, Mac) -> bool) {
        match self.claims.get_mut(&address) {
            None => _ = self.claims.insert(address, Claims::One(new.clone())),
            Some(Claims::One(only)) if only == new => {}
            Some(claims) => {
                match claims {
                    Claims::One(only) => {
                        let claimants = [only.clone(), new.clone()].into();
                        *claims = Claims::Many { claimants, owner: only.clone() };
                    }
                    Claims::Many { claimants, .. } => _ = claimants.insert(new.clone()),
                }
                self.choose(address, new, has_in_vm);
            }
        }
    }

    /// Whether `new` replaces the owner: it has the address in its VM and the owner has not, or neither has and it is
    /// older.
    fn choose(&mut self, address: Address, new: &Claimant, has_in_vm: &dyn Fn(&ObjectKey, Mac) -> bool) {
        let Some(Claims::Many { owner, .. }) = self.claims.get_mut(&address) else { return };
        if owner == new || has_in_vm(&owner.key, address.1) {
            return;
        }
        if has_in_vm(&new.key, address.1) || new < owner {
            self.changed.extend([owner.key.clone(), new.key.clone()]);
            *owner = new.clone();
        }
    }

    fn remove(&mut self, address: Address, old: &Claimant, has_in_vm: &dyn Fn(&ObjectKey, Mac) -> bool) {
        match self.claims.get_mut(&address) {
            Some(Claims::One(only)) if only == old => _ = self.claims.remove(&address),
            Some(Claims::Many { claimants, owner }) => {
                claimants.remove(old);
                if owner == old {
                    let in_vm = claimants.iter().find(|other| has_in_vm(&other.key, address.1));
                    let Some(next) = in_vm.or(claimants.first()).cloned() else { return };
                    self.changed.push(next.key.clone());
                    *owner = next;
                }
                if claimants.len() == 1 {
                    let only = owner.clone();
                    self.claims.insert(address, Claims::One(only));
                }
            }
            _ => {}
        }
    }
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
            let addresses: Box<[Address]> = if asks { [ADDRESS].into() } else { Box::default() };
            self.macs.set(&key(name), created, addresses, &|key, _| self.in_vm.contains(&key.name()));
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
        assert!(test.macs.0.lock().claims.is_empty() && test.macs.0.lock().machines.is_empty());
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
        test.macs.vm_changed(&key("b"), &|key, _| key.name() == "b");
        assert_eq!((test.owner("a").as_deref(), test.changed()), (Some("b"), vec!["a".to_owned(), "b".to_owned()]));
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
