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

/// A busy API server refuses a request, or answers it too late.
#[test]
fn an_installation_stays_available_while_the_api_server_is_busy() {
    for name in [reason::TOO_MANY_REQUESTS, reason::DEADLINE_EXCEEDED, reason::API_SERVER_ERROR] {
        let mut cluster = installed(&json!({}));
        let service = ("Service".to_owned(), ObjectKey::namespaced("kubevirt", "virt-api"));
        assert!(cluster.objects.remove(&service).is_some());
        let failure = |failing_for| Failure { failing_for, ..Failure::transient(name, "cannot create Service: busy") };
        cluster.fails = Some(("Service", failure(Duration::from_secs(5))));
        let reconcile = cluster.reconcile();
        assert!(reconcile.report.events.iter().all(|event| event.kind == EventKind::Normal), "{name}");
        let ready = ("True", "AllComponentsReady");
        let (progress, fine) = (("True", "DeploymentInProgress"), ("False", "DeploymentInProgress"));
        assert_eq!(conditions(&cluster), expected([ready, progress, fine]), "{name}");
        assert!(cluster.status().to_string().contains("busy"), "{name}");
        cluster.fails = Some(("Service", failure(STARTING)));
        cluster.reconcile();
        let failed = "DeploymentFailed";
        assert_eq!(conditions(&cluster), expected([("False", failed), ("False", failed), ("True", failed)]), "{name}");
    }
}

/// Without the feature gate a Deployment, its PodDisruptionBudget and a Route are orphans.
fn with_vm_export() -> TestCluster {
    let mut cluster =
        TestCluster::new(&json!({"configuration": {"developerConfiguration": {"featureGates": ["VMExport"]}}}));
    cluster.cluster.routes = true;
    cluster
}

/// KubeVirt is complete and available, and a condition and an event report the failure.
fn check_deployed_with_problem(cluster: &mut TestCluster, failure: &Failure) {
    let mut problems = Vec::new();
    for _ in 0..5 {
        let events = cluster.reconcile().report.events.into_iter().filter(|event| event.kind == EventKind::Warning);
        problems.extend(events.map(|event| (event.reason, event.message)));
        cluster.roll_out();
    }
    let problem = "PartiallySynchronized";
    problems.dedup();
    assert_eq!(problems, [(problem, failure.message.clone())]);
    let done = ("False", "AllComponentsReady");
    assert_eq!(conditions(cluster), expected([("True", "AllComponentsReady"), done, done]));
    let status = cluster.status();
    assert_eq!(status["phase"], "Deployed");
    assert_eq!(status["observedGeneration"], json!(cluster.kubevirt.metadata.generation));
    let mut reported = status["conditions"].as_array().unwrap().iter();
    let reported = reported.find(|condition| condition["type"] == "Synchronized").unwrap();
    let expected = ("False", problem, failure.message.as_str());
    let part = |field: &str| reported[field].as_str().unwrap();
    assert_eq!((part("status"), part("reason"), part("message")), expected);
    let report = cluster.reconcile().report;
    assert!(report.events.is_empty() && !report.status.unwrap().differs(), "it is reported again");
}

#[test]
fn an_orphan_that_cannot_be_deleted_is_reported_and_blocks_nothing() {
    let mut cluster = with_vm_export();
    cluster.settle();
    let failure = Failure::forbidden(reason::PERMISSION_MISSING, "cannot delete Route kubevirt/virt-exportproxy");
    cluster.fails = Some(("Route", failure.clone()));
    cluster.object("Namespace", "kubevirt")["metadata"]["labels"] = json!({});
    cluster.edit(&json!({"customizeComponents": {"flags": {"api": {"v": "5"}}}}));
    check_deployed_with_problem(&mut cluster, &failure);
    let pod = &cluster.object("Deployment", "virt-api")["spec"]["template"]["spec"];
    assert_eq!(pod["containers"][0]["command"], json!(["virt-api", "--v", "5"]));
    assert!(cluster.has("Route", "virt-exportproxy"));
    assert!(!cluster.has("Deployment", "virt-exportproxy"), "other orphans are deleted");
    assert_eq!(cluster.object("Namespace", "kubevirt")["metadata"]["labels"].as_object().unwrap().len(), 1);
    cluster.fails = None;
    cluster.settle();
    assert!(!cluster.has("Route", "virt-exportproxy"));
    assert!(!cluster.status().to_string().contains("Synchronized"), "{}", cluster.status());
}

/// The patch of the namespace.
fn label_refused() -> Failure {
    Failure::forbidden(reason::PERMISSION_MISSING, "cannot patch Namespace kubevirt")
}

#[test]
fn a_namespace_that_cannot_be_labeled_is_reported_and_blocks_nothing() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.fails = Some(("Namespace", label_refused()));
    check_deployed_with_problem(&mut cluster, &label_refused());
    assert!(cluster.has("VirtualMachineClusterInstancetype", "u1.small"));
    cluster.fails = None;
    cluster.settle();
    let labels = cluster.object("Namespace", "kubevirt")["metadata"]["labels"].clone();
    assert_eq!(labels, json!({"a": "b", "openshift.io/cluster-monitoring": "true"}));
    assert!(!cluster.status().to_string().contains("Synchronized"), "{}", cluster.status());
}

#[test]
fn orphans_are_deleted_although_the_namespace_cannot_be_labeled() {
    let mut cluster = with_vm_export();
    cluster.fails = Some(("Namespace", label_refused()));
    cluster.reconcile_repeatedly();
    assert!(cluster.has("Deployment", "virt-exportproxy"));
    cluster.edit(&json!({}));
    cluster.reconcile_repeatedly();
    assert!(!cluster.has("Deployment", "virt-exportproxy"));
}

/// The status names the namespaces in which orphans are left.
#[test]
fn an_orphan_in_another_namespace_that_could_not_be_deleted_is_deleted_later() {
    let mut cluster = TestCluster::new(&json!({"serviceMonitorNamespace": "monitors"}));
    cluster.cluster.service_monitors = true;
    cluster.cluster.monitor_namespace = Some("monitoring".to_owned());
    cluster.settle();
    cluster.fails = Some(("ServiceMonitor", Failure::forbidden(reason::PERMISSION_MISSING, "cannot write")));
    cluster.edit(&json!({}));
    cluster.reconcile_repeatedly();
    cluster.restart();
    cluster.reconcile_repeatedly();
    assert_eq!(cluster.status()["phase"], "Deployed");
    cluster.fails = None;
    cluster.settle();
    let left = cluster.objects.keys().filter(|(kind, _)| kind == "ServiceMonitor").map(|(_, key)| key.namespace());
    assert_eq!(left.collect::<Vec<_>>(), [Some("monitoring")]);
}
