//! Known faults of upstream virt-operator, by their number in `docs/upstream-faults.md`. Each test fails if this operator
//! has the fault. Those about upgrades are in `upgrades`.

use serde_json::{Value, json};
use vitivirt_api::{Failure, ObjectKey, Stop, reason};
use vitivirt_install::{DeploymentConfig, InstallStrategy, config_map};

use super::{
    installed,
    pods::{condition, events, image_not_pulled, pod, pods},
    test_cluster::{Reconcile, TestCluster},
    upgrades::environment,
    variant,
};

fn gates(gates: &[&str]) -> Value {
    json!({"configuration": {"developerConfiguration": {"featureGates": gates}}})
}

/// The images of all containers of all workloads.
fn images(cluster: &TestCluster) -> Vec<String> {
    let workloads =
        cluster.objects.iter().filter(|((kind, _), _)| ["Deployment", "DaemonSet"].contains(&kind.as_str()));
    let containers = workloads.flat_map(|(_, object)| {
        let pod = &object["spec"]["template"]["spec"];
        ["initContainers", "containers"].into_iter().flat_map(|list| pod[list].as_array().into_iter().flatten())
    });
    containers.map(|container| container["image"].as_str().unwrap().to_owned()).collect()
}

fn writes(cluster: &mut TestCluster) -> Vec<String> {
    cluster.settle().iter().flat_map(Reconcile::writes).collect()
}

#[test]
fn fault_2_template_images_are_used_only_if_the_gate_asks_for_them() {
    let of_template = |cluster: &TestCluster| images(cluster).iter().filter(|image| image.contains("template")).count();
    let mut cluster = installed(&json!({}));
    assert_eq!(of_template(&cluster), 0);
    cluster.edit(&gates(&["Template"]));
    cluster.settle();
    assert_eq!(of_template(&cluster), 2);
    cluster.edit(&json!({}));
    cluster.settle();
    assert_eq!(of_template(&cluster), 0);
}

#[test]
fn fault_2_images_that_cannot_be_pulled_do_not_stop_the_rest() {
    let start_others = |cluster: &mut TestCluster| {
        cluster.reconcile();
        cluster.roll_out();
        for name in ["virt-template-apiserver", "virt-template-controller"] {
            if cluster.has("Deployment", name) {
                cluster.object("Deployment", name)["status"]["readyReplicas"] = json!(0);
            }
        }
    };
    let mut cluster = TestCluster::new(&gates(&["Template"]));
    cluster.pods = pods(&[pod("ReplicaSet", "virt-template-apiserver-5d4f", "node-1", &image_not_pulled())], &[]);
    (0..5).for_each(|_| start_others(&mut cluster));
    assert!(cluster.has("VirtualMachineClusterInstancetype", "u1.small"), "instancetypes are installed");
    let blocking = cluster.objects.keys().filter(|(_, key)| key.name().starts_with("virt-operator-tmp-webhook"));
    assert_eq!(blocking.count(), 0, "VMs can be created");
    let (progressing, message) = condition(&cluster, "Progressing");
    assert!(progressing == "True" && message.contains("virt-template-apiserver: image example.org/x:bad"), "{message}");
    // An edit and an upgrade reach the other components.
    let mut spec = gates(&["Template"]);
    spec["customizeComponents"] = json!({"flags": {"controller": {"v": "4"}}});
    cluster.edit(&spec);
    let edited = cluster.reconcile().writes();
    assert!(edited.contains(&"Patch(Deployment kubevirt/virt-controller)".to_owned()), "{edited:?}");
    cluster.environment = environment("v1.8.5", &[]);
    cluster.restart();
    (0..8).for_each(|_| start_others(&mut cluster));
    let image = cluster.object("Deployment", "virt-api")["spec"]["template"]["spec"]["containers"][0]["image"].clone();
    assert_eq!(image, "quay.io/kubevirt/virt-api:v1.8.5");
}

#[test]
fn fault_5_json_patches_are_applied_once() {
    let patch = json!([
        {"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--kubelet-pods-dir"},
        {"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "/data/pods"},
        {"op": "add", "path": "/spec/template/spec/initContainers/1", "value": {"name": "more", "image": "example.org/x:1"}},
    ]);
    let spec = |eviction: &str| {
        json!({
            "customizeComponents": {"patches": [{"resourceType": "DaemonSet", "resourceName": "virt-handler",
                "type": "json", "patch": patch.to_string()}]},
            "configuration": {"evictionStrategy": eviction},
        })
    };
    let mut cluster = installed(&spec("None"));
    let pod =
        |cluster: &mut TestCluster| cluster.object("DaemonSet", "virt-handler")["spec"]["template"]["spec"].clone();
    let first = pod(&mut cluster);
    let patched = first["containers"][0]["args"].as_array().unwrap();
    assert_eq!(patched.iter().filter(|argument| *argument == "--kubelet-pods-dir").count(), 1);
    assert_eq!(first["initContainers"].as_array().map(Vec::len), Some(2));
    for eviction in ["LiveMigrate", "External", "None"] {
        cluster.edit(&spec(eviction));
        assert_eq!(writes(&mut cluster), [""; 0], "{eviction}");
        cluster.restart();
        assert!(cluster.reconcile().is_silent(), "{eviction}");
        assert_eq!(pod(&mut cluster), first);
    }
}

#[test]
fn fault_6_flags_replace_only_what_they_name() {
    const CONTAINER: &str = "/spec/template/spec/containers/0";
    let mut plain = installed(&json!({}));
    let flags = json!({"handler": {"kubelet-pods-dir": "/data0/kubelet/pods"}});
    let mut cluster = installed(&json!({"customizeComponents": {"flags": flags}}));
    for (kind, name) in [("Deployment", "virt-api"), ("Deployment", "virt-controller"), ("DaemonSet", "virt-handler")] {
        let (before, mut after) = (plain.object(kind, name).clone(), cluster.object(kind, name).clone());
        let arguments = before.pointer(CONTAINER).unwrap()["args"].as_array().unwrap();
        assert!(arguments.contains(&json!("--port")), "{name}: {arguments:?}");
        if name == "virt-handler" {
            let command = &mut after.pointer_mut(CONTAINER).unwrap()["command"];
            assert_eq!(*command, json!(["virt-handler", "--kubelet-pods-dir", "/data0/kubelet/pods"]));
            *command = json!(["virt-handler"]);
        }
        assert_eq!(after["spec"]["template"]["spec"], before["spec"]["template"]["spec"], "{name}");
    }
}

fn unschedulable() -> Value {
    json!({"phase": "Pending", "conditions": [{
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector. preemption: 0/3 nodes \
                    are available: 3 Preemption is not helpful for scheduling.",
    }]})
}

#[test]
fn fault_9_a_cluster_without_control_plane_nodes_is_reported_with_the_setting_that_helps() {
    let remedy = "spec.infra.nodePlacement is not set, so these pods run only on nodes with the label \
                  node-role.kubernetes.io/control-plane or node-role.kubernetes.io/master; to use any node, set it to {}";
    let reported = |spec: &Value| {
        let mut cluster = TestCluster::new(spec);
        cluster.rolls_out = false;
        cluster.reconcile();
        let waiting = ["virt-api-5d4f", "virt-controller-5d4f"];
        cluster.pods = pods(&waiting.map(|owner| pod("ReplicaSet", owner, "", &unschedulable())), &[]);
        let reconcile = cluster.reconcile();
        let (_, message) = condition(&cluster, "Progressing");
        assert!(message.contains("virt-api: cannot be scheduled: 0/3 nodes are available"), "{message}");
        assert_eq!(events(&reconcile).first().map(|(reason, _)| *reason), Some("PodsFail"));
        message
    };
    let message = reported(&json!({}));
    assert_eq!(message.matches(remedy).count(), 1, "{message}");
    let chosen = reported(&json!({"infra": {"nodePlacement": {"nodeSelector": {"a": "b"}}}}));
    assert!(!chosen.contains("spec.infra.nodePlacement is not set"), "{chosen}");
    // The setting removes what keeps the pods from being scheduled.
    let mut anywhere = installed(&json!({"infra": {"nodePlacement": {}}}));
    for name in ["virt-api", "virt-controller"] {
        let affinity = anywhere.object("Deployment", name)["spec"]["template"]["spec"]["affinity"].clone();
        assert_eq!(affinity["nodeAffinity"], Value::Null, "{name}");
    }
}

#[test]
fn fault_9_the_job_for_another_release_is_reported_too() {
    let mut cluster = TestCluster::new(&json!({"imageTag": "v1.7.0"}));
    cluster.reconcile();
    let job = cluster.objects.keys().find(|(kind, _)| kind == "Job").unwrap().1.name().to_owned();
    cluster.pods = pods(&[pod("Job", &job, "", &unschedulable())], &[]);
    cluster.reconcile();
    let (_, message) = condition(&cluster, "Progressing");
    assert!(message.contains("set it to {}"), "{message}");
}

/// Upstream virt-operator rewrites all of them whenever the generation of the resource changes.
#[test]
fn fault_14_instancetypes_are_written_only_if_their_content_changes() {
    let of_instancetypes = |writes: Vec<String>| {
        let mut targets: Vec<String> =
            writes.into_iter().filter(|write| write.contains("VirtualMachineCluster")).collect();
        targets.sort_unstable();
        targets
    };
    let mut cluster = TestCluster::new(&json!({}));
    let mut created = of_instancetypes(writes(&mut cluster));
    let count = created.len();
    created.dedup();
    assert!(count > 100 && created.len() == count, "each is created once");
    for spec in [json!({"infra": {"replicas": 3}}), variant("placement"), gates(&["VMExport"]), json!({})] {
        cluster.edit(&spec);
        assert_eq!(of_instancetypes(writes(&mut cluster)), [""; 0], "{spec}");
    }
    // Their annotations contain the version.
    cluster.environment = environment("v1.8.5", &[]);
    cluster.restart();
    let upgraded = of_instancetypes(writes(&mut cluster));
    assert_eq!(upgraded.len(), count);
    assert!(upgraded.windows(2).all(|pair| pair[0] != pair[1]), "each is written once");
}

/// Upstream virt-operator checks once, when it dumps its install strategy.
#[test]
fn fault_18_the_service_monitor_follows_the_service_account() {
    let mut cluster = TestCluster::new(&json!({}));
    (cluster.cluster.service_monitors, cluster.cluster.prometheus_rules) = (true, true);
    cluster.settle();
    let rules = "prometheus-kubevirt-rules";
    let monitored = |cluster: &TestCluster| {
        [
            ("ServiceMonitor", rules),
            ("PrometheusRule", rules),
            ("Role", "kubevirt-monitoring"),
            ("RoleBinding", "kubevirt-monitoring"),
        ]
        .map(|(kind, name)| cluster.has(kind, name))
    };
    assert_eq!(monitored(&cluster), [false; 4]);
    cluster.cluster.monitor_namespace = Some("monitoring".to_owned());
    assert_eq!(writes(&mut cluster).len(), 4);
    assert_eq!(monitored(&cluster), [true; 4]);
    cluster.cluster.monitor_namespace = None;
    cluster.settle();
    assert_eq!(monitored(&cluster), [false; 4]);
}

#[test]
fn fault_21_one_replica_on_several_nodes_is_reported() {
    let warning = "spec.infra.replicas: 1 is too few for a cluster with several nodes";
    let reported = |nodes: usize, spec: &Value| {
        let mut cluster = TestCluster::new(spec);
        cluster.cluster.schedulable_nodes = nodes;
        let events = cluster.settle().into_iter().flat_map(|reconcile| reconcile.report.events);
        events.filter(|event| event.message.contains(warning)).map(|event| event.reason).collect::<Vec<_>>()
    };
    let one = json!({"infra": {"replicas": 1}});
    assert_eq!(reported(2, &one), ["ConfigurationWarning"]);
    // virt-handler has just started and has not marked its nodes, but the DaemonSet has two.
    assert_eq!(reported(0, &one), ["ConfigurationWarning"]);
    assert_eq!(reported(2, &json!({"infra": {"replicas": 2}})), [""; 0]);
    assert_eq!(reported(2, &json!({})), [""; 0]);
}

/// Upstream virt-operator runs the Job with its own permissions, which are those of a cluster administrator.
#[test]
fn fault_22_the_job_for_another_release_may_only_dump_its_strategy() {
    let mut cluster = TestCluster::new(&json!({"imageTag": "v1.7.0", "monitorAccount": "prometheus"}));
    cluster.reconcile();
    assert!(cluster.kubevirt.metadata.finalizers.is_some(), "something would be left behind");
    let job = cluster.objects.keys().find(|(kind, _)| kind == "Job").unwrap().1.name().to_owned();
    let account = cluster.object("Job", &job)["spec"]["template"]["spec"]["serviceAccountName"].clone();
    assert_eq!(account, job.as_str());
    let subject = json!([{"kind": "ServiceAccount", "name": account, "namespace": "kubevirt"}]);
    let bound =
        cluster.objects.iter().filter(|((kind, _), object)| kind.ends_with("Binding") && object["subjects"] == subject);
    let bound: Vec<(Value, Value)> =
        bound.map(|(_, object)| (object["roleRef"]["kind"].clone(), object["roleRef"]["name"].clone())).collect();
    assert_eq!(bound, [(json!("ClusterRole"), account.clone()), (json!("Role"), account)]);
    let rule = |resource: &str, verb: &str| json!({"apiGroups": [""], "resources": [resource], "verbs": [verb]});
    let named = |mut rule: Value, names: &[&str]| {
        rule["resourceNames"] = json!(names);
        rule
    };
    assert_eq!(cluster.object("Role", &job)["rules"], json!([rule("configmaps", "create")]));
    assert_eq!(
        cluster.object("ClusterRole", &job)["rules"],
        json!([
            named(rule("namespaces", "get"), &["openshift-monitoring", "monitoring"]),
            named(rule("serviceaccounts", "get"), &["prometheus"]),
        ])
    );
    // They exist as long as the Job.
    let config = DeploymentConfig::new(&cluster.kubevirt, &cluster.environment);
    let strategy = InstallStrategy::generate(&config, None, None).unwrap();
    let map = serde_json::to_value(config_map(&config, &strategy).unwrap()).unwrap();
    cluster.put("ConfigMap", config.strategy_key(), map, "other");
    let ended = json!([{"type": "Complete", "status": "True", "lastTransitionTime": cluster.now.to_string()}]);
    cluster.object("Job", &job)["status"] = json!({"conditions": ended});
    cluster.settle();
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.7.0");
    assert_eq!(cluster.objects.keys().filter(|(_, key)| key.name() == job).count(), 0);
}

#[test]
fn fault_23_a_patch_of_max_unavailable_is_reported() {
    let warnings = |settings: Value| {
        let patch = json!({"spec": {"updateStrategy": settings}}).to_string();
        let patch =
            json!({"resourceType": "DaemonSet", "resourceName": "virt-handler", "type": "merge", "patch": patch});
        let mut cluster = installed(&json!({"customizeComponents": {"patches": [patch]}}));
        let observed = cluster.observed();
        let desired = cluster.desired(&observed);
        let limit =
            cluster.object("DaemonSet", "virt-handler")["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"]
                .clone();
        let installation = desired.installation().map(|installation| &**installation);
        (vitivirt_install::warnings(&observed.kubevirt, installation), limit)
    };
    let (found, limit) = warnings(json!({"rollingUpdate": {"maxUnavailable": "50%"}}));
    assert_eq!(
        found,
        ["spec.customizeComponents has no effect on maxUnavailable of virt-handler: the patch sets \"50%\", but the \
          operator controls the rollout: it updates one node, and when the new pod is ready, a tenth of the nodes at a \
          time; remove the setting from the patch"]
    );
    assert_eq!(limit, 1);
    // With this strategy a user replaces the pods, and nothing is overridden.
    assert_eq!(warnings(json!({"type": "OnDelete", "rollingUpdate": null})).0, [""; 0]);
}

#[test]
fn fault_25_a_role_that_cannot_be_granted_is_reported_and_the_rest_is_installed() {
    let rule =
        "{APIGroups:[\"subresources.kubevirt.io\"], Resources:[\"virtualmachineinstances/vnc\"], Verbs:[\"get\"]}";
    let mut cluster = TestCluster::new(&json!({}));
    cluster.fails = Some(("ClusterRole", Failure::forbidden(reason::PERMISSION_MISSING, rule)));
    for _ in 0..6 {
        let stop = cluster.reconcile().outcome.stop;
        assert!(matches!(stop, Stop::Failed { .. }), "{stop:?}");
        cluster.roll_out();
    }
    for (kind, name) in [
        ("CustomResourceDefinition", "virtualmachines.kubevirt.io"),
        ("ClusterRoleBinding", "kubevirt-controller"),
        ("Secret", "kubevirt-virt-api-certs"),
        ("Deployment", "virt-api"),
        ("DaemonSet", "virt-handler"),
        ("VirtualMachineClusterInstancetype", "u1.small"),
    ] {
        assert!(cluster.has(kind, name), "{kind} {name}");
    }
    let (degraded, message) = condition(&cluster, "Degraded");
    assert!(degraded == "True" && message.contains(rule), "{message}");
    cluster.fails = None;
    cluster.settle();
    assert_eq!(condition(&cluster, "Degraded").0, "False");
    assert!(cluster.objects.contains_key(&("ClusterRole".to_owned(), ObjectKey::cluster("kubevirt.io:admin"))));
}
