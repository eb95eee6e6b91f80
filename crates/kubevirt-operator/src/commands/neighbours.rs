//! Which Machine has a MAC address, for commands that have all objects at once. The decision is that of the operator
//! ([`MacAddresses`]).

use std::collections::BTreeMap;

use vitivirt_api::{ObjectKey, machine::Machine};
use vitivirt_machine::{Observed, observed::NetworkView};

use crate::{
    cache::interfaces,
    mac_addresses::{MacAddresses, MachineInterface, claims, segment},
};

/// The creation time of Machines that do not exist yet. They are younger than all others.
const NEW: i64 = i64::MAX / 2;

/// Machines that ask for addresses, the networks of their namespaces, and the interfaces of their VMs and guests.
#[derive(Clone, Default)]
pub(super) struct Neighbours {
    machines: BTreeMap<ObjectKey, Neighbour>,
    networks: BTreeMap<ObjectKey, Bridge>,
    held: BTreeMap<ObjectKey, Vec<MachineInterface>>,
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

    /// The interfaces of the VM of a Machine, or of its guest.
    pub(super) fn add_held(&mut self, key: ObjectKey, interfaces: &[MachineInterface]) {
        self.held.entry(key).or_default().extend_from_slice(interfaces);
    }

    /// The networks that a Machine names.
    pub(super) fn add_networks_of(&mut self, observed: &Observed) {
        let key = observed.id.key();
        for (name, NetworkView { bridge, vlan, .. }) in &observed.networks {
            self.add_network(key.sibling(name), (bridge.clone(), *vlan));
        }
    }

    /// The addresses of a Machine that another one has, by network and address, with the name of that Machine.
    pub(super) fn macs_in_use(&self, observed: &Observed) -> BTreeMap<(String, String), String> {
        let key = observed.id.key();
        let Ok(resolved) = &observed.resolved else { return BTreeMap::new() };
        let decided = MacAddresses::default();
        for (key, machine) in &self.machines {
            let held = self.held.get(key).into_iter().flatten();
            let claims = claims(&machine.interfaces, held, |network| self.segment(key, network));
            decided.set(key, machine.created, &claims);
        }
        decided.in_use(&key, resolved, &|network| self.segment(&key, network))
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

    fn interface(network: &str, mac: &str) -> MachineInterface {
        MachineInterface { network: network.into(), mac: mac_number(mac) }
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
        all.add_held(ObjectKey::namespaced("ns", "run"), &[interface("prod", MAC)]);
        assert_eq!((in_use(&all, &old).as_deref(), in_use(&all, &running)), (Some("run"), None));
    }

    #[test]
    fn a_guest_keeps_an_address_that_its_machine_does_not_ask_for() {
        let edited = machine("ns", "run", OLD, &on("prod", "52:54:00:12:34:ac"));
        let mut broken = edited.clone();
        broken.spec.template = Some("huge".to_owned());
        let planned = machine("ns", "new", None, &on("prod", MAC));
        for running in [edited, broken] {
            let mut all = neighbours(&[&running, &planned]);
            assert_eq!(in_use(&all, &planned), None);
            all.add_held(ObjectKey::namespaced("ns", "run"), &[interface("prod", MAC)]);
            assert_eq!(in_use(&all, &planned).as_deref(), Some("run"));
        }
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
    fn an_invalid_machine_without_a_vm_has_no_address() {
        let mut broken = machine("ns", "old", OLD, &on("prod", MAC));
        broken.spec.template = Some("huge".to_owned());
        let young = machine("ns", "young", YOUNG, &on("prod", MAC));
        assert_eq!(owners(&broken, &young).1, None);
    }
}
