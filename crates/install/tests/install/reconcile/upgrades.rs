//! Upgrades of an installation. Tests with the name `fault_N` are about known faults of upstream virt-operator.

use std::{collections::BTreeSet, time::Duration};

use serde_json::{Value, json};
use vitivirt_api::{Failure, ObjectKey, Stop};
use vitivirt_install::{
    DeploymentConfig, Environment, InstallStrategy, config_map, newer_operator, rehearsal::complete_plan,
};

use super::{
    installed,
    pods::{condition, pod, pods},
    test_cluster::{Reconcile, TestCluster},
};

const WORKLOADS: [(&str, &str); 3] =
    [("DaemonSet", "virt-handler"), ("Deployment", "virt-controller"), ("Deployment", "virt-api")];

pub(super) fn environment(version: &str, more: &[(&str, &str)]) -> Environment {
    let image = format!("quay.io/kubevirt/virt-operator:{version}");
    let variables = [("VIRT_OPERATOR_IMAGE", image.as_str()), ("KUBEVIRT_VERSION", version)];
    let variables = variables.iter().chain(more).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Environment::from_variables(variables)
}

/// An installation of an older version, and the operator of this one. Its pods do not start by themselves.
fn outdated() -> TestCluster {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.environment = environment("v1.7.0", &[]);
    cluster.settle();
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.7.0");
    cluster.environment = environment("v1.8.4", &[]);
    cluster.restart();
    cluster.rolls_out = false;
    cluster
}

fn generation(cluster: &mut TestCluster, (kind, name): (&str, &str)) -> i64 {
    cluster.object(kind, name)["metadata"]["generation"].as_i64().unwrap()
}

/// Kubernetes starts the pods of one workload.
fn roll_out(cluster: &mut TestCluster, (kind, name): (&str, &str)) {
    let before = cluster.objects.clone();
    cluster.roll_out();
    let ready = cluster.object(kind, name).clone();
    cluster.objects = before;
    *cluster.object(kind, name) = ready;
}

/// Reconciles until the next reconcile writes nothing.
fn reconcile_until_it_waits(cluster: &mut TestCluster) -> Reconcile {
    for _ in 0..6 {
        let reconcile = cluster.reconcile();
        if reconcile.writes().is_empty() {
            return reconcile;
        }
    }
    panic!("it does not stop writing");
}

#[test]
fn fault_10_workloads_are_updated_after_the_last_rollout() {
    let mut cluster = outdated();
    let before: Vec<i64> = WORKLOADS.iter().map(|workload| generation(&mut cluster, *workload)).collect();
    for (number, workload) in WORKLOADS.into_iter().enumerate() {
        let reconcile = reconcile_until_it_waits(&mut cluster);
        assert!(matches!(reconcile.outcome.stop, Stop::Waiting { .. }), "{:?}", reconcile.outcome.stop);
        for (later, other) in WORKLOADS.into_iter().enumerate() {
            let is_written = generation(&mut cluster, other) != before[later];
            assert_eq!(is_written, later <= number, "{}, while {} rolls over", other.1, workload.1);
        }
        // virt-controller updates VMs when the observed deployment is the target.
        let status = cluster.status();
        assert_eq!(status["observedKubeVirtVersion"], "v1.7.0");
        assert_eq!(status["targetKubeVirtVersion"], "v1.8.4");
        assert_ne!(status["observedDeploymentID"], status["targetDeploymentID"]);
        roll_out(&mut cluster, workload);
    }
    cluster.rolls_out = true;
    cluster.settle();
    let (status, last) = (cluster.status(), WORKLOADS.map(|workload| generation(&mut cluster, workload)));
    assert_eq!(status["observedKubeVirtVersion"], "v1.8.4");
    assert_eq!(status["observedDeploymentID"], status["targetDeploymentID"]);
    cluster.restart();
    cluster.settle();
    assert_eq!(WORKLOADS.map(|workload| generation(&mut cluster, workload)), last, "pods restart after Deployed");
}

/// The rehearsal contains every object that the upgrade changes, before the first write.
#[test]
fn a_rehearsal_contains_every_write_of_the_upgrade() {
    let mut cluster = outdated();
    // The operator that executes the plan writes its version into the status first.
    cluster.kubevirt.status.as_mut().unwrap().operator_version = "v1.7.0".to_owned();
    // The cluster got the CRDs of monitoring after the installation of the previous version.
    cluster.cluster.service_monitors = true;
    cluster.cluster.monitor_namespace = Some("monitoring".to_owned());
    // A rule that only the previous version has is removed when the last old pod is gone.
    let networks =
        json!({"apiGroups": ["k8s.cni.cncf.io"], "resources": ["network-attachment-definitions"], "verbs": ["get"]});
    cluster.object("ClusterRole", "kubevirt-exportproxy")["rules"].as_array_mut().unwrap().push(networks);
    let mut observed = cluster.observed();
    let desired = cluster.desired(&observed);
    let plan = complete_plan(&mut observed, &desired).unwrap();
    let planned: BTreeSet<String> =
        plan.steps.iter().flat_map(|step| &step.writes).map(|write| write.target().to_string()).collect();
    let count = plan.steps.iter().map(|step| step.writes.len()).sum::<usize>();
    assert_eq!(planned.len(), count, "an object is listed twice");
    let workloads: Vec<&str> = plan
        .steps
        .iter()
        .flat_map(|step| &step.writes)
        .map(vitivirt_api::Write::target)
        .filter(|target| ["DaemonSet", "Deployment"].contains(&target.resource.kind.as_str()))
        .map(|target| target.key.name())
        .collect();
    assert_eq!(workloads, WORKLOADS.map(|(_, name)| name));
    let before = cluster.objects.clone();
    cluster.rolls_out = true;
    cluster.settle();
    let changed = cluster.objects.iter().filter(|(id, object)| {
        let content = |object: &Value| {
            let mut object = object.clone();
            object.as_object_mut().unwrap().remove("status");
            object
        };
        before.get(*id).is_none_or(|before| content(before) != content(object))
    });
    let changed = changed.map(|((kind, key), _)| format!("{kind} {key}"));
    // The certificates have their own plan.
    let missing: Vec<String> = changed
        .filter(|changed| !changed.starts_with("Secret ") && !changed.starts_with("ConfigMap "))
        .filter(|changed| !planned.contains(changed))
        .collect();
    assert_eq!(missing, [""; 0]);
    assert!(planned.iter().any(|target| target.starts_with("ServiceMonitor ")), "{planned:?}");
}

#[test]
fn fault_13_old_pods_keep_their_permissions_until_they_are_gone() {
    let mut cluster = outdated();
    let rules = |cluster: &mut TestCluster| cluster.object("ClusterRole", "kubevirt-controller")["rules"].clone();
    let networks =
        json!({"apiGroups": ["k8s.cni.cncf.io"], "resources": ["network-attachment-definitions"], "verbs": ["get"]});
    let wanted = rules(&mut cluster);
    cluster.object("ClusterRole", "kubevirt-controller")["rules"].as_array_mut().unwrap().push(networks.clone());
    for workload in WORKLOADS {
        reconcile_until_it_waits(&mut cluster);
        assert!(rules(&mut cluster).as_array().unwrap().contains(&networks), "while {} rolls over", workload.1);
        roll_out(&mut cluster, workload);
    }
    cluster.rolls_out = true;
    cluster.settle();
    assert_eq!(rules(&mut cluster), wanted);
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.8.4");
}

/// The operator is taken back to the version that was complete last, while pods of the other version run.
#[test]
fn pods_of_an_upgrade_that_was_taken_back_keep_their_permissions_until_they_are_gone() {
    let mut cluster = outdated();
    let rules = |cluster: &mut TestCluster| cluster.object("ClusterRole", "kubevirt-handler")["rules"].clone();
    let wanted = rules(&mut cluster);
    reconcile_until_it_waits(&mut cluster);
    roll_out(&mut cluster, WORKLOADS[0]);
    let networks =
        json!({"apiGroups": ["k8s.cni.cncf.io"], "resources": ["network-attachment-definitions"], "verbs": ["get"]});
    cluster.object("ClusterRole", "kubevirt-handler")["rules"].as_array_mut().unwrap().push(networks.clone());
    let handler = |node: &str, version: &str| {
        let mut pod = pod("DaemonSet", "virt-handler", node, &json!({"phase": "Running"}));
        pod["metadata"]["annotations"] = json!({"kubevirt.io/install-strategy-version": version});
        pod
    };
    cluster.environment = environment("v1.7.0", &[]);
    cluster.restart();
    cluster.pods = pods(&[handler("node-1", "v1.8.4"), handler("node-2", "v1.7.0")], &[]);
    cluster.rolls_out = true;
    for _ in 0..6 {
        cluster.reconcile();
        cluster.roll_out();
        assert!(rules(&mut cluster).as_array().unwrap().contains(&networks), "a pod of v1.8.4 still runs");
    }
    cluster.pods = pods(&[handler("node-1", "v1.7.0"), handler("node-2", "v1.7.0")], &[]);
    cluster.settle();
    assert_eq!(rules(&mut cluster), wanted);
}

/// The leader may end at any time, and a replica of the older operator may lead next.
#[test]
fn a_newer_operator_writes_its_version_into_the_status_before_anything_else() {
    let mut cluster = outdated();
    cluster.kubevirt.status.as_mut().unwrap().operator_version = "v1.7.0".to_owned();
    let before = cluster.status();
    // Certificates never wait.
    let objects = |cluster: &TestCluster| {
        let objects = cluster.objects.iter().filter(|((kind, _), _)| kind != "Secret" && kind != "ConfigMap");
        objects.map(|(id, object)| (id.clone(), object.clone())).collect::<Vec<_>>()
    };
    let old = objects(&cluster);
    cluster.reconcile_monitoring();
    let reconcile = cluster.reconcile();
    assert_eq!(reconcile.report.requeue_after, None, "the wait requeues");
    assert!(
        matches!(&reconcile.outcome.stop, Stop::Waiting { wait, .. } if wait.requeue_after == Some(Duration::ZERO))
    );
    assert!(objects(&cluster) == old, "an object was written before the status");
    let mut expected = before;
    expected["operatorVersion"] = json!("v1.8.4");
    assert_eq!(cluster.status(), expected, "nothing else is known yet");
    let next = cluster.reconcile();
    assert!(!next.writes().is_empty());
    cluster.rolls_out = true;
    cluster.settle();
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.8.4");
}

/// virt-api of the newer version accepts what older components do not understand.
#[test]
fn an_upgrade_is_undone_in_the_order_of_a_downgrade() {
    let mut cluster = outdated();
    for workload in WORKLOADS {
        reconcile_until_it_waits(&mut cluster);
        roll_out(&mut cluster, workload);
    }
    let pod = |workload: (&str, &str), version: &str| {
        let mut pod = pod(workload.0, workload.1, "node-1", &json!({"phase": "Running"}));
        pod["metadata"]["annotations"] = json!({"kubevirt.io/install-strategy-version": version});
        pod
    };
    let version = |cluster: &mut TestCluster, (kind, name): (&str, &str)| {
        let annotations = &cluster.object(kind, name)["metadata"]["annotations"];
        annotations["kubevirt.io/install-strategy-version"].as_str().unwrap().to_owned()
    };
    let [handler, controller, api] = WORKLOADS;
    assert_eq!(version(&mut cluster, api), "v1.8.4");

    cluster.environment = environment("v1.7.0", &[]);
    cluster.restart();
    cluster.pods = pods(&[pod(api, "v1.8.4"), pod(handler, "v1.8.4")], &[]);
    reconcile_until_it_waits(&mut cluster);
    let versions = [api, controller, handler].map(|workload| version(&mut cluster, workload));
    assert_eq!(versions, ["v1.7.0", "v1.8.4", "v1.8.4"], "virt-api has not been replaced yet");
    roll_out(&mut cluster, api);
    cluster.pods = pods(&[pod(api, "v1.7.0"), pod(handler, "v1.8.4")], &[]);
    reconcile_until_it_waits(&mut cluster);
    let versions = [api, controller, handler].map(|workload| version(&mut cluster, workload));
    assert_eq!(versions, ["v1.7.0", "v1.7.0", "v1.7.0"]);
}

/// A node that was not ready during the upgrade returns with its old pod.
#[test]
fn an_old_pod_does_not_delay_the_repair_of_other_components() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.settle();
    let [handler, _, api] = WORKLOADS;
    let mut old = pod(handler.0, handler.1, "node-1", &json!({"phase": "Running"}));
    old["metadata"]["annotations"] = json!({"kubevirt.io/install-strategy-version": "v1.7.0"});
    cluster.pods = pods(&[old], &[]);
    cluster.object(handler.0, handler.1)["status"]["updatedNumberScheduled"] = json!(0);
    cluster.rolls_out = false;
    cluster.objects.remove(&(api.0.to_owned(), ObjectKey::namespaced("kubevirt", api.1)));
    assert_eq!(cluster.reconcile().writes(), ["Create(Deployment kubevirt/virt-api)"]);
}

/// The Job that dumps the install strategy may take long, or its image may be missing.
#[test]
fn the_running_installation_is_repaired_while_the_strategy_of_another_release_is_missing() {
    let mut cluster = installed(&json!({}));
    cluster.edit(&json!({"imageTag": "v1.9.0"}));
    cluster.reconcile();
    let id = |kind: &str, name: &str| (kind.to_owned(), ObjectKey::namespaced("kubevirt", name));
    let cluster_id = |kind: &str, name: &str| (kind.to_owned(), ObjectKey::cluster(name));
    cluster.change_as("user", &id("Deployment", "virt-api"), |object| object["spec"]["replicas"] = json!(7));
    cluster.objects.remove(&id("DaemonSet", "virt-handler"));
    cluster.objects.remove(&cluster_id("ClusterRole", "kubevirt-handler"));
    cluster.reconcile();
    assert_eq!(cluster.object("Deployment", "virt-api")["spec"]["replicas"], 2);
    let image =
        cluster.object("DaemonSet", "virt-handler")["spec"]["template"]["spec"]["containers"][0]["image"].clone();
    assert_eq!(image, "quay.io/kubevirt/virt-handler:v1.8.4");
    assert!(cluster.objects.contains_key(&cluster_id("ClusterRole", "kubevirt-handler")));
    // The Job is still waited for, and nothing else is written.
    assert!(condition(&cluster, "Progressing").1.contains("v1.9.0"), "{:?}", condition(&cluster, "Progressing"));
    assert_eq!(cluster.reconcile().writes(), [""; 0]);
    assert_eq!(cluster.status()["targetKubeVirtVersion"], "v1.9.0");
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.8.4");
}

#[test]
fn a_stored_version_that_would_be_lost_stops_an_upgrade_before_anything_changes() {
    const CRD: &str = "virtualmachineclones.clone.kubevirt.io";
    let mut cluster = outdated();
    cluster.rolls_out = true;
    cluster.object("CustomResourceDefinition", CRD)["status"] = json!({"storedVersions": ["v1alpha0", "v1beta1"]});
    let (objects, ca) = (cluster.objects.clone(), |kind: &str| ["Secret", "ConfigMap"].contains(&kind));
    for _ in 0..3 {
        let reconcile = cluster.reconcile();
        // A plan that fails would hold events back, such as that of the corrected CRD.
        assert!(matches!(reconcile.outcome.stop, Stop::Waiting { .. }), "{:?}", reconcile.outcome.stop);
    }
    let changed = |cluster: &TestCluster| {
        let changed = cluster.objects.iter().filter(|(id, object)| objects.get(*id) != Some(*object) && !ca(&id.0));
        changed.map(|(id, _)| format!("{id:?}")).collect::<Vec<_>>()
    };
    assert_eq!(changed(&cluster), [""; 0]);
    let (degraded, message) = condition(&cluster, "Degraded");
    assert_eq!(degraded, "True");
    for part in [CRD, "v1alpha0", "kubectl replace -f -", r#"'{"status":{"storedVersions":["v1beta1"]}}'"#, "v1.8.4"] {
        assert!(message.contains(part), "{message}");
    }
    let available = condition(&cluster, "Available");
    assert!(available.0 == "False" && available.1.contains("An error occurred during deployment"), "{available:?}");
    let before: Vec<i64> = WORKLOADS.iter().map(|workload| generation(&mut cluster, *workload)).collect();
    cluster.object("CustomResourceDefinition", CRD)["status"] = json!({"storedVersions": ["v1beta1"]});
    cluster.settle();
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.8.4");
    let after: Vec<i64> = WORKLOADS.iter().map(|workload| generation(&mut cluster, *workload)).collect();
    assert!(before.iter().zip(&after).all(|(before, after)| before < after), "an object counted as up to date");
}

/// A version that the API server can still read does not stop the upgrade.
#[test]
fn objects_of_a_version_that_would_be_lost_are_stored_again_before_anything_changes() {
    const CRD: &str = "virtualmachineclones.clone.kubevirt.io";
    let mut cluster = outdated();
    let crd = cluster.object("CustomResourceDefinition", CRD);
    let versions = crd["spec"]["versions"].as_array_mut().unwrap();
    versions.push(json!({"name": "v1alpha0", "served": false, "storage": false}));
    crd["status"] = json!({"storedVersions": ["v1alpha0", "v1beta1"], "conditions": []});
    for number in 0..5 {
        let key = ObjectKey::namespaced("ns", &format!("clone-{number}"));
        let clone = json!({"apiVersion": "clone.kubevirt.io/v1beta1", "kind": "VirtualMachineClone",
            "metadata": {"name": key.name(), "namespace": "ns"}, "spec": {}});
        cluster.put("VirtualMachineClone", key, clone, "user");
    }
    let before: Vec<i64> = WORKLOADS.iter().map(|workload| generation(&mut cluster, *workload)).collect();
    let mut progress = Vec::new();
    for stored in [2, 4, 5] {
        let reconcile = cluster.reconcile();
        let clones = reconcile.writes().iter().filter(|write| write.contains("VirtualMachineClone ns/")).count();
        assert_eq!(clones, if stored == 5 { 1 } else { 2 }, "{:?}", reconcile.writes());
        let after: Vec<i64> = WORKLOADS.iter().map(|workload| generation(&mut cluster, *workload)).collect();
        assert_eq!(after, before, "a workload was changed while objects are stored");
        let (status, message) = condition(&cluster, "Progressing");
        assert!(status == "True" && message.contains(&format!("{CRD}: {stored} of 5 objects")), "{message}");
        assert_eq!(condition(&cluster, "Available").0, "True");
        progress.push(cluster.object("CustomResourceDefinition", CRD)["status"]["storedVersions"].clone());
    }
    let both = json!(["v1alpha0", "v1beta1"]);
    assert_eq!(progress, [both.clone(), both, json!(["v1beta1"])]);
    assert_eq!(cluster.no_op_patches.iter().filter(|patch| patch.contains("VirtualMachineClone")).count(), 5);
    cluster.rolls_out = true;
    cluster.settle();
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.8.4");
    assert_eq!(condition(&cluster, "Degraded").0, "False");
}

/// An object that cannot be written stops the upgrade before anything changes.
#[test]
fn an_object_that_cannot_be_stored_again_stops_the_upgrade() {
    const CRD: &str = "virtualmachineclones.clone.kubevirt.io";
    let mut cluster = outdated();
    let crd = cluster.object("CustomResourceDefinition", CRD);
    let versions = crd["spec"]["versions"].as_array_mut().unwrap();
    versions.push(json!({"name": "v1alpha0", "served": true, "storage": false}));
    crd["status"] = json!({"storedVersions": ["v1alpha0", "v1beta1"]});
    let clone = json!({"apiVersion": "clone.kubevirt.io/v1beta1", "kind": "VirtualMachineClone",
        "metadata": {"name": "clone", "namespace": "ns"}, "spec": {}});
    cluster.put("VirtualMachineClone", ObjectKey::namespaced("ns", "clone"), clone, "user");
    let failure = Failure::invalid("InvalidObject", "VirtualMachineClone ns/clone is invalid");
    cluster.fails = Some(("VirtualMachineClone", failure));
    cluster.reconcile();
    let stored = cluster.object("CustomResourceDefinition", CRD)["status"]["storedVersions"].clone();
    assert_eq!(stored, json!(["v1alpha0", "v1beta1"]));
    let (degraded, message) = condition(&cluster, "Degraded");
    assert!(degraded == "True" && message.contains("VirtualMachineClone ns/clone is invalid"), "{message}");
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.7.0");
}

/// Old pods write the status with ordinary updates, which the API server ignores when the subresource exists.
#[test]
fn a_status_subresource_is_added_when_the_old_pods_are_gone() {
    const CRD: &str = "virtualmachineclones.clone.kubevirt.io";
    let mut cluster = outdated();
    let has_status = |cluster: &mut TestCluster| {
        let versions = cluster.object("CustomResourceDefinition", CRD)["spec"]["versions"].as_array().unwrap().clone();
        versions.iter().all(|version| version["subresources"].get("status").is_some())
    };
    assert!(has_status(&mut cluster));
    let versions = cluster.object("CustomResourceDefinition", CRD)["spec"]["versions"].as_array_mut().unwrap();
    versions.iter_mut().for_each(|version| drop(version["subresources"].as_object_mut().unwrap().remove("status")));
    for workload in WORKLOADS {
        reconcile_until_it_waits(&mut cluster);
        assert!(!has_status(&mut cluster), "while {} rolls over", workload.1);
        roll_out(&mut cluster, workload);
    }
    cluster.rolls_out = true;
    cluster.settle();
    assert!(has_status(&mut cluster));
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.8.4");
}

#[test]
fn fault_3_another_image_tag_uses_the_strategy_and_the_images_of_that_release() {
    let mut cluster = installed(&json!({}));
    cluster.edit(&json!({"imageTag": "v1.7.0"}));
    cluster.reconcile();
    let job = cluster.objects.iter().find(|((kind, _), _)| kind == "Job").unwrap().1;
    let image = &job["spec"]["template"]["spec"]["containers"][0]["image"];
    assert_eq!(image, "quay.io/kubevirt/virt-operator:v1.7.0");
    let config = DeploymentConfig::new(&cluster.kubevirt, &cluster.environment);
    let strategy = InstallStrategy::generate(&config, None, None).unwrap();
    let map = serde_json::to_value(config_map(&config, &strategy).unwrap()).unwrap();
    cluster.put("ConfigMap", config.strategy_key(), map, "other");
    cluster.settle();
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.7.0");
    for (kind, name) in WORKLOADS {
        let image = cluster.object(kind, name)["spec"]["template"]["spec"]["containers"][0]["image"].clone();
        assert_eq!(image, format!("quay.io/kubevirt/{name}:v1.7.0"));
    }
}

/// Such as v1.9.0: its install strategy has a certificate that this operator cannot issue.
#[test]
fn a_release_that_cannot_be_installed_is_refused_and_the_running_one_is_kept() {
    let mut cluster = installed(&json!({}));
    cluster.edit(&json!({"imageTag": "v1.9.0"}));
    let config = DeploymentConfig::new(&cluster.kubevirt, &cluster.environment);
    let strategy = InstallStrategy::generate(&config, None, None).unwrap();
    let mut map = serde_json::to_value(config_map(&config, &strategy).unwrap()).unwrap();
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
        "metadata": {"name": "kubevirt-unknown-certs", "namespace": "kubevirt"}});
    let objects = strategy.items().iter().map(|item| item.object().unwrap()).chain([secret]);
    let documents: Vec<String> = objects.map(|object| object.to_string()).collect();
    map["data"]["manifests"] = json!(documents.join("\n---\n"));
    map["metadata"]["annotations"].as_object_mut().unwrap().remove("kubevirt.io/install-strategy-cm-encoding");
    cluster.put("ConfigMap", config.strategy_key(), map, "other");
    let id = ("Deployment".to_owned(), ObjectKey::namespaced("kubevirt", "virt-api"));
    let replicas = |cluster: &TestCluster| cluster.objects[&id]["spec"]["replicas"].clone();
    for _ in 0..3 {
        cluster.reconcile();
        cluster.roll_out();
    }
    let (degraded, message) = condition(&cluster, "Degraded");
    assert!(
        degraded == "True" && message.contains("kubevirt-unknown-certs") && message.contains("v1.9.0"),
        "{message}"
    );
    assert_eq!(condition(&cluster, "Available").0, "True");
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.8.4");
    // Drift of the release that runs is repaired, and the strategy that was refused is not dumped again.
    cluster.change_as("user", &id, |object| object["spec"]["replicas"] = json!(7));
    cluster.objects.remove(&("Secret".to_owned(), ObjectKey::namespaced("kubevirt", "kubevirt-virt-api-certs")));
    cluster.reconcile();
    assert_eq!(replicas(&cluster), 2);
    assert!(cluster.has("Secret", "kubevirt-virt-api-certs"));
    assert!(cluster.has("ConfigMap", config.strategy_key().name()));
    cluster.edit(&json!({}));
    cluster.settle();
    assert_eq!(condition(&cluster, "Degraded").0, "False");
}

#[test]
fn fault_4_another_image_of_one_component_restarts_only_that_component() {
    let mut cluster = installed(&json!({}));
    let before = WORKLOADS.map(|workload| generation(&mut cluster, workload));
    cluster.environment = environment("v1.8.4", &[("VIRT_API_IMAGE", "example.org/virt-api:other")]);
    cluster.restart();
    cluster.settle();
    let after = WORKLOADS.map(|workload| generation(&mut cluster, workload));
    let restarted: Vec<&str> =
        (0..3).filter(|number| before[*number] != after[*number]).map(|number| WORKLOADS[number].1).collect();
    assert_eq!(restarted, ["virt-api"]);
}

/// etcd stores at most 1.5 MiB per request.
#[test]
fn fault_11_no_write_of_an_upgrade_is_too_large() {
    let mut cluster = outdated();
    cluster.rolls_out = true;
    let reconciles = cluster.settle();
    let writes = reconciles.iter().flat_map(|reconcile| &reconcile.plan.steps).flat_map(|step| &step.writes);
    let size = |write: &vitivirt_api::Write| -> usize {
        let write = match write {
            vitivirt_api::Write::Lazy { make, .. } => make.make().unwrap(),
            write => write.clone(),
        };
        match write {
            vitivirt_api::Write::Create { body, .. } => body.json().to_string().len(),
            vitivirt_api::Write::Patch { operations, .. } => operations
                .iter()
                .filter_map(|operation| operation.value.as_ref())
                .map(|value| value.to_string().len())
                .sum(),
            _ => 0,
        }
    };
    let largest = writes.map(|write| (size(write), write.target().to_string())).max().unwrap();
    assert!(largest.0 < 1_400_000, "{largest:?}");
    assert!(cluster.status().to_string().len() < 100_000);
}

#[test]
fn fault_15_a_change_of_the_configuration_alone_writes_no_object() {
    let mut cluster = installed(&json!({}));
    cluster.edit(&json!({"configuration": {"evictionStrategy": "LiveMigrate"}}));
    let writes: Vec<String> = cluster.settle().iter().flat_map(Reconcile::writes).collect();
    assert_eq!(writes, [""; 0]);
    assert_eq!(cluster.status()["observedGeneration"], 2);
}

#[test]
fn fault_20_pods_on_nodes_that_should_not_run_one_do_not_make_the_installation_unavailable() {
    let mut cluster = installed(&json!({}));
    cluster.object("DaemonSet", "virt-handler")["status"]["numberMisscheduled"] = json!(1);
    let unready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]});
    cluster.pods = pods(&[pod("DaemonSet", "virt-handler", "node-9", &unready)], &[]);
    assert_eq!(cluster.reconcile().outcome.stop, Stop::Done);
    assert_eq!(condition(&cluster, "Available").0, "True");
}

/// One DaemonSet controller and its pods, as far as the operator reads them. `updated` of the pods are ready.
fn roll_out_handlers(cluster: &mut TestCluster, nodes: usize, updated: usize, dead: &[&str]) {
    let ready = |ready: bool| {
        let status = if ready { "True" } else { "False" };
        json!({"phase": "Running", "conditions": [{"type": "Ready", "status": status}]})
    };
    let all: Vec<_> = (0..nodes)
        .map(|number| {
            let node = format!("node-{number}");
            let is_dead = dead.contains(&node.as_str());
            let mut pod = pod("DaemonSet", "virt-handler", &node, &ready(!is_dead));
            let is_updated = !is_dead && number < updated;
            pod["metadata"]["labels"] = json!({"controller-revision-hash": if is_updated { "new" } else { "old" }});
            pod
        })
        .collect();
    cluster.pods = pods(&all, dead);
    cluster.pods.current_revisions.insert("virt-handler".to_owned(), "new".into());
    let handler = cluster.object("DaemonSet", "virt-handler");
    let generation = handler["metadata"]["generation"].clone();
    handler["status"] = json!({"observedGeneration": generation, "desiredNumberScheduled": nodes,
        "updatedNumberScheduled": updated, "numberReady": nodes - dead.len()});
}

/// The state is in the cluster, so an operator that restarts at any time continues.
#[test]
fn virt_handler_is_updated_on_one_node_then_on_a_tenth_after_any_restart() {
    let mut cluster = installed(&json!({}));
    cluster.rolls_out = false;
    cluster.edit(&json!({"customizeComponents": {"flags": {"handler": {"v": "4"}}}}));
    let limit = |cluster: &mut TestCluster| {
        cluster.object("DaemonSet", "virt-handler")["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"].clone()
    };
    roll_out_handlers(&mut cluster, 30, 0, &["node-29"]);
    for (updated, expected) in [(0, json!(2)), (1, json!(4)), (20, json!(4)), (29, json!(1))] {
        for restarts in [false, true] {
            if restarts {
                cluster.restart();
            }
            roll_out_handlers(&mut cluster, 30, updated, &["node-29"]);
            let reconcile = reconcile_until_it_waits(&mut cluster);
            roll_out_handlers(&mut cluster, 30, updated, &["node-29"]);
            let is_last = updated == 29;
            assert_eq!(limit(&mut cluster), expected, "{updated} nodes are updated, restarts: {restarts}");
            assert!(is_last || matches!(reconcile.outcome.stop, Stop::Waiting { .. }), "{:?}", reconcile.outcome.stop);
        }
    }
    assert_eq!(cluster.reconcile().outcome.stop, Stop::Done);
    assert!(condition(&cluster, "Available").1.contains("Node node-29 is not ready"));
}

/// A pod of the operator's Deployment.
fn operator_pod(name: &str, revision: &str) -> Value {
    let owner = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("virt-operator-{revision}"), "uid": "o",
        "controller": true,
    });
    json!({
        "metadata": {
            "name": name, "uid": name, "labels": {"pod-template-hash": revision}, "ownerReferences": [owner],
        },
        "spec": {"containers": []},
        "status": {"phase": "Running"},
    })
}

#[test]
fn an_operator_leaves_the_installation_of_a_newer_one_alone_until_that_one_is_gone() {
    let own = ObjectKey::namespaced("kubevirt", "own");
    let mut cluster = installed(&json!({}));
    let newer = |cluster: &TestCluster| newer_operator(&cluster.observed(), &own).map(|newer| newer.version);
    let mut deleted = operator_pod("newer", "b");
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let alone = [operator_pod("own", "a"), operator_pod("other", "a"), deleted];
    let together = [operator_pod("own", "a"), operator_pod("newer", "b")];
    for (version, pods_found, expected) in [
        ("v1.8.4", &together[..], None),
        ("v1.7.0", &together, None),
        ("v1.9.0", &together, Some("v1.9.0")),
        ("v1.8.4-rc.1", &together, None),
        // A rollback: the pods of the newer operator are gone or go.
        ("v1.9.0", &alone, None),
        ("v1.9.0", &together[..1], None),
        // A process outside of the Deployment.
        ("v1.9.0", &together[1..], None),
        ("latest", &together, None),
    ] {
        cluster.pods = pods(pods_found, &[]);
        cluster.kubevirt.status.as_mut().unwrap().operator_version = version.to_owned();
        assert_eq!(newer(&cluster).as_deref(), expected, "{version} {pods_found:?}");
    }
}
