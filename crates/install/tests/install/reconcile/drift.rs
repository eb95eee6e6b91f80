//! Changes by other clients: deletions, edits, and objects that others created.

use std::collections::BTreeSet;

use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};
use vitivirt_api::ObjectKey;
use vitivirt_install::{Cluster, Kind};

use super::{
    edits::snapshot,
    installed, installed_from,
    test_cluster::{Reconcile, TestCluster},
    variant,
};

/// An installation with objects of every kind, in a cluster that serves every optional kind.
fn with_every_kind() -> TestCluster {
    let mut cluster = TestCluster::new(&variant("gates"));
    cluster.cluster = Cluster {
        monitor_namespace: Some("monitoring".to_owned()),
        ..Cluster::from_kinds(|_| true, cluster.cluster.schedulable_nodes)
    };
    cluster.settle();
    let kinds: BTreeSet<&str> = cluster.objects.keys().map(|(kind, _)| kind.as_str()).collect();
    // A Job exists only while the strategy of another release is dumped.
    let missing = Kind::ALL.iter().filter(|kind| **kind != Kind::Job && !kinds.contains(kind.name()));
    assert_eq!(missing.collect::<Vec<_>>(), [&Kind::Job; 0]);
    cluster
}

#[test]
fn every_deleted_object_is_created_again_with_one_write() {
    let base = with_every_kind();
    let ids: Vec<_> = base.objects.keys().filter(|(kind, _)| kind != "Namespace").cloned().collect();
    assert!(ids.len() > 200);
    // The ConfigMap of the install strategy is recreated, not repaired.
    let ids = ids.into_iter().filter(|(_, key)| !key.name().starts_with("kubevirt-install-strategy"));
    for (index, id) in ids.enumerate() {
        // These objects are all alike.
        if id.0.starts_with("VirtualMachineCluster") && index % 20 != 0 {
            continue;
        }
        let mut cluster = installed_from(&base);
        cluster.objects.remove(&id);
        let writes: Vec<String> = cluster.settle().iter().flat_map(Reconcile::writes).collect();
        assert_eq!(writes.len(), 1, "{id:?}: {writes:?}");
    }
}

const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
const GENERATION: &str = "kubevirt.io/generation";
const IDENTITY: [&str; 3] = [
    "kubevirt.io/install-strategy-identifier",
    "kubevirt.io/install-strategy-registry",
    "kubevirt.io/install-strategy-version",
];

fn remove(object: &mut Value, parent: &str, key: &str) -> Option<Value> {
    object.pointer_mut(parent)?.as_object_mut()?.remove(key)
}

/// For every way in which another client may change an object, and all objects at once.
#[test]
fn every_kind_of_drift_is_repaired_on_every_object_with_one_write() {
    let base = with_every_kind();
    let expected = snapshot(&base);
    let ids: Vec<_> = base
        .objects
        .keys()
        .filter(|(kind, key)| kind != "Namespace" && !key.name().starts_with("kubevirt-install-strategy"))
        .cloned()
        .collect();
    let is_service_account = |object: &Value| object["kind"] == "ServiceAccount";
    type Edit<'a> = &'a dyn Fn(&mut Value);
    let drifts: [(&str, &str, Edit<'_>); 11] = [
        ("content changed", "kubectl-edit", &|object| {
            if !is_service_account(object) {
                edit_content(object);
            }
        }),
        ("label changed", "kubectl-label", &|object| {
            object["metadata"]["labels"]["app.kubernetes.io/component"] = json!("else");
        }),
        ("label removed", "kubectl-label", &|object| drop(remove(object, "/metadata/labels", MANAGED_BY))),
        ("annotation changed", "kubectl-annotate", &|object| {
            object["metadata"]["annotations"][IDENTITY[2]] = json!("v0");
        }),
        ("annotation removed", "kubectl-annotate", &|object| {
            drop(remove(object, "/metadata/annotations", IDENTITY[1]));
        }),
        ("generation changed", "kubectl-annotate", &|object| {
            object["metadata"]["annotations"][GENERATION] = json!("0");
        }),
        ("owner added", "kubectl-edit", &|object| {
            object["metadata"]["ownerReferences"] =
                json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": "u"}]);
        }),
        ("marks lost", "kubectl-edit", &|object| {
            remove(object, "/metadata/labels", MANAGED_BY);
            IDENTITY.iter().for_each(|key| drop(remove(object, "/metadata/annotations", key)));
        }),
        ("field removed", "kubectl-edit", &remove_field),
        // `managedFields` do not show that it is not a default.
        ("field added under our name", "virt-operator", &|object| {
            if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
                spec.insert("added".to_owned(), json!("x"));
            }
        }),
        ("label added under our name", "virt-operator", &|object| object["metadata"]["labels"]["stale"] = json!("x")),
    ];
    for (what, manager, drift) in drifts {
        let mut cluster = installed_from(&base);
        let changed: Vec<String> = ids
            .iter()
            .filter(|id| cluster.change_as(manager, id, drift))
            .map(|(kind, key)| format!("({kind} {key})"))
            .collect();
        assert!(changed.len() > 20, "{what}: {}", changed.len());
        let writes: Vec<String> = cluster.settle().iter().flat_map(Reconcile::writes).collect();
        for target in &changed {
            let own: Vec<&String> = writes.iter().filter(|write| write.ends_with(target)).collect();
            assert_eq!(own.len(), 1, "{what}: {target}: {own:?}");
        }
        assert_eq!(writes.len(), changed.len(), "{what}");
        let comparison = vitivirt_snapshot::compare(&expected, &snapshot(&cluster));
        assert!(comparison.is_equal(), "{what}: {comparison}\n{}", comparison.details(5));
        assert_eq!(cluster.no_op_patches, [""; 0], "{what}");
        cluster.restart();
        assert!(cluster.reconcile().is_silent(), "{what}");
    }
}

/// Removes a field that the operator has set.
fn remove_field(object: &mut Value) {
    for pointer in [
        "/spec/selector",
        "/spec/groups",
        "/spec/to/name",
        "/users",
        "/spec/template/spec/containers/0/image",
        "/rules/0/verbs",
        "/data/ca-bundle",
        "/data/tls.crt",
        "/webhooks/0/failurePolicy",
        "/spec/service/name",
        "/spec/names/shortNames",
        "/spec/policyName",
        "/spec/cpu",
    ] {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        if remove(object, parent, key).is_some() {
            return;
        }
    }
}

/// Another controller answers each repair at once.
#[test]
fn a_fight_with_another_client_is_limited_and_reported() {
    let mut cluster = installed(&json!({}));
    cluster.now += SignedDuration::from_hours(1);
    let id = ("Deployment".to_owned(), ObjectKey::namespaced("kubevirt", "virt-controller"));
    let mut writes = Vec::new();
    let mut events = Vec::new();
    let start = cluster.now;
    // One reconcile per second.
    for second in 0..200 {
        cluster.change_as("scaler", &id, |object| object["spec"]["replicas"] = json!(7));
        cluster.roll_out();
        let reconcile = cluster.reconcile();
        let writes_now = reconcile.writes();
        assert!(writes_now.len() <= 1, "{writes_now:?}");
        writes.extend(writes_now.iter().map(|_| second));
        events.extend(reconcile.report.events);
        if writes_now.is_empty() {
            assert!(reconcile.report.requeue_after.unwrap().as_secs() <= 60);
        }
    }
    assert_eq!(cluster.now.duration_since(start), SignedDuration::from_secs(200));
    assert_eq!(writes.iter().filter(|second| **second < 60).count(), 10, "{writes:?}");
    assert_eq!(writes.len(), 13, "{writes:?}");
    let event = &events.iter().find(|event| event.reason == "RepeatedDrift").unwrap().message;
    assert!(event.contains("Deployment kubevirt/virt-controller") && event.contains("(scaler)"), "{event}");
    // The state of the other client is never recorded as the desired one, also not for a restarted operator.
    cluster.restart();
    cluster.settle();
    assert_eq!(cluster.object("Deployment", "virt-controller")["spec"]["replicas"], 2);
    // A new desired state is written at once.
    for _ in 0..12 {
        cluster.change_as("scaler", &id, |object| object["spec"]["replicas"] = json!(7));
        cluster.reconcile();
        cluster.roll_out();
    }
    assert_eq!(cluster.object("Deployment", "virt-controller")["spec"]["replicas"], 7, "the repair is delayed");
    cluster.edit(&json!({"infra": {"replicas": 3}}));
    cluster.settle();
    assert_eq!(cluster.object("Deployment", "virt-controller")["spec"]["replicas"], 3);
}

/// Users and other projects deploy them too.
#[test]
fn instancetypes_of_other_clients_are_adopted() {
    let mut cluster = TestCluster::new(&json!({}));
    let expected = snapshot(&installed(&json!({})));
    let foreign = |kind: &str, name: &str| {
        json!({"apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": kind, "spec": {"cpu": {"guest": 77}}, "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/managed-by": "someone", "mine": "yes"},
            "annotations": {"mine": "yes", GENERATION: "unknown"},
        }})
    };
    for (kind, name) in
        [("VirtualMachineClusterInstancetype", "u1.small"), ("VirtualMachineClusterPreference", "fedora")]
    {
        cluster.put(kind, ObjectKey::cluster(name), foreign(kind, name), "helm");
    }
    cluster.settle();
    assert_eq!(cluster.status()["phase"], "Deployed");
    let comparison = vitivirt_snapshot::compare(&expected, &snapshot(&cluster));
    assert!(comparison.is_equal(), "{comparison}\n{}", comparison.details(5));
    let name = "u1.small";
    let annotations = &cluster.object("VirtualMachineClusterInstancetype", name)["metadata"]["annotations"];
    assert_eq!(annotations[GENERATION], "1");
}

/// Upstream virt-operator finds them by their labels alone.
#[test]
fn instancetypes_with_the_labels_of_the_installation_are_deleted_if_the_release_does_not_have_them() {
    let mut cluster = installed(&json!({}));
    let labels = |component: &str, manager: &str| json!({"app.kubernetes.io/component": component, "app.kubernetes.io/managed-by": manager});
    let kind = "VirtualMachineClusterPreference";
    for (name, labels) in [
        ("orphan", labels("kubevirt", "virt-operator")),
        ("of-another-component", labels("something", "virt-operator")),
        ("of-another-manager", labels("kubevirt", "someone")),
    ] {
        let object = json!({"apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": kind, "spec": {},
                            "metadata": {"name": name, "labels": labels}});
        cluster.put(kind, ObjectKey::cluster(name), object, "kubectl");
    }
    let writes: Vec<String> = cluster.settle().iter().flat_map(Reconcile::writes).collect();
    assert_eq!(writes, [format!("Delete({kind} orphan)")]);
}

/// Another client deletes an object that has a finalizer. It is created again when it is gone.
#[test]
fn an_object_of_any_kind_that_is_being_deleted_is_created_again() {
    let base = with_every_kind();
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Job) {
        let id = base.objects.keys().find(|(other, _)| other == kind.name()).unwrap();
        let mut cluster = installed_from(&base);
        cluster.object_by_id(id)["metadata"]["deletionTimestamp"] = json!("2030-01-01T00:00:00Z");
        for _ in 0..2 {
            assert_eq!(cluster.reconcile().writes(), [""; 0], "{id:?}");
        }
        cluster.objects.remove(id);
        let writes: Vec<String> = cluster.settle().iter().flat_map(Reconcile::writes).collect();
        // A CRD is a lazy write, which does not show that it creates the CRD.
        let target = format!("({} {})", id.0, id.1);
        assert!(matches!(&writes[..], [only] if only.ends_with(&target)), "{target}: {writes:?}");
        assert!(cluster.object_by_id(id)["metadata"].get("deletionTimestamp").is_none());
        assert_eq!(cluster.status()["phase"], "Deployed", "{id:?}");
    }
}

/// Changes one value of the content.
fn edit_content(object: &mut Value) {
    const SKIPPED: [&str; 6] = ["apiVersion", "kind", "metadata", "status", "roleRef", "type"];
    let mut fields = object.as_object_mut().unwrap().iter_mut();
    assert!(fields.any(|(key, value)| !SKIPPED.contains(&key.as_str()) && change_first(value)));
}

/// Changes the first text or number.
fn change_first(value: &mut Value) -> bool {
    // The API server assigns these fields of a Service.
    const ASSIGNED: [&str; 4] = ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"];
    match value {
        Value::Object(map) => {
            map.iter_mut().any(|(key, value)| !ASSIGNED.contains(&key.as_str()) && change_first(value))
        }
        Value::Array(list) => list.iter_mut().any(change_first),
        Value::String(text) => {
            text.push('x');
            true
        }
        Value::Number(number) => {
            *value = json!(number.as_i64().unwrap_or_default() + 1);
            true
        }
        _ => false,
    }
}
