//! What is reported and done about certificates that pods serve.

use k8s_openapi::jiff::SignedDuration;
use serde_json::json;
use vitivirt_api::{ObjectKey, Stop};
use vitivirt_install::served::{ENDPOINTS, ServedCertificate, ServedState};

use super::{
    installed,
    pods::{condition, events, pod, pods},
    test_cluster::TestCluster,
};

/// An installation with two pods of virt-api. The first does not serve the certificate in its Secret.
fn with_outdated_pod(state: ServedState) -> TestCluster {
    let mut cluster = installed(&json!({}));
    let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    let key = ObjectKey::namespaced("kubevirt", "pod-node-1");
    cluster.put("Pod", key.clone(), json!({"kind": "Pod", "metadata": {}}), "replicaset-controller");
    let uid = cluster.object("Pod", "pod-node-1")["metadata"]["uid"].clone();
    let mut all = ["node-1", "node-2"].map(|node| pod("ReplicaSet", "virt-api-5d4f", node, &ready));
    all[0]["metadata"]["uid"] = uid.clone();
    cluster.pods = pods(&all, &[]);
    cluster.served.certificates.push(ServedCertificate {
        endpoint: &ENDPOINTS[0],
        pod: key,
        pod_uid: uid.as_str().unwrap().into(),
        state,
        stored_is_good: true,
        since: cluster.now,
        expires: cluster.now + SignedDuration::from_hours(4),
    });
    cluster
}

fn pass(cluster: &mut TestCluster, seconds: i64) {
    cluster.now += SignedDuration::from_secs(seconds);
}

#[test]
fn a_pod_with_an_expired_certificate_degrades_and_is_then_deleted() {
    let mut cluster = with_outdated_pod(ServedState::Expired);
    let early = cluster.reconcile();
    assert!(early.is_silent(), "the pod may still load its certificate");
    assert_eq!(early.report.requeue_after.map(|after| after.as_secs()), Some(120));
    pass(&mut cluster, 120);
    let reconcile = cluster.reconcile();
    assert_eq!(reconcile.writes(), [""; 0]);
    let (degraded, message) = condition(&cluster, "Degraded");
    assert!(
        degraded == "True" && message.contains("virt-api serves an expired certificate (pod pod-node-1)"),
        "{message}"
    );
    assert_eq!(condition(&cluster, "Available").0, "True");
    assert_eq!(events(&reconcile), [("CertificateRefused", message.as_str())]);
    pass(&mut cluster, 60);
    let reconcile = cluster.reconcile();
    assert_eq!(reconcile.writes(), ["Delete(Pod kubevirt/pod-node-1)"]);
    let [("PodDeleted", message)] = events(&reconcile)[..] else { panic!("{:?}", events(&reconcile)) };
    assert!(message.starts_with("Pod pod-node-1 was deleted because it serves an expired certificate"), "{message}");
    cluster.served.certificates.clear();
    cluster.reconcile();
    assert_eq!(condition(&cluster, "Degraded"), ("False".to_owned(), "All components are ready.".to_owned()));
}

/// The deletion does not wait for components that do not start.
#[test]
fn an_installation_that_waits_still_deletes_the_pod() {
    let mut cluster = with_outdated_pod(ServedState::Untrusted);
    cluster.object("DaemonSet", "virt-handler")["status"]["numberReady"] = json!(1);
    pass(&mut cluster, 200);
    let reconcile = cluster.reconcile();
    assert_eq!(reconcile.writes(), ["Delete(Pod kubevirt/pod-node-1)"]);
    assert!(matches!(reconcile.outcome.stop, Stop::Waiting { .. }));
}

#[test]
fn a_certificate_that_is_only_old_is_named() {
    let mut cluster = with_outdated_pod(ServedState::NotReloaded);
    pass(&mut cluster, 1000);
    let reconcile = cluster.reconcile();
    assert_eq!(reconcile.writes(), [""; 0]);
    let (degraded, message) = condition(&cluster, "Degraded");
    assert_eq!(degraded, "False");
    assert!(
        message.starts_with("All components are ready. virt-api does not serve the certificate in Secret"),
        "{message}"
    );
    assert_eq!(events(&reconcile).first().map(|(reason, _)| *reason), Some("CertificateNotLoaded"));
    assert!(cluster.reconcile().is_silent());
}

#[test]
fn an_api_that_the_api_server_does_not_reach_degrades() {
    let mut cluster = installed(&json!({}));
    let condition_of_api = json!({
        "type": "Available", "status": "False", "reason": "FailedDiscoveryCheck",
        "message": "failing or missing response from https://10.96.1.2:443/apis: x509: certificate has expired",
        "lastTransitionTime": cluster.now.to_string(),
    });
    cluster.object("APIService", "v1.subresources.kubevirt.io")["status"] = json!({"conditions": [condition_of_api]});
    let early = cluster.reconcile();
    assert!(early.is_silent() && early.report.requeue_after.is_some());
    pass(&mut cluster, 120);
    cluster.reconcile();
    let (degraded, message) = condition(&cluster, "Degraded");
    assert_eq!(degraded, "True");
    assert_eq!(
        message,
        "APIService v1.subresources.kubevirt.io is not available: failing or missing response from \
         https://10.96.1.2:443/apis: x509: certificate has expired"
    );
}
