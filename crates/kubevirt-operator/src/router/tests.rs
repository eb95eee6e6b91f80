//! Which Machines are enqueued, and how soon. No cluster: changes in, queue out.

use std::sync::Arc;

use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{
    testing::{caches, change, client, machine},
    *,
};

fn router() -> Arc<EventRouter> {
    EventRouter::new(caches(), SourceSecrets::new(client(), client(), Arc::default(), CancellationToken::new()))
}

#[tokio::test]
async fn a_changed_spec_is_enqueued_at_once_and_the_operators_own_write_is_debounced() {
    let router = router();
    let queue = router.start_queues().machines;
    let old = machine(|_| {});
    let finalizer = machine(|object| object["metadata"]["finalizers"] = json!(["machine.vitistack.io/cleanup"]));
    let status = machine(|object| object["status"]["phase"] = "Running".into());
    for written in [&finalizer, &status] {
        router.machine_changed(&change("vm", Some(&old), Some(written)));
        assert_eq!(queue.depth(), 0);
    }
    for edited in [
        machine(|object| object["metadata"]["generation"] = 2.into()),
        machine(|object| object["metadata"]["labels"] = json!({"vitistack.io/machine-template": "large"})),
        machine(|object| object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into()),
    ] {
        let queue = router.start_queues().machines;
        router.machine_changed(&change("vm", Some(&old), Some(&edited)));
        assert_eq!(queue.depth(), 1);
    }
}

#[tokio::test]
async fn a_replica_that_does_not_lead_enqueues_nothing() {
    let router = router();
    let queue = router.start_queues().machines;
    router.stop_queues();
    router.machine_changed(&change("vm", None, Some(&machine(|_| {}))));
    assert_eq!(queue.depth(), 0);
}

#[tokio::test]
async fn a_network_that_a_machine_no_longer_names_is_enqueued() {
    let router = router();
    let named = machine(|_| {});
    let elsewhere = machine(|object| object["spec"]["networks"][0]["networkName"] = "other".into());
    for (old, new, expected) in [
        (None, Some(&named), 0),
        (Some(&named), Some(&named), 0),
        (Some(&named), Some(&elsewhere), 1),
        (Some(&named), None, 1),
    ] {
        let queues = router.start_queues();
        router.machine_changed(&change("vm", old, new));
        assert_eq!(queues.networks.depth(), expected);
    }
}
