//! Edits of the KubeVirt resource: afterwards the cluster equals a fresh installation of the last one.

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::{Value, json};
use vitivirt_install::testing::random_spec;
use vitivirt_snapshot::Snapshot;

use super::{Reconcile, installed, test_cluster::TestCluster, variant};

/// Every object of the installation, without what differs between two installations of the same resource.
pub(super) fn snapshot(cluster: &TestCluster) -> Snapshot {
    let objects = cluster.objects.iter().filter(|((kind, _), _)| kind != "Namespace").map(|((kind, key), object)| {
        let mut object = Value::clone(object);
        object["kind"] = json!(kind);
        (format!("{kind} {key}"), vitivirt_snapshot::normalise(object))
    });
    // The name of this ConfigMap contains the identifier of the deployment.
    let (strategies, mut objects): (Snapshot, Snapshot) =
        objects.partition(|(key, _)| key.contains("kubevirt-install-strategy"));
    objects.insert("install strategies".to_owned(), json!(strategies.len()));
    objects
}

fn with_monitoring(spec: &Value) -> TestCluster {
    let mut cluster = TestCluster::new(spec);
    cluster.cluster.service_monitors = true;
    cluster.cluster.prometheus_rules = true;
    set_monitor_namespace(&mut cluster, spec);
    cluster
}

/// The monitoring stack is where the resource expects it.
fn set_monitor_namespace(cluster: &mut TestCluster, spec: &Value) {
    cluster.cluster.monitor_namespace = Some(spec["monitorNamespace"].as_str().unwrap_or("monitoring").to_owned());
}

fn check_equal_to_fresh_installation(cluster: &TestCluster, spec: &Value) -> Result<(), TestCaseError> {
    let mut fresh = with_monitoring(spec);
    fresh.settle();
    let comparison = vitivirt_snapshot::compare(&snapshot(&fresh), &snapshot(cluster));
    prop_assert!(comparison.is_equal(), "{comparison}\n{}", comparison.details(5));
    Ok(())
}

/// Pods that restart belong to the deployment that restarted them, also if a field was only removed from their template.
#[test]
fn pods_that_restart_because_a_field_was_removed_have_the_new_identity() {
    let mut cluster = installed(&json!({}));
    let pull_secrets = json!({"imagePullSecrets": [{"name": "registry"}]});
    for spec in [&pull_secrets, &json!({})] {
        cluster.edit(spec);
        cluster.settle();
        let status = cluster.status();
        assert_eq!(status["observedDeploymentID"], status["targetDeploymentID"]);
        for (kind, name) in
            [("Deployment", "virt-api"), ("Deployment", "virt-controller"), ("DaemonSet", "virt-handler")]
        {
            let template = &cluster.object(kind, name)["spec"]["template"];
            assert_eq!(template["spec"].get("imagePullSecrets"), spec.get("imagePullSecrets"), "{kind} {name}");
            let identity = &template["metadata"]["annotations"]["kubevirt.io/install-strategy-identifier"];
            assert_eq!(*identity, status["observedDeploymentID"], "{kind} {name} with {spec}");
        }
    }
}

/// What happens after an edit.
#[derive(Clone, Copy, Debug)]
enum Then {
    Settles,
    /// The next edit follows after this many reconciles, while pods do not start.
    IsReplacedAfter(usize),
    OperatorRestartsAfter(usize),
}

fn then() -> impl Strategy<Value = Then> {
    prop_oneof![
        3 => Just(Then::Settles),
        2 => (0..3usize).prop_map(Then::IsReplacedAfter),
        1 => (0..3usize).prop_map(Then::OperatorRestartsAfter),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, max_shrink_iters: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn after_any_edits_the_cluster_equals_a_fresh_installation(
        edits in prop::collection::vec((any::<u64>(), then()), 1..5),
        last in any::<u64>(),
    ) {
        let first = random_spec(edits[0].0);
        let mut cluster = with_monitoring(&first);
        cluster.settle();
        for (seed, then) in edits.into_iter().skip(1) {
            let spec = random_spec(seed);
            set_monitor_namespace(&mut cluster, &spec);
            cluster.edit(&spec);
            match then {
                Then::Settles => drop(cluster.settle()),
                Then::IsReplacedAfter(reconciles) => (0..reconciles).for_each(|_| drop(cluster.reconcile())),
                Then::OperatorRestartsAfter(reconciles) => {
                    (0..reconciles).for_each(|_| drop(cluster.reconcile()));
                    cluster.restart();
                }
            }
        }
        let last = random_spec(last);
        set_monitor_namespace(&mut cluster, &last);
        cluster.edit(&last);
        cluster.settle();
        check_equal_to_fresh_installation(&cluster, &last)?;
        cluster.restart();
        let reconcile = cluster.reconcile();
        prop_assert!(reconcile.is_silent(), "{:?}", reconcile.writes());
    }
}

/// The lanes are independent: one may see an edit that the lane with the status never sees.
#[test]
fn an_edit_that_only_the_lane_monitoring_has_seen_leaves_nothing() {
    let last = json!({});
    let mut cluster = with_monitoring(&last);
    cluster.settle();
    let replaced = json!({"monitorNamespace": "observability"});
    set_monitor_namespace(&mut cluster, &replaced);
    cluster.edit(&replaced);
    cluster.reconcile_monitoring();
    set_monitor_namespace(&mut cluster, &last);
    cluster.edit(&last);
    cluster.settle();
    check_equal_to_fresh_installation(&cluster, &last).unwrap();
}

/// The edits that are in users' reports and in upstream's own tests.
#[test]
fn a_setting_that_is_taken_back_leaves_nothing() {
    let placement = json!({"nodePlacement": {"nodeSelector": {"example.com/none": "x"}}});
    for spec in [
        json!({"workloads": placement}),
        json!({"infra": placement}),
        json!({"imagePullSecrets": [{"name": "a"}]}),
        json!({"configuration": {"migrations": {"network": "migration"}}}),
        json!({"productName": "shop", "productVersion": "1"}),
        variant("customize"),
        variant("gates"),
    ] {
        let mut cluster = installed(&json!({}));
        let before = snapshot(&cluster);
        cluster.edit(&spec);
        cluster.settle();
        let during = snapshot(&cluster);
        assert!(!vitivirt_snapshot::compare(&before, &during).is_equal(), "{spec} has no effect");
        cluster.edit(&json!({}));
        cluster.settle();
        let comparison = vitivirt_snapshot::compare(&before, &snapshot(&cluster));
        assert!(comparison.is_equal(), "{spec}: {comparison}\n{}", comparison.details(5));
        assert_eq!(cluster.no_op_patches, [""; 0], "{spec}: the record shows what must change");
    }
}

/// The record is written when an installation is complete, and this edit never is.
#[test]
fn an_edit_that_never_completes_leaves_nothing() {
    let mut cluster = installed(&json!({}));
    let before = snapshot(&cluster);
    cluster.rolls_out = false;
    cluster.edit(&json!({"imagePullSecrets": [{"name": "a"}]}));
    cluster.reconcile();
    assert_eq!(
        cluster.object("Deployment", "virt-api")["spec"]["template"]["spec"]["imagePullSecrets"][0]["name"],
        "a"
    );
    cluster.edit(&json!({}));
    cluster.rolls_out = true;
    cluster.settle();
    let comparison = vitivirt_snapshot::compare(&before, &snapshot(&cluster));
    assert!(comparison.is_equal(), "{comparison}\n{}", comparison.details(5));
}

#[test]
fn labels_and_annotations_of_other_clients_are_kept() {
    let patches = json!([{"resourceType": "Deployment", "resourceName": "virt-api", "type": "merge",
        "patch": r#"{"metadata": {"labels": {"both": "1", "ours": "1"}}}"#}]);
    let mut cluster = installed(&json!({"customizeComponents": {"patches": patches}}));
    let id = cluster.objects.keys().find(|(kind, key)| kind == "Deployment" && key.name() == "virt-api").cloned();
    cluster.change_as("kubectl-label", &id.unwrap(), |object| {
        object["metadata"]["labels"]["theirs"] = json!("1");
        object["metadata"]["annotations"]["theirs"] = json!("1");
    });
    cluster.edit(&json!({}));
    cluster.settle();
    let metadata = &cluster.object("Deployment", "virt-api")["metadata"];
    assert_eq!((&metadata["labels"]["theirs"], &metadata["annotations"]["theirs"]), (&json!("1"), &json!("1")));
    assert_eq!((metadata["labels"].get("ours"), metadata["labels"].get("both")), (None, None));
}

/// Upstream virt-operator records generations of a few kinds, and no digests.
#[test]
fn an_installation_without_digests_costs_one_equal_patch_per_object() {
    for name in ["default", "customize"] {
        let mut cluster = installed(&variant(name));
        let before = snapshot(&cluster);
        let status = cluster.kubevirt.status.as_mut().unwrap();
        let recorded = ["apiextensions.k8s.io/v1", "admissionregistration.k8s.io", "apps"];
        status.generations.retain(|generation| recorded.contains(&generation.group.as_str()));
        status.generations.iter_mut().for_each(|generation| generation.hash.clear());
        cluster.restart();
        cluster.settle();
        let patched: BTreeSet<&String> = cluster.no_op_patches.iter().collect();
        assert_eq!(patched.len(), cluster.no_op_patches.len(), "{:?}", cluster.no_op_patches);
        assert!(!patched.iter().any(|target| target.starts_with("CustomResourceDefinition")), "{patched:?}");
        assert!(vitivirt_snapshot::compare(&before, &snapshot(&cluster)).is_equal());
        cluster.restart();
        assert_eq!(cluster.settle().iter().flat_map(Reconcile::writes).collect::<Vec<_>>(), [""; 0], "{name}");
    }
}

#[test]
fn a_restart_by_a_user_takes_effect_and_is_kept() {
    const RESTARTED_AT: &str = "kubectl.kubernetes.io/restartedAt";
    let mut cluster = installed(&json!({}));
    for (kind, name) in [("Deployment", "virt-controller"), ("DaemonSet", "virt-handler")] {
        let id = cluster.objects.keys().find(|(other, key)| other == kind && key.name() == name).cloned().unwrap();
        cluster.change_as("kubectl-rollout", &id, |object| {
            object["spec"]["template"]["metadata"]["annotations"][RESTARTED_AT] = json!("now");
        });
        assert_eq!(cluster.settle().iter().flat_map(Reconcile::writes).collect::<Vec<_>>(), [""; 0]);
        cluster.restart();
        assert!(cluster.reconcile().is_silent());
    }
    cluster.edit(&json!({"customizeComponents": {"flags": {"controller": {"v": "4"}, "handler": {"v": "4"}}}}));
    cluster.settle();
    for (kind, name) in [("Deployment", "virt-controller"), ("DaemonSet", "virt-handler")] {
        let annotations = &cluster.object(kind, name)["spec"]["template"]["metadata"]["annotations"];
        assert_eq!(annotations[RESTARTED_AT], "now", "{name}");
    }
}
