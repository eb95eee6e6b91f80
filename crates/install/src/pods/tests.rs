use serde_json::{Value, json};

use super::*;

const NOW: i64 = 1_800_000_000;

fn now() -> Timestamp {
    Timestamp::from_second(NOW).unwrap()
}

fn ago(seconds: i64) -> Value {
    json!(Timestamp::from_second(NOW - seconds).unwrap().to_string())
}

/// A pod of the DaemonSet virt-handler on a node with the same number.
fn handler(number: usize, status: &Value) -> (ObjectKey, Arc<Pod>) {
    pod("DaemonSet", "virt-handler", number, "1", status)
}

fn pod(kind: &str, owner: &str, number: usize, revision: &str, status: &Value) -> (ObjectKey, Arc<Pod>) {
    let name = format!("{owner}-{number}");
    let unscheduled = status["conditions"][0]["type"] == "PodScheduled";
    let pod = json!({
        "metadata": {
            "name": name, "namespace": "kubevirt", "uid": name, "creationTimestamp": ago(100),
            "labels": {"controller-revision-hash": revision},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": kind, "name": owner, "uid": "o", "controller": true}],
        },
        "spec": {"nodeName": (!unscheduled).then(|| format!("node-{number}")), "containers": []},
        "status": status,
    });
    (ObjectKey::namespaced("kubevirt", &name), Arc::new(Pod::new(serde_json::from_value(pod).unwrap())))
}

fn container(state: &Value, last: &Value, restarts: u32) -> Value {
    json!({"name": "virt-handler", "image": "example.org/virt-handler:bad", "imageID": "", "ready": false,
        "restartCount": restarts, "state": state, "lastState": last})
}

fn running(container: &Value) -> Value {
    json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": ago(5)}],
        "containerStatuses": [container]})
}

fn waiting(reason: &str, message: &str) -> Value {
    running(&container(&json!({"waiting": {"reason": reason, "message": message}}), &json!({}), 0))
}

fn ready() -> Value {
    json!({"phase": "Running", "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": ago(90)}],
        "containerStatuses": [{"name": "virt-handler", "image": "i", "imageID": "", "ready": true, "restartCount": 0}]})
}

/// Ready=False, although every container is ready.
fn marked_by_the_node_lifecycle_controller() -> Value {
    let mut status = ready();
    status["conditions"][0] = json!({"type": "Ready", "status": "False", "lastTransitionTime": ago(1)});
    status
}

fn handlers(statuses: &[Value]) -> Pods {
    statuses.iter().enumerate().map(|(number, status)| handler(number, status)).collect()
}

fn problems(statuses: &[Value]) -> Problems {
    handlers(statuses).problems(Kind::DaemonSet, "virt-handler")
}

#[test]
fn every_reason_of_the_kubelet_and_the_scheduler_becomes_a_sentence() {
    let exited = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": "panic: no devices\n"}});
    let killed = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
    let crash_loop = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 2m40s restarting"}});
    let mut init = waiting("PodInitializing", "");
    init["initContainerStatuses"] = json!([container(&crash_loop, &exited, 3)]);
    init["initContainerStatuses"][0]["name"] = json!("virt-launcher");
    let no_node = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
        "reason": "Unschedulable", "message": "0/2 nodes are available: 2 node(s) didn't match Pod's node \
         affinity/selector. preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."}]});
    let config = "secret \"kubevirt-virt-api-certs\" not found";
    let pull = "Back-off pulling image \"x\": ErrImagePull: rpc error: code = NotFound desc = manifest unknown";
    let on_node = "(pod virt-handler-0 on node node-0)";
    for (status, certain, expected) in [
        (
            waiting("ImagePullBackOff", pull),
            true,
            format!(
                "image example.org/virt-handler:bad cannot be pulled: manifest unknown {on_node}; check the image and \
                 spec.imagePullSecrets"
            ),
        ),
        (
            running(&container(&crash_loop, &exited, 3)),
            true,
            format!(
                "container virt-handler exits with code 1: panic: no devices {on_node}; see the log of the container"
            ),
        ),
        (
            running(&container(&crash_loop, &killed, 3)),
            true,
            format!("container virt-handler exits with code 137 (OOMKilled) {on_node}; see the log of the container"),
        ),
        (
            init,
            true,
            format!(
                "init container virt-launcher exits with code 1: panic: no devices {on_node}; see the log of the \
                 container"
            ),
        ),
        (
            no_node,
            true,
            "cannot be scheduled: 0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector (pod \
             virt-handler-0)"
                .to_owned(),
        ),
        (
            waiting("CreateContainerConfigError", config),
            true,
            format!("container virt-handler cannot be started: {config} {on_node}"),
        ),
        (waiting("ContainerCreating", ""), false, format!("not started yet {on_node}; see its events")),
        (
            running(&container(&json!({"running": {}}), &json!({}), 0)),
            false,
            format!("running, but not ready {on_node}; see the readiness probe in its events"),
        ),
    ] {
        let found = problems(&[status]);
        assert_eq!(found.sentences, [expected]);
        assert_eq!(found.certain, certain, "{:?}", found.sentences);
    }
    assert_eq!(problems(&[ready()]), Problems::default());
}

/// The kubelet changes the state of the container many times, and counts each restart.
#[test]
fn a_crash_loop_has_the_same_text_in_all_its_states() {
    let exited = json!({"terminated": {"exitCode": 1, "reason": "Error",
        "message": "{\"level\":\"fatal\",\"msg\":\"failed\",\"timestamp\":\"2026-11-16T05:22:01Z\"}"}});
    let states = [
        running(&container(&exited, &exited, 2)),
        running(&container(&json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}), &exited, 2)),
        running(&container(&json!({"running": {}}), &exited, 3)),
        running(&container(
            &json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 1m20s"}}),
            &exited,
            3,
        )),
    ];
    let texts: BTreeSet<String> = states.map(|state| problems(&[state]).text()).into();
    assert_eq!(texts.len(), 1, "{texts:?}");
}

#[test]
fn an_image_that_cannot_be_pulled_has_the_same_text_between_attempts() {
    let error = "rpc error: code = NotFound desc = failed to pull: manifest unknown";
    let texts: BTreeSet<String> = [
        waiting("ErrImagePull", error),
        waiting("ImagePullBackOff", &format!("Back-off pulling image \"x\": ErrImagePull: {error}")),
    ]
    .map(|state| problems(&[state]).text())
    .into();
    assert_eq!(texts.len(), 1, "{texts:?}");
}

#[test]
fn many_pods_with_one_problem_are_one_sentence_with_a_rounded_number() {
    let failing = waiting("CreateContainerConfigError", "secret \"x\" not found");
    let text = |count: usize| problems(&vec![failing.clone(); count]).text();
    assert!(text(2).contains(", 1 more pod)"), "{}", text(2));
    assert!(text(4).contains(", 3 more pods)"), "{}", text(4));
    assert!(text(101).contains(", at least 100 more pods)"), "{}", text(101));
    assert_eq!(text(101), text(160));
}

#[test]
fn the_name_of_a_deployment_follows_from_its_replica_set() {
    let (_, pod) = pod("ReplicaSet", "virt-api-7d9c5b8f6d", 1, "", &ready());
    assert_eq!(pod.workload, Some((Kind::Deployment, "virt-api".into())));
    assert_eq!(pod.address, Some("10.0.0.1".parse().unwrap()));
}

#[test]
fn only_nodes_of_pods_that_are_not_ready_for_a_while_are_checked() {
    let young = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False",
        "lastTransitionTime": ago(5)}], "containerStatuses": [container(&json!({"running": {}}), &json!({}), 0)]});
    let mut old = young.clone();
    old["conditions"][0]["lastTransitionTime"] = ago(60);
    let pods = handlers(&[ready(), young, old, marked_by_the_node_lifecycle_controller()]);
    let nodes: Vec<String> = pods.nodes_to_check(now(), |_| None).into_keys().collect();
    assert_eq!(nodes, ["node-2", "node-3"]);
}

#[test]
fn the_digest_of_a_node_changes_when_its_kubelet_reports_something() {
    let digest = |status: Value| handlers(&[status]).nodes_to_check(now(), |_| None).into_values().next().unwrap();
    let mut status = waiting("ContainerCreating", "");
    status["conditions"][0]["lastTransitionTime"] = ago(60);
    let before = digest(status.clone());
    assert_eq!(digest(status.clone()), before);
    let counts = |nodes| handlers(&[status.clone()]).nodes_to_check(now(), |_| Some(nodes)).into_values().next();
    assert_ne!(counts(1), counts(2), "a taint of the node may be the reason");
    status["containerStatuses"][0]["state"] = json!({"running": {}});
    assert_ne!(digest(status), before);
}

fn rollout(pods: i64, updated: i64, ready: i64) -> Rollout {
    Rollout { current: true, pods, updated, ready, every_node: true }
}

#[test]
fn a_daemon_set_is_complete_without_nodes_that_are_not_ready() {
    let mut pods = handlers(&[ready(), ready(), marked_by_the_node_lifecycle_controller()]);
    let is_complete = |pods: &Pods, counts: Rollout| pods.rollout_on_ready_nodes("virt-handler", counts).is_complete();
    assert!(!is_complete(&pods, rollout(3, 3, 2)), "the node is not known to be dead");
    pods.dead_nodes.insert("node-2".to_owned());
    assert!(is_complete(&pods, rollout(3, 3, 2)));
    assert!(!is_complete(&pods, rollout(3, 3, 1)), "another pod is not ready");
    assert_eq!(pods.unreachable_nodes("virt-handler").into_iter().collect::<Vec<_>>(), ["node-2"]);
    pods.dead_nodes.insert("node-0".to_owned());
    assert!(!is_complete(&pods, rollout(3, 3, 1)), "the pod of the other dead node counts as ready");
}

/// The node lifecycle controller taints a dead node, and the status of the DaemonSet does not count it any more.
#[test]
fn a_dead_node_that_the_daemon_set_does_not_count_is_not_subtracted() {
    let mut pods = handlers(&[ready(), marked_by_the_node_lifecycle_controller()]);
    pods.dead_nodes.insert("node-1".to_owned());
    pods.set_uncounted_nodes("virt-handler", BTreeSet::from(["node-1".to_owned()]));
    let is_complete = |pods: &Pods, counts: Rollout| pods.rollout_on_ready_nodes("virt-handler", counts).is_complete();
    assert!(is_complete(&pods, rollout(1, 1, 1)), "one of two nodes is dead");
    let mut pods = handlers(&[ready(), ready(), marked_by_the_node_lifecycle_controller()]);
    pods.dead_nodes.insert("node-2".to_owned());
    pods.set_uncounted_nodes("virt-handler", BTreeSet::from(["node-2".to_owned()]));
    assert!(!is_complete(&pods, rollout(2, 1, 2)), "a node that is ready still has the old version");
    assert!(is_complete(&pods, rollout(2, 2, 2)));
    assert_eq!(pods.unreachable_nodes("virt-handler").into_iter().collect::<Vec<_>>(), ["node-2"], "it is reported");
}

/// The dead node does not stand in for a live node that still has the old version.
#[test]
fn an_old_pod_on_a_ready_node_is_awaited() {
    let old = |number: usize, status: &Value| pod("DaemonSet", "virt-handler", number, "0", status);
    let dead = marked_by_the_node_lifecycle_controller();
    let on = |pods: Vec<(ObjectKey, Arc<Pod>)>| {
        let mut pods = Pods::from_iter(pods);
        pods.dead_nodes.insert("node-1".to_owned());
        pods
    };
    let is_complete =
        |pods: &Pods, updated| pods.rollout_on_ready_nodes("virt-handler", rollout(3, updated, 2)).is_complete();
    // The pod of the dead node is old, and all others are updated.
    assert!(is_complete(&on(vec![handler(0, &ready()), old(1, &dead), handler(2, &ready())]), 2));
    // The pod of the dead node is updated, and another one is old.
    assert!(!is_complete(&on(vec![old(0, &ready()), handler(1, &dead), handler(2, &ready())]), 2));
    // The controller has not created a pod yet.
    assert!(!is_complete(&on(vec![old(0, &ready()), old(1, &dead), old(2, &ready())]), 0));
}

#[test]
fn a_list_of_names_is_short() {
    let names = ["a", "b", "c", "d", "e"];
    assert_eq!(list(names[..2].iter().copied()), "a, b");
    assert_eq!(list(names[..4].iter().copied()), "a, b, c and 1 more");
    assert_eq!(list(names.iter().copied()), "a, b, c and 2 more");
}
