//! What conditions and events say about pods that do not start.

use std::{collections::BTreeSet, sync::Arc};

use serde_json::{Value, json};
use vitivirt_api::{ObjectKey, Stop};
use vitivirt_install::{
    NodeState,
    pods::{Pod, Pods},
};

use super::{
    installed,
    test_cluster::{Reconcile, TestCluster},
};

pub(super) fn pods(pods: &[Value], dead_nodes: &[&str]) -> Pods {
    let pods = pods.iter().map(|pod| {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let pod = Pod::new(serde_json::from_value(pod.clone()).unwrap());
        (ObjectKey::namespaced("kubevirt", name), Arc::new(pod))
    });
    let dead_nodes: BTreeSet<String> = dead_nodes.iter().map(|node| (*node).to_owned()).collect();
    let mut pods: Pods = pods.collect();
    pods.dead_nodes = dead_nodes;
    pods
}

pub(super) fn pod(kind: &str, owner: &str, node: &str, status: &Value) -> Value {
    let owner = json!({"apiVersion": "v1", "kind": kind, "name": owner, "uid": "o", "controller": true});
    json!({
        "metadata": {"name": format!("pod-{node}"), "uid": node, "ownerReferences": [owner]},
        "spec": {"nodeName": node, "containers": []},
        "status": status,
    })
}

pub(super) fn image_not_pulled() -> Value {
    let state = json!({"waiting": {"reason": "ErrImagePull", "message": "not found"}});
    json!({"phase": "Pending", "containerStatuses": [
        {"name": "c", "image": "example.org/x:bad", "imageID": "", "ready": false, "restartCount": 0, "state": state},
    ]})
}

pub(super) fn condition(cluster: &TestCluster, kind: &str) -> (String, String) {
    let status = cluster.status();
    let conditions = status["conditions"].as_array().unwrap();
    let condition = conditions.iter().find(|condition| condition["type"] == kind).unwrap();
    (condition["status"].as_str().unwrap().to_owned(), condition["message"].as_str().unwrap().to_owned())
}

pub(super) fn events(reconcile: &Reconcile) -> Vec<(&'static str, &str)> {
    reconcile.report.events.iter().map(|event| (event.reason, event.message.as_str())).collect()
}

#[test]
fn pods_that_fail_are_named_at_once_in_a_condition_and_an_event() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.rolls_out = false;
    cluster.reconcile();
    cluster.pods = pods(&[pod("ReplicaSet", "virt-api-5d4f", "node-1", &image_not_pulled())], &[]);
    let reconcile = cluster.reconcile();
    let expected = "virt-api: image example.org/x:bad cannot be pulled: not found (pod pod-node-1 on node node-1); check \
                    the image and spec.imagePullSecrets";
    assert_eq!(events(&reconcile), [("PodsFail", expected)]);
    let (progressing, message) = condition(&cluster, "Progressing");
    assert!(progressing == "True" && message.ends_with(expected), "{message}");
    assert_eq!(condition(&cluster, "Degraded").0, "False");
    assert!(cluster.reconcile().report.events.is_empty(), "the event is repeated");
}

#[test]
fn pods_that_only_start_are_named_after_a_while() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.rolls_out = false;
    cluster.reconcile();
    let starting = json!({"phase": "Pending"});
    cluster.pods = pods(&[pod("ReplicaSet", "virt-api-5d4f", "node-1", &starting)], &[]);
    assert!(cluster.reconcile().report.events.is_empty());
    assert!(!condition(&cluster, "Progressing").1.contains("virt-api"));
    cluster.now += k8s_openapi::jiff::SignedDuration::from_secs(30);
    assert!(cluster.reconcile().report.events.is_empty(), "a slow start is not a warning");
    let (_, message) = condition(&cluster, "Progressing");
    assert!(message.contains("virt-api: not started yet (pod pod-node-1 on node node-1); see its events"), "{message}");
}

#[test]
fn a_dead_node_is_named_and_not_awaited() {
    let mut cluster = installed(&json!({}));
    cluster.object("DaemonSet", "virt-handler")["status"]["numberReady"] = json!(1);
    let unknown = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]});
    let unready = [pod("DaemonSet", "virt-handler", "node-2", &unknown)];
    cluster.pods = pods(&unready, &[]);
    assert!(matches!(cluster.reconcile().outcome.stop, Stop::Waiting { .. }), "the node may be ready");
    cluster.pods = pods(&unready, &["node-2"]);
    let reconcile = cluster.reconcile();
    assert_eq!(reconcile.outcome.stop, Stop::Done);
    let expected = "Node node-2 is not ready: virt-handler does not run there, and the operator does not wait for it";
    assert_eq!(events(&reconcile), [("NodeNotReady", expected)]);
    assert_eq!(condition(&cluster, "Available"), ("True".to_owned(), format!("All components are ready. {expected}")));
    assert!(reconcile.report.requeue_after.is_some(), "no event reports that the node is ready again");
    let repeated = cluster.reconcile();
    assert!(repeated.is_silent());
    cluster.pods = pods(&[], &[]);
    cluster.roll_out();
    cluster.reconcile();
    assert_eq!(condition(&cluster, "Available").1, "All components are ready.");
}

/// A dead node as the node lifecycle controller leaves it.
pub(super) fn tainted_node(name: &str) -> NodeState {
    let taint = |effect: &str| json!({"key": "node.kubernetes.io/unreachable", "effect": effect});
    let node = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/os": "linux"}},
        "spec": {"taints": [taint("NoSchedule"), taint("NoExecute")]},
        "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
    });
    NodeState::new(serde_json::from_value(node).unwrap())
}

#[test]
fn a_dead_node_that_is_tainted_is_named_and_not_subtracted_from_a_status_that_does_not_count_it() {
    let mut cluster = installed(&json!({}));
    let unknown = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]});
    cluster.pods = pods(&[pod("DaemonSet", "virt-handler", "node-2", &unknown)], &[]);
    cluster.dead_nodes = vec![tainted_node("node-2")];
    let counts = |cluster: &mut TestCluster, numbers: [i64; 3]| {
        let status = &mut cluster.object("DaemonSet", "virt-handler")["status"];
        for (field, number) in
            ["desiredNumberScheduled", "updatedNumberScheduled", "numberReady"].into_iter().zip(numbers)
        {
            status[field] = json!(number);
        }
        cluster.reconcile().outcome.stop
    };
    assert_eq!(counts(&mut cluster, [1, 1, 1]), Stop::Done, "one of two nodes is dead");
    assert!(condition(&cluster, "Available").1.contains("Node node-2 is not ready"));
    // One of the two other nodes still has the old version.
    assert!(matches!(counts(&mut cluster, [2, 1, 2]), Stop::Waiting { .. }));
    assert_eq!(counts(&mut cluster, [2, 2, 2]), Stop::Done);
    let stop = counts(&mut cluster, [0, 0, 0]);
    let waits = matches!(&stop, Stop::Waiting { wait, .. } if wait.message.contains("none of its nodes are ready"));
    assert!(waits, "{stop:?}");
}

#[test]
fn an_installation_without_any_ready_node_waits() {
    let mut cluster = installed(&json!({}));
    cluster.object("DaemonSet", "virt-handler")["status"]["numberReady"] = json!(0);
    let unknown = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]});
    let nodes = ["node-1", "node-2"];
    cluster.pods = pods(&nodes.map(|node| pod("DaemonSet", "virt-handler", node, &unknown)), &nodes);
    let reconcile = cluster.reconcile();
    assert!(
        matches!(&reconcile.outcome.stop, Stop::Waiting { wait, .. } if wait.message.contains("none of its nodes are ready")),
        "{:?}",
        reconcile.outcome.stop
    );
}

#[test]
fn the_pod_of_the_job_for_another_release_is_named() {
    let mut cluster = TestCluster::new(&json!({"imageTag": "v1.9.0"}));
    cluster.reconcile();
    let job = cluster.objects.keys().find(|(kind, _)| kind == "Job").unwrap().1.name().to_owned();
    cluster.pods = pods(&[pod("Job", &job, "node-1", &image_not_pulled())], &[]);
    let reconcile = cluster.reconcile();
    assert_eq!(events(&reconcile).first().map(|(reason, _)| *reason), Some("PodsFail"));
    let (_, message) = condition(&cluster, "Progressing");
    assert!(message.contains(&job) && message.contains("image example.org/x:bad cannot be pulled"), "{message}");
}
