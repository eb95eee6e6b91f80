//! Who may have a MAC address: on one network of a namespace only the oldest Machine that has it, given or derived. The
//! operator and the command `plan` both ask here.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use vitivirt_api::machine::{Machine, POD_NETWORK};

use crate::resolve::{Resolved, resolve};

/// The addresses of a Machine, each with the network that it is on.
pub fn addresses(resolved: &Resolved) -> impl Iterator<Item = (&str, &str)> {
    let networks = resolved.networks.iter();
    networks.map(|network| (network.configuration().unwrap_or(POD_NETWORK), network.mac.as_str()))
}

/// By network and address, the older Machines of the same namespace that have an address of this one.
pub fn in_use<'a>(
    machine: &Machine,
    resolved: &Resolved,
    others: impl IntoIterator<Item = &'a Machine>,
) -> BTreeMap<(String, String), String> {
    let mut used = BTreeMap::new();
    for other in others.into_iter().filter(|other| is_other(machine, other) && age(other) < age(machine)) {
        let Ok(theirs) = resolve(other) else { continue };
        for (network, mac) in addresses(&theirs) {
            if addresses(resolved).any(|own| own == (network, mac)) {
                let name = other.metadata.name.clone().unwrap_or_default();
                used.insert((network.to_owned(), mac.to_owned()), name);
            }
        }
    }
    used
}

fn is_other(machine: &Machine, other: &Machine) -> bool {
    other.metadata.namespace == machine.metadata.namespace && other.metadata.name != machine.metadata.name
}

/// One that does not exist yet is younger than all. The server tells seconds: of two of the same, one that has its VM
/// already is the older, and of two that both have or have not the one with the smaller UID.
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
    fn the_younger_is_refused_on_every_network() {
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

    /// A Machine that runs is not stopped by one of the same second, whatever their UIDs.
    #[test]
    fn of_two_of_one_second_the_one_with_a_vm_is_the_older() {
        let on = json!([{"name": "a", "networkName": "prod", "macAddress": MAC}]);
        let (a, mut b) = (machine("a", OLD, &on), machine("b", OLD, &on));
        assert_eq!((used_by(&a, &b), used_by(&b, &a).as_deref()), (None, Some("a")));
        b.status = Some(MachineStatus { vm_name: Some("b".to_owned()), ..MachineStatus::default() });
        assert_eq!((used_by(&a, &b).as_deref(), used_by(&b, &a)), (Some("b"), None));
        let older = machine("c", Some("2025-12-31T23:59:59Z"), &on);
        assert_eq!(used_by(&b, &older).as_deref(), Some("c"));
    }

    /// Capital letters are the same address.
    #[test]
    fn one_address_on_two_networks_is_no_conflict() {
        let on = |network: &str, mac: &str| json!([{"name": "a", "networkName": network, "macAddress": mac}]);
        let old = machine("old", OLD, &on("prod", MAC));
        assert_eq!(used_by(&machine("young", YOUNG, &on("storage", MAC)), &old), None);
        assert!(used_by(&machine("young", YOUNG, &on("prod", &MAC.to_uppercase())), &old).is_some());
        let mut elsewhere = machine("young", YOUNG, &on("prod", MAC));
        elsewhere.metadata.namespace = Some("another".to_owned());
        assert_eq!(used_by(&elsewhere, &old), None);
    }

    #[test]
    fn a_derived_address_is_as_good_as_a_given_one() {
        for (network, interface) in [("pod", "default"), ("prod", "a")] {
            let without =
                if network == "pod" { json!([]) } else { json!([{"name": interface, "networkName": network}]) };
            let given = |name: &str| json!([{"name": "x", "networkName": network, "macAddress": derived_mac(&format!("uid-{name}"), interface)}]);
            let old = machine("old", OLD, &without);
            assert!(used_by(&machine("young", YOUNG, &given("old")), &old).is_some(), "{network}: given like derived");
            let young = machine("young", YOUNG, &without);
            assert!(used_by(&young, &machine("old", OLD, &given("young"))).is_some(), "{network}: derived like given");
        }
    }

    #[test]
    fn what_cannot_be_understood_has_no_address() {
        let on = json!([{"name": "a", "networkName": "prod", "macAddress": MAC}]);
        let mut broken = machine("old", OLD, &on);
        broken.spec.template = Some("huge".to_owned());
        assert_eq!(used_by(&machine("young", YOUNG, &on), &broken), None);
    }
}
