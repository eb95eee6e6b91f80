//! Conflicts of MAC addresses. Of the Machines on one network of a namespace, only the oldest may use an address,
//! whether the address is set or derived. The operator and the command `plan` share this code.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use vitivirt_api::machine::{Machine, POD_NETWORK};

use crate::resolve::{Resolved, resolve};

/// The MAC addresses of a Machine, each with the name of its network.
pub fn addresses(resolved: &Resolved) -> impl Iterator<Item = (&str, &str)> {
    let networks = resolved.networks.iter();
    networks.map(|network| (network.configuration().unwrap_or(POD_NETWORK), network.mac.as_str()))
}

/// The addresses that older Machines of the same namespace use too, by network and address, with the name of the older
/// Machine.
pub fn in_use<'a>(
    machine: &Machine,
    resolved: &Resolved,
    others: impl IntoIterator<Item = &'a Machine>,
) -> BTreeMap<(String, String), String> {
    let mut used = BTreeMap::new();
    for other in others.into_iter().filter(|other| is_other(machine, other) && age(other) < age(machine)) {
        let Ok(other_resolved) = resolve(other) else { continue };
        for (network, mac) in addresses(&other_resolved) {
            if addresses(resolved).any(|own| own == (network, mac)) {
                used.insert((network.to_owned(), mac.to_owned()), other_resolved.id.name().to_owned());
            }
        }
    }
    used
}

fn is_other(machine: &Machine, other: &Machine) -> bool {
    other.metadata.namespace == machine.metadata.namespace && other.metadata.name != machine.metadata.name
}

/// Sorts Machines by age, oldest first. A Machine that does not exist yet is the youngest. Creation timestamps have
/// whole seconds: of two with the same second, the one with a VM counts as older, then the one with the smaller UID.
fn age(machine: &Machine) -> (bool, Option<Timestamp>, bool, &str) {
    let created = machine.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let has_vm = machine.status.as_ref().is_some_and(|status| status.vm_name.is_some());
    (created.is_none(), created, !has_vm, machine.metadata.uid.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use vitivirt_api::machine::MachineStatus;

    use super::*;
    use crate::resolve::derived_mac;

    fn machine(name: &str, created: Option<&str>, networks: &Value) -> Machine {
        serde_json::from_value(json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}"), "creationTimestamp": created},
            "spec": {"template": "small", "networks": networks},
        }))
        .unwrap()
    }

    fn used_by(machine: &Machine, other: &Machine) -> Option<String> {
        in_use(machine, &resolve(machine).unwrap(), [other]).into_values().next()
    }

    const OLD: Option<&str> = Some("2026-01-01T00:00:00Z");
    const YOUNG: Option<&str> = Some("2026-01-02T00:00:00Z");
    const MAC: &str = "52:54:00:12:34:ab";

    #[test]
    fn the_younger_machine_has_the_conflict_on_every_network() {
        for network in ["pod", "prod"] {
            let on = json!([{"name": "a", "networkName": network, "macAddress": MAC}]);
            let (old, young) = (machine("old", OLD, &on), machine("young", YOUNG, &on));
            assert_eq!(used_by(&young, &old).as_deref(), Some("old"), "{network}");
            assert_eq!(used_by(&old, &young), None, "{network}");
            let planned = machine("planned", None, &on);
            assert_eq!(used_by(&planned, &young).as_deref(), Some("young"));
            assert_eq!(used_by(&old, &planned), None);
        }
    }

    /// A running Machine keeps its address, whatever the UIDs.
    #[test]
    fn of_machines_created_in_the_same_second_the_one_with_a_vm_counts_as_older() {
        let on = json!([{"name": "a", "networkName": "prod", "macAddress": MAC}]);
        let (a, mut b) = (machine("a", OLD, &on), machine("b", OLD, &on));
        assert_eq!((used_by(&a, &b), used_by(&b, &a).as_deref()), (None, Some("a")));
        b.status = Some(MachineStatus { vm_name: Some("b".to_owned()), ..MachineStatus::default() });
        assert_eq!((used_by(&a, &b).as_deref(), used_by(&b, &a)), (Some("b"), None));
        let older = machine("c", Some("2025-12-31T23:59:59Z"), &on);
        assert_eq!(used_by(&b, &older).as_deref(), Some("c"));
    }

    #[test]
    fn only_the_same_address_in_any_case_on_the_same_network_is_a_conflict() {
        let on = |network: &str, mac: &str| json!([{"name": "a", "networkName": network, "macAddress": mac}]);
        let old = machine("old", OLD, &on("prod", MAC));
        assert_eq!(used_by(&machine("young", YOUNG, &on("storage", MAC)), &old), None);
        assert!(used_by(&machine("young", YOUNG, &on("prod", &MAC.to_uppercase())), &old).is_some());
        let mut elsewhere = machine("young", YOUNG, &on("prod", MAC));
        elsewhere.metadata.namespace = Some("another".to_owned());
        assert_eq!(used_by(&elsewhere, &old), None);
    }

    #[test]
    fn derived_and_set_addresses_conflict_with_each_other() {
        for (network, interface) in [("pod", "default"), ("prod", "a")] {
            let without =
                if network == "pod" { json!([]) } else { json!([{"name": interface, "networkName": network}]) };
            let given = |name: &str| json!([{"name": "x", "networkName": network, "macAddress": derived_mac(&format!("uid-{name}"), interface)}]);
            let old = machine("old", OLD, &without);
            assert!(used_by(&machine("young", YOUNG, &given("old")), &old).is_some(), "{network}: set like derived");
            let young = machine("young", YOUNG, &without);
            assert!(used_by(&young, &machine("old", OLD, &given("young"))).is_some(), "{network}: derived like set");
        }
    }

    #[test]
    fn an_invalid_machine_has_no_address() {
        let on = json!([{"name": "a", "networkName": "prod", "macAddress": MAC}]);
        let mut broken = machine("old", OLD, &on);
        broken.spec.template = Some("huge".to_owned());
        assert_eq!(used_by(&machine("young", YOUNG, &on), &broken), None);
    }
}
