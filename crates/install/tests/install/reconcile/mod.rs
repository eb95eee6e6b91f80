//! Whole installations, reconciled step by step against a cluster in memory.

mod certificates;
mod drift;
mod edits;
mod failed_writes;
mod faults;
mod invalid_resources;
mod pods;
mod removal;
mod served_certificates;
mod storage;
mod strategy_job;
mod test_cluster;
mod upgrades;
mod view;

use serde_json::{Value, json};
use vitivirt_api::{Failure, ObjectKey, Stop};

use test_cluster::{Reconcile, TestCluster};

fn variant(name: &str) -> Value {
    let path = format!("{}/tests/variants/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    let kubevirt: Value = serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    kubevirt["spec"].clone()
}

const VARIANTS: [&str; 7] = ["default", "customize", "gates", "images", "monitoring", "placement", "combined"];

fn installed(spec: &Value) -> TestCluster {
    let mut cluster = TestCluster::new(spec);
    cluster.settle();
    cluster
}

/// A copy, because creating an installation takes much longer.
fn installed_from(base: &TestCluster) -> TestCluster {
    let mut cluster = TestCluster::new(&serde_json::to_value(&base.kubevirt.spec).unwrap());
    cluster.kubevirt = base.kubevirt.clone();
    cluster.cluster = base.cluster.clone();
    cluster.objects = base.objects.clone();
    cluster.up_to_date = base.up_to_date.clone();
    cluster.installation = base.installation.clone();
    cluster.live = base.live.clone();
    cluster
}

#[test]
fn an_installation_settles_and_a_restarted_operator_changes_nothing() {
    for name in VARIANTS {
        let mut cluster = TestCluster::new(&variant(name));
        let reconciles = cluster.settle();
        assert_eq!(cluster.status()["phase"], "Deployed", "{name}");
        assert!(reconciles.len() <= 4, "{name}: {} reconciles", reconciles.len());
        let statuses =
            reconciles.iter().filter(|reconcile| reconcile.report.status.as_ref().unwrap().differs()).count();
        assert!(statuses <= 2, "{name}: {statuses} status writes");
        cluster.restart();
        let reconcile = cluster.reconcile();
        assert!(reconcile.is_silent(), "{name}: {:?}", reconcile.writes());
    }
}

#[test]
fn nothing_is_written_after_the_phase_is_deployed() {
    let mut cluster = TestCluster::new(&variant("gates"));
    let reconciles = cluster.settle();
    let deployed = reconciles
        .iter()
        .position(|reconcile| reconcile.report.status.as_ref().unwrap().desired["phase"] == "Deployed");
    for reconcile in &reconciles[deployed.unwrap() + 1..] {
        assert_eq!(reconcile.writes(), [""; 0]);
    }
}

#[test]
fn a_first_installation_waits_only_for_what_it_needs() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.rolls_out = false;
    cluster.reconcile();
    for (kind, name) in [("Deployment", "virt-api"), ("Deployment", "virt-controller"), ("DaemonSet", "virt-handler")] {
        assert!(cluster.has(kind, name), "{name}: no component needs another one to start");
    }
    assert!(cluster.objects.keys().any(|(_, key)| key.name().starts_with("virt-operator-tmp-webhook")));
    assert!(cluster.has("ValidatingWebhookConfiguration", "virt-api-validator"));
    assert_eq!(cluster.status()["phase"], "Deploying");
    assert_eq!(cluster.reconcile().writes(), [""; 0], "it waits");
    // virt-api validates instancetypes.
    assert!(!cluster.objects.keys().any(|(kind, _)| kind.starts_with("VirtualMachineCluster")));
    let roll_out_one = |cluster: &mut TestCluster, kind: &str, name: &str| {
        let before = cluster.objects.clone();
        cluster.roll_out();
        let ready = cluster.object(kind, name).clone();
        cluster.objects = before;
        *cluster.object(kind, name) = ready;
    };
    roll_out_one(&mut cluster, "Deployment", "virt-api");
    cluster.reconcile();
    assert!(!cluster.objects.keys().any(|(_, key)| key.name().starts_with("virt-operator-tmp-webhook")));
    cluster.reconcile();
    assert!(cluster.objects.keys().any(|(kind, _)| kind.starts_with("VirtualMachineCluster")));
    assert_eq!(cluster.status()["phase"], "Deploying", "virt-controller has no pods yet");
    cluster.roll_out();
    cluster.reconcile();
    assert_eq!(cluster.status()["phase"], "Deployed");
}

/// As long as the API server still has the blocking webhook, it rejects one write instead of all.
#[test]
fn the_first_instancetype_is_written_alone() {
    let mut cluster = TestCluster::new(&json!({}));
    let steps = cluster.settle().into_iter().flat_map(|reconcile| reconcile.plan.steps);
    let instancetypes = steps.filter(|step| step.name == "instancetypes").map(|step| step.writes.len());
    assert_eq!(instancetypes.collect::<Vec<_>>(), [1, 118]);
}

#[test]
fn a_change_is_complete_when_the_changed_pods_are_ready() {
    let mut cluster = installed(&json!({}));
    cluster.rolls_out = false;
    cluster.edit(&json!({"customizeComponents": {"flags": {"controller": {"v": "4"}}}}));
    let reconcile = cluster.reconcile();
    assert!(reconcile.writes().iter().any(|write| write.contains("virt-controller")), "{:?}", reconcile.writes());
    assert!(matches!(reconcile.outcome.stop, Stop::Waiting { .. }), "{:?}", reconcile.outcome.stop);
    cluster.roll_out();
    assert_eq!(cluster.reconcile().outcome.stop, Stop::Done);
}

/// A component that does not come up keeps only an upgrade or a downgrade from going on.
#[test]
fn a_component_that_does_not_start_does_not_keep_others_from_being_configured() {
    let mut cluster = installed(&json!({}));
    cluster.rolls_out = false;
    cluster.object("Deployment", "virt-api")["status"]["readyReplicas"] = json!(0);
    cluster.edit(&json!({"customizeComponents": {"flags": {"api": {"v": "5"}, "controller": {"v": "4"}}}}));
    let writes = cluster.reconcile().writes();
    for name in ["virt-api", "virt-controller"] {
        assert!(writes.contains(&format!("Patch(Deployment kubevirt/{name})")), "{writes:?}");
    }
}

/// What is being deleted, belongs to another client or is refused holds up only what needs it.
#[test]
fn an_object_that_cannot_be_written_does_not_hold_up_others() {
    let mut cluster = installed(&json!({}));
    let crd = "virtualmachines.kubevirt.io";
    cluster.object("CustomResourceDefinition", crd)["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    cluster.objects.remove(&("Deployment".to_owned(), ObjectKey::namespaced("kubevirt", "virt-controller")));
    cluster.objects.remove(&("Secret".to_owned(), ObjectKey::namespaced("kubevirt", "kubevirt-virt-api-certs")));
    let foreign = json!({"kind": "Service", "metadata": {"name": "virt-api", "namespace": "kubevirt"}, "spec": {}});
    cluster.put("Service", ObjectKey::namespaced("kubevirt", "virt-api"), foreign, "another-client");
    cluster.reconcile();
    assert!(cluster.has("Deployment", "virt-controller") && cluster.has("Secret", "kubevirt-virt-api-certs"));
    let conditions = cluster.status()["conditions"].to_string();
    assert!(conditions.contains("Service kubevirt/virt-api already exists"), "{conditions}");
    cluster.objects.remove(&("Service".to_owned(), ObjectKey::namespaced("kubevirt", "virt-api")));
    cluster.reconcile_repeatedly();
    let conditions = cluster.status()["conditions"].to_string();
    assert!(conditions.contains(&format!("CustomResourceDefinition {crd} is being deleted")), "{conditions}");
}

/// Monitoring, instancetypes and orphans report what is wrong. KubeVirt is available all the same.
#[test]
fn a_problem_of_an_optional_lane_is_reported_and_degrades_nothing() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.fails =
        Some(("VirtualMachineClusterPreference", Failure::invalid("AdmissionRefused", "denied by a policy")));
    cluster.reconcile_repeatedly();
    assert_eq!(cluster.status()["phase"], "Deployed");
    let condition = |cluster: &TestCluster, name: &str| {
        let conditions = cluster.status()["conditions"].as_array().unwrap().clone();
        conditions.into_iter().find(|condition| condition["type"] == name).unwrap_or_default()
    };
    for (name, status) in [("Available", "True"), ("Degraded", "False"), ("Progressing", "False")] {
        assert_eq!(condition(&cluster, name)["status"], status, "{name}");
    }
    let synchronized = condition(&cluster, "Synchronized");
    assert_eq!((&synchronized["status"], &synchronized["reason"]), (&json!("False"), &json!("PartiallySynchronized")));
    let message = synchronized["message"].as_str().unwrap();
    assert!(message.contains("instancetypes: denied by a policy"), "{synchronized}");
    assert!(cluster.has("VirtualMachineClusterInstancetype", "u1.small"));
    cluster.fails = None;
    cluster.settle();
    assert_eq!(condition(&cluster, "Synchronized"), Value::Null);
}

#[test]
fn objects_of_a_disabled_feature_gate_are_deleted() {
    let mut cluster = installed(&variant("gates"));
    assert!(cluster.has("Deployment", "virt-exportproxy"));
    cluster.edit(&json!({}));
    cluster.settle();
    assert!(
        !cluster.has("Deployment", "virt-exportproxy") && !cluster.has("PodDisruptionBudget", "virt-exportproxy-pdb")
    );
    let fresh = installed(&json!({}));
    let names = |cluster: &TestCluster| -> Vec<_> {
        cluster
            .objects
            .keys()
            .filter(|(_, key)| !key.name().starts_with("kubevirt-install-strategy"))
            .cloned()
            .collect()
    };
    assert_eq!(names(&cluster), names(&fresh));
    let strategies = cluster.objects.keys().filter(|(_, key)| key.name().starts_with("kubevirt-install-strategy"));
    assert_eq!(strategies.count(), 1);
}

#[test]
fn a_change_restarts_only_the_affected_components() {
    let mut cluster = installed(&json!({}));
    let generation = |cluster: &mut TestCluster, kind: &str, name: &str| {
        cluster.object(kind, name)["metadata"]["generation"].clone()
    };
    // It changes the identifier of the deployment, but no pod.
    cluster.edit(&json!({"uninstallStrategy": "BlockUninstallIfWorkloadsExist"}));
    let reconciles = cluster.settle();
    for (kind, name) in [("Deployment", "virt-api"), ("Deployment", "virt-controller"), ("DaemonSet", "virt-handler")] {
        assert_eq!(generation(&mut cluster, kind, name), 1, "{name}: {:?}", reconciles[0].writes());
    }
    cluster.edit(&json!({"customizeComponents": {"flags": {"api": {"v": "4"}}}}));
    cluster.settle();
    assert_ne!(generation(&mut cluster, "Deployment", "virt-api"), 1);
    assert_eq!(generation(&mut cluster, "Deployment", "virt-controller"), 1);
    assert_eq!(generation(&mut cluster, "DaemonSet", "virt-handler"), 1);
}

#[test]
fn an_object_that_the_operator_does_not_manage_is_kept_and_reported() {
    let mut cluster = TestCluster::new(&json!({}));
    let key = ObjectKey::namespaced("kubevirt", "virt-api");
    let foreign =
        json!({"kind": "Service", "metadata": {"name": "virt-api", "namespace": "kubevirt"}, "spec": {"a": 1}});
    cluster.put("Service", key.clone(), foreign, "another-client");
    let before = cluster.object("Service", "virt-api").clone();
    let reconcile = cluster.reconcile();
    assert!(matches!(reconcile.outcome.stop, Stop::NameConflict { .. }));
    let message = cluster.status()["conditions"].to_string();
    assert!(
        message.contains("Service kubevirt/virt-api already exists") && message.contains("DeploymentFailed"),
        "{message}"
    );
    assert_eq!(*cluster.object("Service", "virt-api"), before);
    cluster.objects.remove(&("Service".to_owned(), key));
    cluster.settle();
    assert_eq!(cluster.status()["phase"], "Deployed");
    assert!(!cluster.status()["conditions"].to_string().contains("DeploymentFailed"));
}

#[test]
fn a_second_resource_and_one_in_another_namespace_are_not_installed() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.first_kubevirt = Some(ObjectKey::namespaced("kubevirt", "first"));
    let reconcile = cluster.reconcile();
    assert_eq!(reconcile.writes(), [""; 0]);
    let conditions = cluster.status()["conditions"].to_string();
    assert!(conditions.contains("ExistingDeployment") && conditions.contains("kubevirt/first"), "{conditions}");
    assert_eq!(cluster.status().get("phase"), None);
    cluster.first_kubevirt = None;
    cluster.kubevirt.metadata.namespace = Some("elsewhere".to_owned());
    let reconcile = cluster.reconcile();
    assert_eq!(reconcile.writes(), [""; 0]);
    assert!(cluster.status()["conditions"].to_string().contains("in kubevirt instead"));
    // The operator of that namespace has installed it, so its status is kept.
    let mut cluster = installed(&json!({}));
    cluster.kubevirt.metadata.namespace = Some("elsewhere".to_owned());
    let reconcile = cluster.reconcile();
    assert!(reconcile.is_silent() && reconcile.report.status.is_none());
}

#[test]
fn a_component_that_fails_later_is_reported() {
    let mut cluster = installed(&json!({}));
    cluster.object("Deployment", "virt-api")["status"]["readyReplicas"] = json!(0);
    cluster.reconcile();
    let conditions = cluster.status()["conditions"].to_string();
    assert_eq!(cluster.status()["phase"], "Deployed");
    assert!(conditions.contains("virt-api: none of its pods are ready"), "{conditions}");
    cluster.roll_out();
    cluster.reconcile();
    assert!(!cluster.status()["conditions"].to_string().contains("virt-api"));
}

/// Any client that may label an object can set this label. It must not delete anything.
#[test]
fn a_label_never_makes_an_object_an_orphan() {
    let base = installed(&json!({}));
    for id in base.objects.keys().filter(|(kind, _)| kind != "Namespace") {
        if id.0.starts_with("VirtualMachineCluster") || id.1.name().starts_with("kubevirt-install-strategy") {
            continue;
        }
        let mut cluster = installed_from(&base);
        cluster.object_by_id(id)["metadata"]["labels"]["kubevirt.io/install-strategy"] = json!("");
        let writes: Vec<String> = cluster.settle().iter().flat_map(Reconcile::writes).collect();
        assert_eq!(writes, [""; 0], "{id:?}");
    }
}

#[test]
fn a_crd_with_objects_is_kept() {
    let gates = json!({"configuration": {"developerConfiguration": {"featureGates": ["Template"]}}});
    let mut cluster = installed(&gates);
    let name = "virtualmachinetemplates.template.kubevirt.io";
    assert!(cluster.has("CustomResourceDefinition", name));
    cluster.crds_with_objects.insert(ObjectKey::cluster(name));
    cluster.edit(&json!({}));
    cluster.settle();
    assert!(cluster.has("CustomResourceDefinition", name) && !cluster.has("Deployment", "virt-template-controller"));
    cluster.crds_with_objects.clear();
    cluster.settle();
    assert!(!cluster.has("CustomResourceDefinition", name));
}

#[test]
fn copied_annotations_in_another_namespace_do_not_make_an_orphan() {
    let mut cluster = installed(&json!({}));
    let role = cluster.object("Role", "kubevirt-handler").clone();
    cluster.put("Role", ObjectKey::namespaced("tenant", "kubevirt-handler"), role, "tenant");
    assert_eq!(cluster.settle().iter().flat_map(Reconcile::writes).collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn a_service_monitor_in_a_new_namespace_replaces_the_old_one() {
    let id =
        |namespace: &str| ("ServiceMonitor".to_owned(), ObjectKey::namespaced(namespace, "prometheus-kubevirt-rules"));
    for (before, after) in [
        (json!({}), json!({"monitorNamespace": "obs"})),
        (json!({"serviceMonitorNamespace": "monitors"}), json!({})),
        (json!({"serviceMonitorNamespace": "monitors"}), json!({"serviceMonitorNamespace": "obs"})),
    ] {
        let named = |spec: &Value, field: &str| spec[field].as_str().map(str::to_owned);
        let stack = |spec: &Value| named(spec, "monitorNamespace").unwrap_or_else(|| "monitoring".to_owned());
        let target = |spec: &Value| named(spec, "serviceMonitorNamespace").unwrap_or_else(|| stack(spec));
        let mut cluster = TestCluster::new(&before);
        cluster.cluster.service_monitors = true;
        cluster.cluster.monitor_namespace = Some(stack(&before));
        cluster.settle();
        let copied = cluster.objects[&id(&target(&before))].clone();
        cluster.put(
            "ServiceMonitor",
            ObjectKey::namespaced("tenant", "prometheus-kubevirt-rules"),
            Value::clone(&copied),
            "tenant",
        );
        cluster.cluster.monitor_namespace = Some(stack(&after));
        cluster.edit(&after);
        cluster.settle();
        let namespaces: Vec<&str> = cluster
            .objects
            .keys()
            .filter(|(kind, _)| kind == "ServiceMonitor")
            .filter_map(|(_, key)| key.namespace())
            .collect();
        assert_eq!(namespaces, [target(&after).as_str(), "tenant"], "{before} to {after}");
    }
}

/// VMs without an architecture get the default, and the next leader may run on another node.
#[test]
fn the_default_architecture_does_not_change_with_the_leader() {
    let mut cluster = installed(&json!({}));
    assert_eq!(cluster.status()["defaultArchitecture"], "amd64");
    cluster.architecture = "arm64";
    cluster.restart();
    assert_eq!(cluster.settle().len(), 0);
    cluster.edit(&json!({"configuration": {"architectureConfiguration": {"defaultArchitecture": "s390x"}}}));
    cluster.settle();
    assert_eq!(cluster.status()["defaultArchitecture"], "s390x");
    cluster.edit(&json!({}));
    cluster.settle();
    assert_eq!(cluster.status()["defaultArchitecture"], "arm64", "the setting is gone");
}

#[test]
fn a_new_number_of_replicas_restarts_no_pods() {
    let mut cluster = installed(&json!({}));
    cluster.edit(&json!({"productName": "shop"}));
    cluster.settle();
    let identity = |cluster: &mut TestCluster| {
        let template = cluster.object("Deployment", "virt-controller")["spec"]["template"]["metadata"].clone();
        template["annotations"]["kubevirt.io/install-strategy-identifier"].clone()
    };
    let before = identity(&mut cluster);
    cluster.edit(&json!({"productName": "shop", "infra": {"replicas": 3}}));
    cluster.settle();
    assert_eq!(cluster.object("Deployment", "virt-controller")["spec"]["replicas"], 3);
    assert_eq!(identity(&mut cluster), before);
}

#[test]
fn a_long_wait_names_its_cause() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.rolls_out = false;
    for _ in 0..25 {
        cluster.reconcile();
    }
    let conditions = cluster.status()["conditions"].to_string();
    assert!(
        conditions.contains("virt-api: it has no pods yet")
            || conditions.contains("virt-api: its status is not up to date yet"),
        "{conditions}"
    );
}
