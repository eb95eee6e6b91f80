//! The removal of whole installations.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
    jiff::{SignedDuration, Timestamp},
};
use serde_json::{Value, json};
use vitivirt_api::{ApiResource, ObjectKey, Stop, Target};
use vitivirt_install::removal::{Instance, MarkedNode, RemovalMode, Workloads};

use super::{
    installed,
    pods::{pod, pods},
    test_cluster::{Reconcile, TestCluster},
    variant,
};

const CRD: &str = "CustomResourceDefinition";
const VMS: &str = "virtualmachines.kubevirt.io";

fn deleted(mut cluster: TestCluster) -> TestCluster {
    cluster.kubevirt.metadata.deletion_timestamp = Some(Time(cluster.now));
    cluster
}

fn remove(cluster: &mut TestCluster) -> Reconcile {
    cluster.remove(RemovalMode::Operator, &[], Vec::new())
}

fn crds(cluster: &TestCluster) -> Vec<String> {
    let crds = cluster.objects.keys().filter(|(kind, _)| kind == CRD);
    crds.map(|(_, key)| key.name().to_owned()).collect()
}

fn metadata(json: Value) -> ObjectMeta {
    serde_json::from_value(json).unwrap()
}

fn virtual_machine(finalizers: &[&str], manager: &str) -> Instance {
    let owned: serde_json::Map<String, Value> =
        finalizers.iter().map(|name| (format!("v:\"{name}\""), json!({}))).collect();
    let resource = ApiResource {
        group: "kubevirt.io".to_owned(),
        version: "v1".to_owned(),
        api_version: "kubevirt.io/v1".to_owned(),
        kind: "VirtualMachine".to_owned(),
        plural: "virtualmachines".to_owned(),
    };
    let metadata = metadata(json!({
        "name": "vm", "namespace": "default", "uid": "vm", "finalizers": finalizers,
        "managedFields": [{"manager": manager, "fieldsV1": {"f:metadata": {"f:finalizers": owned}}}],
    }));
    Instance::new(Target::new(resource, ObjectKey::namespaced("default", "vm")), &metadata)
}

fn condition(cluster: &TestCluster, kind: &str) -> Value {
    let conditions = cluster.status()["conditions"].clone();
    let found = conditions.as_array().unwrap().iter().find(|condition| condition["type"] == kind).cloned();
    found.unwrap_or_default()
}

/// Kinds in the order in which their first object was deleted.
fn deleted_kinds(reconciles: &[Reconcile]) -> Vec<String> {
    let mut kinds: Vec<String> = Vec::new();
    for write in reconciles.iter().flat_map(Reconcile::writes) {
        // CRDs are deleted by lazy writes.
        let target = write.strip_prefix("Delete(").or_else(|| write.strip_prefix("LazyWrite("));
        let kind = target.and_then(|target| target.split_once(' '));
        if let Some((kind, _)) = kind.filter(|(kind, _)| !kinds.iter().any(|known| known == kind)) {
            kinds.push(kind.to_owned());
        }
    }
    kinds
}

#[test]
fn a_removal_deletes_everything_and_crds_first() {
    for name in ["default", "gates", "monitoring", "combined"] {
        let mut cluster = deleted(installed(&variant(name)));
        let mut reconciles = vec![remove(&mut cluster)];
        assert_eq!(cluster.status()["phase"], "Deleting", "{name}");
        let degraded = condition(&cluster, "Degraded");
        assert_eq!((&degraded["status"], &degraded["reason"]), (&json!("True"), &json!("DeletionInProgress")));
        assert_eq!(condition(&cluster, "Created"), Value::Null);
        assert!(cluster.has("Deployment", "virt-controller") && cluster.has("Secret", "kubevirt-ca"));
        for crd in crds(&cluster) {
            cluster.delete_instances(&crd);
        }
        // The API server deletes these with their CRDs.
        cluster.objects.retain(|(kind, _), _| !kind.starts_with("VirtualMachineCluster"));
        while cluster.status()["phase"] != "Deleted" {
            assert!(reconciles.len() < 8, "{name}: {:?}", reconciles.last().map(|last| last.outcome.clone()));
            reconciles.push(remove(&mut cluster));
        }
        let left: Vec<_> = cluster.objects.keys().filter(|(kind, _)| kind != "Namespace").collect();
        assert!(left.is_empty(), "{name}: {left:?}");
        let kinds = deleted_kinds(&reconciles);
        let webhooks = kinds.iter().position(|kind| kind == "ValidatingWebhookConfiguration").unwrap();
        let secrets = kinds.iter().position(|kind| kind == "Secret").unwrap();
        assert_eq!(kinds[0], CRD, "{name}");
        assert!(webhooks < secrets, "{name}: {kinds:?}");
        // The phase is visible before the resource is gone.
        let last = remove(&mut cluster);
        assert_eq!(last.writes(), ["Patch(KubeVirt kubevirt/kubevirt)"]);
        assert_eq!(cluster.kubevirt.metadata.finalizers, Some(Vec::new()));
    }
}

#[test]
fn no_crd_is_released_before_every_crd_has_no_objects() {
    let mut cluster = deleted(installed(&json!({})));
    remove(&mut cluster);
    let all = crds(&cluster);
    for crd in all.iter().filter(|crd| *crd != VMS) {
        cluster.delete_instances(crd);
    }
    assert_eq!(remove(&mut cluster).writes(), [""; 0]);
    assert_eq!(crds(&cluster), all);
    cluster.delete_instances(VMS);
    assert_eq!(remove(&mut cluster).writes().len(), all.len());
    assert_eq!(crds(&cluster), [""; 0]);
}

/// The API server forgets a CRD if its own update of the CRD conflicts with another one.
#[test]
fn a_crd_that_the_api_server_has_forgotten_is_touched_when_its_objects_are_gone() {
    let mut cluster = deleted(installed(&json!({})));
    let touched = |reconcile: &Reconcile| {
        let step = reconcile.plan.steps.iter().find(|step| step.name == "CRDs whose objects are gone");
        step.map(|step| step.writes.iter().map(|write| write.target().key.name().to_owned()).collect::<Vec<_>>())
    };
    for _ in 0..3 {
        assert_eq!(touched(&remove(&mut cluster)), None, "nothing is known of its objects");
    }
    cluster.empty_crds = vec![ObjectKey::cluster(VMS)];
    assert_eq!(touched(&remove(&mut cluster)), Some(vec![VMS.to_owned()]));
    let annotations = cluster.object(CRD, VMS)["metadata"]["annotations"].clone();
    assert!(annotations.get("kubevirt.io/removal-checked").is_some(), "{annotations}");
}

#[test]
fn a_blocked_removal_names_the_object_its_finalizer_and_its_manager() {
    let mut cluster = deleted(installed(&json!({})));
    let vm = virtual_machine(&["kubevirt.io/virtualMachineControllerFinalize", "example.com/keep"], "backup-tool");
    cluster.remove(RemovalMode::Operator, std::slice::from_ref(&vm), Vec::new());
    assert_eq!(condition(&cluster, "Synchronized"), Value::Null, "a short wait is normal");
    for _ in 0..11 {
        cluster.remove(RemovalMode::Operator, std::slice::from_ref(&vm), Vec::new());
    }
    let blocked = condition(&cluster, "Synchronized");
    let message = blocked["message"].as_str().unwrap();
    assert_eq!((&blocked["status"], &blocked["reason"]), (&json!("False"), &json!("DeletionBlocked")));
    assert!(message.contains("VirtualMachine default/vm") && message.contains("backup-tool"), "{message}");
    assert!(message.contains("example.com/keep") && !message.contains("ControllerFinalize"), "{message}");
    // The condition goes when the cause does.
    cluster.delete_instances(VMS);
    for crd in crds(&cluster).iter().filter(|crd| *crd != VMS) {
        cluster.delete_instances(crd);
    }
    while cluster.status()["phase"] != "Deleted" {
        cluster.objects.retain(|(kind, _), _| !kind.starts_with("VirtualMachineCluster"));
        remove(&mut cluster);
    }
    assert_eq!(condition(&cluster, "Synchronized"), Value::Null);
}

#[test]
fn an_object_with_a_foreign_finalizer_is_named() {
    let mut cluster = deleted(installed(&json!({})));
    for crd in crds(&cluster) {
        cluster.objects.remove(&(CRD.to_owned(), ObjectKey::cluster(&crd)));
    }
    cluster.objects.retain(|(kind, _), _| !kind.starts_with("VirtualMachineCluster"));
    cluster.object("Service", "virt-api")["metadata"]["finalizers"] = json!(["example.com/balancer"]);
    for _ in 0..13 {
        remove(&mut cluster);
    }
    let message = condition(&cluster, "Synchronized")["message"].to_string();
    assert!(message.contains("Service kubevirt/virt-api has the finalizer example.com/balancer"), "{message}");
    assert!(!cluster.has("Secret", "kubevirt-ca"), "only this object is left");
}

#[test]
fn webhooks_of_a_dead_virt_api_are_deleted_while_objects_are_left() {
    let mut cluster = deleted(installed(&json!({})));
    cluster.object("Deployment", "virt-api")["status"]["readyReplicas"] = json!(0);
    remove(&mut cluster);
    assert!(cluster.has("ValidatingWebhookConfiguration", "virt-api-validator"), "the CRDs are not being deleted yet");
    let writes = remove(&mut cluster).writes();
    assert!(!cluster.has("ValidatingWebhookConfiguration", "virt-api-validator"), "{writes:?}");
    assert!(!cluster.has("MutatingWebhookConfiguration", "virt-api-mutator"));
    assert!(cluster.has("ValidatingWebhookConfiguration", "virt-operator-validator"), "the operator runs");
    assert!(cluster.has("APIService", "v1.subresources.kubevirt.io"));
}

#[test]
fn webhooks_of_a_running_virt_api_are_kept_while_objects_are_left() {
    let mut cluster = deleted(installed(&json!({})));
    remove(&mut cluster);
    remove(&mut cluster);
    assert!(cluster.has("ValidatingWebhookConfiguration", "virt-api-validator"));
}

/// The resource was deleted while it was installed, or before anything was.
#[test]
fn a_part_of_an_installation_is_removed() {
    let mut cluster = TestCluster::new(&json!({}));
    cluster.rolls_out = false;
    cluster.reconcile();
    cluster.objects.retain(|(kind, _), _| ["Secret", "ServiceAccount"].contains(&kind.as_str()));
    let mut cluster = deleted(cluster);
    for _ in 0..3 {
        remove(&mut cluster);
    }
    assert!(cluster.objects.is_empty());
    assert_eq!(cluster.kubevirt.metadata.finalizers, Some(Vec::new()));
}

#[test]
fn objects_of_other_clients_stay() {
    let mut cluster = installed(&json!({}));
    let label = json!({"app.kubernetes.io/managed-by": "virt-operator"});
    for (kind, namespace, name) in [
        ("Role", "tenant", "labelled"),
        ("Deployment", "kubevirt", "virt-operator"),
        ("ServiceAccount", "kubevirt", "kubevirt-operator"),
        ("RoleBinding", "kubevirt", "kubevirt-operator-rolebinding"),
    ] {
        let object = json!({
            "kind": kind, "metadata": {"name": name, "namespace": namespace, "labels": label},
            "spec": {"template": {"spec": {}}},
        });
        cluster.put(kind, ObjectKey::namespaced(namespace, name), object, "helm");
    }
    cluster.put(
        CRD,
        ObjectKey::cluster("kubevirts.kubevirt.io"),
        json!({
            "kind": CRD, "metadata": {"name": "kubevirts.kubevirt.io", "labels": label},
            "spec": {"names": {"kind": "KubeVirt"}},
        }),
        "helm",
    );
    let mut cluster = deleted(cluster);
    cluster.objects.retain(|(kind, key), _| kind != CRD || key.name() == "kubevirts.kubevirt.io");
    cluster.objects.retain(|(kind, _), _| !kind.starts_with("VirtualMachineCluster"));
    for _ in 0..3 {
        remove(&mut cluster);
    }
    let left: Vec<String> = cluster.objects.keys().map(|(kind, key)| format!("{kind} {key}")).collect();
    assert_eq!(
        left,
        [
            "CustomResourceDefinition kubevirts.kubevirt.io",
            "Deployment kubevirt/virt-operator",
            "Namespace kubevirt",
            "Role tenant/labelled",
            "RoleBinding kubevirt/kubevirt-operator-rolebinding",
            "ServiceAccount kubevirt/kubevirt-operator",
        ]
    );
}

#[test]
fn a_node_is_cleaned_with_one_write_and_keeps_what_users_set() {
    let node = MarkedNode::new(&metadata(json!({
        "name": "a", "uid": "n",
        "labels": {"kubevirt.io/schedulable": "true", "cpu-model.node.kubevirt.io/Haswell": "true",
            "cpumanager": "false", "kubernetes.io/os": "linux"},
        "annotations": {"kubevirt.io/heartbeat": "x", "node-labeller.kubevirt.io/skip-node": "true"},
    })));
    let mut cluster = deleted(TestCluster::new(&json!({})));
    let reconcile = cluster.remove(RemovalMode::Operator, &[], vec![node.unwrap()]);
    let [vitivirt_api::Write::Patch { operations, .. }] = reconcile.plan.steps[0].writes.as_slice() else {
        panic!("{:?}", reconcile.plan);
    };
    let paths: Vec<&str> = operations.iter().map(|operation| operation.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "/metadata/labels/cpu-model.node.kubevirt.io~1Haswell",
            "/metadata/labels/cpumanager",
            "/metadata/labels/kubevirt.io~1schedulable",
            "/metadata/annotations/kubevirt.io~1heartbeat",
        ]
    );
    let clean = json!({"name": "b", "labels": {"kubernetes.io/os": "linux", "cpumanager": "enabled"}});
    assert_eq!(MarkedNode::new(&metadata(clean)), None);
}

/// A pod that ends labels its node once more, as not schedulable.
#[test]
fn nodes_are_cleaned_when_no_virt_handler_runs_on_them() {
    let node =
        || MarkedNode::new(&metadata(json!({"name": "a", "uid": "n", "labels": {"kubevirt.io/schedulable": "true"}})));
    let mut cluster = deleted(TestCluster::new(&json!({})));
    let handler = |deleted: Option<Timestamp>| {
        let mut handler = pod("DaemonSet", "virt-handler", "a", &json!({}));
        handler["metadata"]["deletionTimestamp"] = json!(deleted.map(|time| time.to_string()));
        pods(&[handler], &[])
    };
    for deleted in [None, Some(cluster.now)] {
        cluster.pods = handler(deleted);
        let reconcile = cluster.remove(RemovalMode::Operator, &[], vec![node().unwrap()]);
        assert_eq!(reconcile.writes(), [""; 0]);
        let Stop::Waiting { wait, .. } = reconcile.outcome.stop else { panic!("{:?}", reconcile.outcome) };
        assert!(wait.message.contains("pod kubevirt/pod-a on node a"), "{}", wait.message);
    }
    // Its kubelet does not answer.
    cluster.pods = handler(Some(cluster.now - SignedDuration::from_secs(60)));
    let reconcile = cluster.remove(RemovalMode::Operator, &[], vec![node().unwrap()]);
    assert_eq!(reconcile.plan.steps[0].writes.len(), 1, "{:?}", reconcile.plan);
}

#[test]
fn a_deleted_namespace_is_released_without_waiting() {
    let mut cluster = installed(&json!({}));
    let writes = cluster.remove(RemovalMode::NamespaceDeleted(Workloads::None), &[], Vec::new()).writes();
    assert!(writes[0].contains("WebhookConfiguration"), "{:?}", writes.first());
    // Nothing keeps the CRDs, so the API server deletes them at once.
    assert_eq!(crds(&cluster), [""; 0]);
    assert!(!cluster.has("ClusterRole", "kubevirt-handler"));
    assert_eq!(cluster.kubevirt.metadata.finalizers, Some(Vec::new()));
}

/// The resource is kept as long as the operator can still remove the finalizers of VMs.
#[test]
fn a_deleted_namespace_is_released_when_vms_are_gone() {
    let mut cluster = deleted(installed(&json!({})));
    // Another removal has begun.
    remove(&mut cluster);
    let mode = RemovalMode::NamespaceDeleted(Workloads::Deleted);
    let own = ["kubevirt.io/virtualMachineControllerFinalize"];
    let plan = cluster.remove_plan(mode, &[virtual_machine(&own, "virt-controller")]);
    let writes: Vec<String> =
        plan.steps.iter().flat_map(|step| &step.writes).map(|write| format!("{write:?}")).collect();
    assert!(writes.iter().any(|write| write == "Patch(VirtualMachine default/vm)"), "{writes:?}");
    assert!(!writes.iter().any(|write| write.contains("KubeVirt kubevirt/kubevirt")), "{writes:?}");
    for crd in crds(&cluster) {
        cluster.delete_instances(&crd);
    }
    cluster.remove(mode, &[], Vec::new());
    cluster.remove(mode, &[], Vec::new());
    assert_eq!(cluster.kubevirt.metadata.finalizers, Some(Vec::new()));
}

#[test]
fn a_deleted_namespace_is_released_and_protected_workloads_stay() {
    let mut cluster = installed(&json!({"uninstallStrategy": "BlockUninstallIfWorkloadsExist"}));
    let before = crds(&cluster);
    cluster.remove(RemovalMode::NamespaceDeleted(Workloads::Protected), &[], Vec::new());
    assert_eq!(crds(&cluster), before);
    assert!(!cluster.has("ValidatingWebhookConfiguration", "virt-api-validator"));
    assert!(cluster.has("ClusterRole", "kubevirt-handler"));
    assert_eq!(cluster.kubevirt.metadata.finalizers, Some(Vec::new()));
}

/// The names of the finalizers that a removal leaves on a VM with one of KubeVirt and one of another client.
fn finalizers_after(cluster: &mut TestCluster, mode: RemovalMode) -> Option<Value> {
    let vm = virtual_machine(&["kubevirt.io/virtualMachineControllerFinalize", "example.com/keep"], "x");
    let plan = cluster.remove_plan(mode, &[vm]);
    let mut patches = plan.steps.iter().flat_map(|step| &step.writes).filter_map(|write| match write {
        vitivirt_api::Write::Patch { target, operations, .. } if target.resource.kind == "VirtualMachine" => {
            Some(operations[0].value.clone().unwrap_or_default())
        }
        _ => None,
    });
    patches.next()
}

#[test]
fn finalizers_that_no_component_removes_are_stripped() {
    let mut cluster = deleted(installed(&json!({})));
    let force = RemovalMode::Command { force: true };
    let gentle = RemovalMode::Command { force: false };
    assert_eq!(finalizers_after(&mut cluster, RemovalMode::Operator), None);
    assert_eq!(finalizers_after(&mut cluster, gentle), None, "virt-controller runs");
    let own = json!(["kubevirt.io/virtualMachineControllerFinalize"]);
    assert_eq!(finalizers_after(&mut cluster, force), Some(own));
    cluster.objects.remove(&("Deployment".to_owned(), ObjectKey::namespaced("kubevirt", "virt-controller")));
    assert_eq!(finalizers_after(&mut cluster, RemovalMode::Operator), None);
    assert_eq!(finalizers_after(&mut cluster, gentle), Some(json!(["example.com/keep"])));
    assert_eq!(finalizers_after(&mut cluster, force), Some(Value::Null));
}
