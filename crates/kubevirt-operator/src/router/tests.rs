//! Which Machines are woken, how soon, and what is remembered on the way. No cluster: changes in, queue out.

use std::sync::Arc;

use serde_json::{Value, json};
use vitivirt_api::machine::{LABEL_MACHINE, LABEL_MACHINE_UID};
use vitivirt_runtime::metrics::Metrics;

use super::*;

fn router() -> Arc<EventRouter> {
    EventRouter::new(MachineMetrics::register(&Metrics::new("test")))
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::namespaced("ns", name)
}

fn machine(change: impl FnOnce(&mut Value)) -> Arc<MachineEntry> {
    let mut object = json!({
        "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
        "metadata": {"name": "vm", "namespace": "ns", "uid": "u", "generation": 1},
        "spec": {"template": "small", "networks": [{"name": "a", "networkName": "net"}]},
        "status": {"phase": "Creating"},
    });
    change(&mut object);
    Arc::new(MachineEntry::project(serde_json::from_value(object).unwrap()))
}

fn pvc(uid: &str) -> Arc<PvcEntry> {
    let labels = json!({LABEL_MACHINE: "vm", LABEL_MACHINE_UID: uid});
    let object = json!({"metadata": {"name": "vm-root", "namespace": "ns", "labels": labels}});
    Arc::new(PvcEntry::project(serde_json::from_value(object).unwrap()))
}

fn change<V>(name: &str, old: Option<&Arc<V>>, new: Option<&Arc<V>>) -> Change<V> {
    Change { key: key(name), old: old.cloned(), new: new.cloned() }
}

#[tokio::test]
async fn what_is_wanted_is_urgent_and_what_we_wrote_is_not() {
    let router = router();
    let queue = router.begin().machines;
    let old = machine(|_| {});
    let finalizer = machine(|object| object["metadata"]["finalizers"] = json!(["machine.vitistack.io/cleanup"]));
    let status = machine(|object| object["status"]["phase"] = "Running".into());
    for written in [&finalizer, &status] {
        router.machine_changed(&change("vm", Some(&old), Some(written)));
        assert_eq!(queue.depth(), 0);
    }
    for wanted in [
        machine(|object| object["metadata"]["generation"] = 2.into()),
        machine(|object| object["metadata"]["labels"] = json!({"vitistack.io/machine-template": "large"})),
        machine(|object| object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into()),
    ] {
        let queue = router.begin().machines;
        router.machine_changed(&change("vm", Some(&old), Some(&wanted)));
        assert_eq!(queue.depth(), 1);
    }
}

#[test]
fn nothing_is_queued_while_nobody_leads() {
    let router = router();
    let queue = router.begin().machines;
    router.end();
    router.machine_changed(&change("vm", None, Some(&machine(|_| {}))));
    assert_eq!(queue.depth(), 0);
}

/// Two Machines of one network that go together must not wait for each other to let it go.
#[test]
fn a_machine_that_goes_is_no_user_of_its_network() {
    let router = router();
    let (stays, goes) =
        (machine(|_| {}), machine(|object| object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into()));
    router.machine_changed(&change("a", None, Some(&stays)));
    assert!(!router.has_other_users(&key("a"), "net", &stays));
    router.machine_changed(&change("b", None, Some(&stays)));
    assert!(router.has_other_users(&key("a"), "net", &stays));
    for name in ["a", "b"] {
        router.machine_changed(&change(name, Some(&stays), Some(&goes)));
    }
    assert!(!router.has_other_users(&key("a"), "net", &goes) && !router.has_other_users(&key("b"), "net", &goes));
    router.machine_changed(&change("a", Some(&goes), None));
    router.machine_changed(&change("b", Some(&goes), None));
    assert!(router.users.lock().is_empty());
}

#[test]
fn pvcs_are_found_by_the_uid_that_they_carry() {
    let router = router();
    let (first, second) = (pvc("11111111-1111-1111-1111-111111111111"), pvc("22222222-2222-2222-2222-222222222222"));
    router.pvc_changed(&change("vm-root", None, Some(&first)));
    assert_eq!(router.pvcs_of("11111111-1111-1111-1111-111111111111"), ["vm-root".into()]);
    router.pvc_changed(&change("vm-root", Some(&first), Some(&second)));
    assert!(router.pvcs_of("11111111-1111-1111-1111-111111111111").is_empty());
    assert_eq!(router.pvcs_of("22222222-2222-2222-2222-222222222222").len(), 1);
    router.pvc_changed(&change("vm-root", Some(&second), None));
    assert!(router.pvcs.lock().is_empty());
}

/// Whoever is younger must learn that the older took its address, and that it let it go.
#[tokio::test]
async fn two_of_one_address_are_noticed_and_forgotten() {
    let router = router();
    let with = |mac: &str| machine(|object| object["spec"]["networks"][0]["macAddress"] = mac.into());
    let (one, other) = (with("52:54:00:00:00:01"), with("52:54:00:00:00:02"));
    let address = one.mac_hashes[0];
    router.machine_changed(&change("a", None, Some(&one)));
    router.machine_changed(&change("a", Some(&one), Some(&one)));
    assert!(!router.is_shared(address), "a Machine does not meet itself");
    assert!(router.count_addresses(None, Some(&one)) == [address] && router.is_shared(address));
    assert_eq!(router.count_addresses(Some(&one), Some(&other)), [address]);
    assert!(!router.is_shared(address));
    router.machine_changed(&change("b", Some(&other), None));
    router.machine_changed(&change("a", Some(&one), None));
    assert!(router.addresses.lock().is_empty());
}

#[test]
fn a_network_that_a_machine_leaves_is_looked_at() {
    let router = router();
    let named = machine(|_| {});
    let elsewhere = machine(|object| object["spec"]["networks"][0]["networkName"] = "other".into());
    for (old, new, expected) in [
        (None, Some(&named), 0),
        (Some(&named), Some(&named), 0),
        (Some(&named), Some(&elsewhere), 1),
        (Some(&named), None, 1),
    ] {
        let queues = router.begin();
        router.machine_changed(&change("vm", old, new));
        assert_eq!(queues.networks.depth(), expected);
    }
}
