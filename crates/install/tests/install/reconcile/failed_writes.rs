//! What the KubeVirt resource reports while a write fails.

use std::time::Duration;

use serde_json::{Value, json};
use vitivirt_api::{EventKind, Failure, ObjectKey, STARTING, reason};

use super::{installed, test_cluster::TestCluster};

/// Status and reason of the conditions Available, Progressing and Degraded.
fn conditions(cluster: &TestCluster) -> [(String, String); 3] {
    let conditions = cluster.status()["conditions"].clone();
    ["Available", "Progressing", "Degraded"].map(|name| {
        let found = conditions.as_array().unwrap().iter().find(|condition| condition["type"] == name).cloned();
        let part = |field: &str| found.as_ref().map_or("", |found| found[field].as_str().unwrap()).to_owned();
        (part("status"), part("reason"))
    })
}

fn expected(values: [(&str, &str); 3]) -> [(String, String); 3] {
    values.map(|(status, reason)| (status.to_owned(), reason.to_owned()))
}

fn refused(failing_for: Duration) -> Failure {
    let message = "cannot create an object: failed calling webhook: connection refused";
    Failure { failing_for, ..Failure::transient(reason::WEBHOOK_UNREACHABLE, message) }
}

#[test]
fn a_webhook_that_is_not_reachable_yet_is_progress_and_later_a_failure() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.fails = Some(("Service", refused(Duration::ZERO)));
    let progressing = expected([
        ("False", "DeploymentInProgress"),
        ("True", "DeploymentInProgress"),
        ("False", "DeploymentInProgress"),
    ]);
    for _ in 0..12 {
        let reconcile = cluster.reconcile();
        cluster.roll_out();
        assert!(reconcile.report.events.iter().all(|event| event.kind == EventKind::Normal), "no failure is reported");
        assert_eq!(conditions(&cluster), progressing);
    }
    assert!(!cluster.status().to_string().contains("connection refused"), "it may end within a second");
    cluster.fails = Some(("Service", refused(Duration::from_secs(5))));
    cluster.reconcile();
    assert_eq!(conditions(&cluster), progressing);
    assert!(cluster.status().to_string().contains("connection refused"));
    cluster.fails = Some(("Service", refused(STARTING)));
    cluster.reconcile();
    let failed = "DeploymentFailed";
    assert_eq!(conditions(&cluster), expected([("False", failed), ("False", failed), ("True", failed)]));
    cluster.fails = None;
    cluster.settle();
    assert_eq!(cluster.status()["phase"], "Deployed");
}

/// The webhook of virt-api, for example.
#[test]
fn instancetypes_are_awaited_while_their_webhook_starts_and_later_only_reported() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.fails = Some(("VirtualMachineClusterInstancetype", refused(Duration::ZERO)));
    cluster.reconcile_repeatedly();
    assert_eq!(cluster.status()["phase"], "Deploying");
    assert!(!cluster.status().to_string().contains("connection refused"), "it may end within a second");
    cluster.fails = Some(("VirtualMachineClusterInstancetype", refused(STARTING)));
    cluster.reconcile_repeatedly();
    let done = ("False", "AllComponentsReady");
    assert_eq!(conditions(&cluster), expected([("True", "AllComponentsReady"), done, done]));
    assert!(cluster.status().to_string().contains("connection refused"));
}

#[test]
fn an_installation_stays_available_while_a_webhook_restarts() {
    let mut cluster = installed(&json!({}));
    let key = ObjectKey::namespaced("kubevirt", "virt-api");
    let before = cluster.objects.remove(&("Service".to_owned(), key.clone())).map(|service| Value::clone(&service));
    assert!(before.is_some());
    cluster.fails = Some(("Service", refused(Duration::ZERO)));
    cluster.reconcile();
    let ready = ("True", "AllComponentsReady");
    let (progress, fine) = (("True", "DeploymentInProgress"), ("False", "DeploymentInProgress"));
    assert_eq!(conditions(&cluster), expected([ready, progress, fine]));
    assert_eq!(cluster.status()["phase"], "Deployed");
    cluster.fails = None;
    cluster.settle();
    let done = ("False", "AllComponentsReady");
    assert_eq!(conditions(&cluster), expected([ready, done, done]));
}
