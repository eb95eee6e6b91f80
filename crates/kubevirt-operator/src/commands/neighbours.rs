//! Which Machine has a MAC address, for commands that have all objects at once. The decision is that of the operator
//! ([`MacAddresses`]).

use std::collections::BTreeMap;

use vitivirt_api::{ObjectKey, machine::Machine};
use vitivirt_machine::{Observed, observed::NetworkView};

use crate::{
    cache::interfaces,
    mac_addresses::{Address, Mac, MacAddresses, MachineInterface, segment},
};

/// The creation time of Machines that do not exist yet. They are younger than all others.
const NEW: i64 = i64::MAX / 2;

/// Machines that ask for addresses, the networks of their namespaces, and their VMs.
#[derive(Clone, Default)]
pub(super) struct Neighbours {
    machines: BTreeMap<ObjectKey, Neighbour>,
    networks: BTreeMap<ObjectKey, Bridge>,
    vms: BTreeMap<ObjectKey, Box<[Mac]>>,
}

#[derive(Clone)]
pub(super) struct Neighbour {
    created: i64,
    interfaces: Box<[MachineInterface]>,
}

/// The bridge and the VLAN of a NetworkConfiguration.
pub(super) type Bridge = (Option<String>, Option<u16>);

impl Neighbour {
    /// `position` orders Machines that do not exist yet.
    pub(super) fn new(machine: &Machine, position: usize) -> Self {
        let created = machine.metadata.creation_timestamp.as_ref().map(|time| time.0.as_second());
        let of_new_one = NEW.saturating_add(i64::try_from(position).unwrap_or(NEW));
        Self { created: created.unwrap_or(of_new_one), interfaces: interfaces(machine) }
    }
}

impl Neighbours {
    /// Replaces a Machine of the same name.
    pub(super) fn add_machine(&mut self, key: ObjectKey, machine: Neighbour) {
        self.machines.insert(key, machine);
    }

    pub(super) fn add_network(&mut self, key: ObjectKey, bridge: Bridge) {
        self.networks.insert(key, bridge);
    }

    pub(super) fn add_vm(&mut self, key: ObjectKey, macs: Box<[Mac]>) {
        self.vms.insert(key, macs);
    }

    /// The networks that a Machine names.
    pub(super) fn add_networks_of(&mut self, observed: &Observed) {
        let key = observed.id.key();
        for (name, NetworkView { bridge, vlan, .. }) in &observed.networks {
            self.add_network(key.sibling(name), (bridge.clone(), *vlan));
        }
    }

    /// The Machines that ask for an address of this one, and this one itself. Empty if there is no other.
    pub(super) fn rivals(&self, key: &ObjectKey) -> Vec<ObjectKey> {
        let Some(own) = self.machines.get(key) else { return Vec::new() };
        let own = self.addresses(key, own);
        let asks = |(key, machine): &(&ObjectKey, &Neighbour)| {
            machine.interfaces.iter().any(|interface| own.contains(&self.address(key, interface)))
        };
        let asking: Vec<ObjectKey> = self.machines.iter().filter(asks).map(|(key, _)| key.clone()).collect();
        if asking.iter().all(|asking| asking == key) { Vec::new() } else { asking }
    }

    /// The addresses of a Machine that another one has, by network and address, with the name of that Machine.
    pub(super) fn macs_in_use(&self, observed: &Observed) -> BTreeMap<(String, String), String> {
        let key = observed.id.key();
        let Ok(resolved) = &observed.resolved else { return BTreeMap::new() };
        let has_in_vm = |key: &ObjectKey, mac| self.vms.get(key).is_some_and(|macs| macs.contains(&mac));
        let decided = MacAddresses::default();
        for (key, machine) in &self.machines {
            decided.set(key, machine.created, self.addresses(key, machine), &has_in_vm);
        }
        decided.in_use(&key, resolved, &|network| self.segment(&key, network))
    }

    fn addresses(&self, key: &ObjectKey, machine: &Neighbour) -> Box<[Address]> {
        machine.interfaces.iter().map(|interface| self.address(key, interface)).collect()
    }

    fn address(&self, key: &ObjectKey, interface: &MachineInterface) -> Address {
        (self.segment(key, &interface.network), interface.mac)
    }

    fn segment(&self, key: &ObjectKey, network: &str) -> u64 {
        let bridge = self.networks.get(&key.sibling(network));
        let bridge = bridge.and_then(|(bridge, vlan)| Some((bridge.as_deref()?, *vlan)));
        segment(key.namespace().unwrap_or_default(), network, bridge)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use serde_json::{Value, json};
    use vitivirt_machine::resolve::derived_mac;

    use super::*;
    use crate::mac_addresses::mac_number;

    const MAC: &str = "52:54:00:12:34:ab";
    const OLD: Option<&str> = Some("2026-01-01T00:00:00Z");
    const YOUNG: Option<&str> = Some("2026-01-02T00:00:00Z");

    fn machine(namespace: &str, name: &str, created: Option<&str>, networks: &Value) -> Machine {
        serde_json::from_value(json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {
                "name": name, "namespace": namespace, "uid": format!("uid-{name}"), "creationTimestamp": created,
            },
            "spec": {"template": "small", "networks": networks},
        }))
        .unwrap()
    }

    fn on(network: &str, mac: &str) -> Value {
        json!([{"name": "a", "networkName": network, "macAddress": mac}])
    }

    /// NetworkConfigurations prod and same are on one bridge and VLAN, in every namespace. storage is on another one.
    fn neighbours(machines: &[&Machine]) -> Neighbours {
        let mut all = Neighbours::default();
        for (position, machine) in machines.iter().enumerate() {
            let key = ObjectKey::from_metadata(&machine.metadata);
            for (network, vlan) in [("prod", 100), ("same", 100), ("storage", 200)] {
                all.add_network(key.sibling(network), (Some("br1".to_owned()), Some(vlan)));
            }
            all.add_machine(key, Neighbour::new(machine, position));
        }
        all
    }

    fn in_use(neighbours: &Neighbours, machine: &Machine) -> Option<String> {
        let observed = Observed::new(machine.clone(), Timestamp::UNIX_EPOCH).unwrap();
        neighbours.macs_in_use(&observed).into_values().next()
    }

    /// The owner of an address that both ask for, as each of the two sees it.
    fn owners(first: &Machine, second: &Machine) -> (Option<String>, Option<String>) {
        let all = neighbours(&[first, second]);
        (in_use(&all, first), in_use(&all, second))
    }

    #[test]
    fn the_older_of_two_machines_without_a_vm_has_the_address_on_every_network() {
        for network in ["pod", "prod"] {
            let (old, young) =
                (machine("ns", "old", OLD, &on(network, MAC)), machine("ns", "young", YOUNG, &on(network, MAC)));
            assert_eq!(owners(&old, &young), (None, Some("old".to_owned())), "{network}");
            let planned = machine("ns", "a-new-one", None, &on(network, MAC));
            assert_eq!(owners(&planned, &young), (Some("young".to_owned()), None), "{network}");
        }
        let [first, second] = ["z", "a"].map(|name| machine("ns", name, None, &on("pod", MAC)));
        assert_eq!(owners(&first, &second), (None, Some("z".to_owned())), "the first one of the files");
    }

    #[test]
    fn a_machine_keeps_the_address_that_its_vm_has_against_an_older_one() {
        let (old, running) =
            (machine("ns", "old", OLD, &on("prod", MAC)), machine("ns", "run", YOUNG, &on("prod", MAC)));
        let mut all = neighbours(&[&old, &running]);
        all.add_vm(ObjectKey::namespaced("ns", "run"), [mac_number(MAC)].into());
        assert_eq!((in_use(&all, &old).as_deref(), in_use(&all, &running)), (Some("run"), None));
    }

    #[test]
    fn only_the_same_address_in_any_case_on_the_same_bridge_and_vlan_is_a_conflict() {
        let old = machine("ns", "old", OLD, &on("prod", MAC));
        let young = |namespace: &str, network: &str, mac: &str| machine(namespace, "young", YOUNG, &on(network, mac));
        assert_eq!(owners(&old, &young("ns", "storage", MAC)).1, None);
        assert_eq!(owners(&old, &young("ns", "pod", MAC)).1, None);
        assert_eq!(owners(&old, &young("ns", "same", &MAC.to_uppercase())).1.as_deref(), Some("old"));
        assert_eq!(owners(&old, &young("other", "same", MAC)).1.as_deref(), Some("in another namespace"));
        let (pod, other_pod) = (machine("ns", "old", OLD, &on("pod", MAC)), young("other", "pod", MAC));
        assert_eq!(owners(&pod, &other_pod).1, None, "each namespace has its own pod network");
    }

    #[test]
    fn derived_and_set_addresses_conflict_with_each_other() {
        for (network, interface) in [("pod", "default"), ("prod", "a")] {
            let without =
                if network == "pod" { json!([]) } else { json!([{"name": interface, "networkName": network}]) };
            let given = |name: &str| on(network, &derived_mac(&format!("uid-{name}"), interface));
            let old = machine("ns", "old", OLD, &without);
            let young = machine("ns", "young", YOUNG, &given("old"));
            assert_eq!(owners(&old, &young).1.as_deref(), Some("old"), "{network}: set like derived");
            let (old, young) = (machine("ns", "old", OLD, &given("young")), machine("ns", "young", YOUNG, &without));
            assert_eq!(owners(&old, &young).1.as_deref(), Some("old"), "{network}: derived like set");
        }
    }

    #[test]
    fn an_invalid_machine_has_no_address() {
        let mut broken = machine("ns", "old", OLD, &on("prod", MAC));
        broken.spec.template = Some("huge".to_owned());
        let young = machine("ns", "young", YOUNG, &on("prod", MAC));
        assert_eq!(owners(&broken, &young).1, None);
    }

    #[test]
    fn only_machines_that_ask_for_the_same_address_are_rivals() {
        let (old, young) =
            (machine("ns", "old", OLD, &on("prod", MAC)), machine("b", "young", YOUNG, &on("same", MAC)));
        let other = machine("ns", "other", OLD, &on("prod", "52:54:00:12:34:ac"));
        let all = neighbours(&[&old, &young, &other]);
        let rivals = |namespace: &str, name: &str| all.rivals(&ObjectKey::namespaced(namespace, name));
        assert_eq!(rivals("ns", "old"), [ObjectKey::namespaced("b", "young"), ObjectKey::namespaced("ns", "old")]);
        assert!(rivals("ns", "other").is_empty());
    }
}
