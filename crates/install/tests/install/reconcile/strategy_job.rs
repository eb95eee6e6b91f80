//! The install strategy of another release, which a Job writes.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::SignedDuration};
use serde_json::json;
use vitivirt_api::Stop;
use vitivirt_install::{DeploymentConfig, InstallStrategy, config_map, removal::RemovalMode};

use super::{
    installed,
    test_cluster::{Reconcile, TestCluster},
};

#[test]
fn the_install_strategy_of_another_release_is_dumped_by_a_job() {
    let mut cluster = TestCluster::new(&json!({"imageTag": "v1.9.0"}));
    let reconcile = cluster.reconcile();
    let jobs: Vec<String> = reconcile.writes().into_iter().filter(|write| write.contains("Job")).collect();
    assert_eq!(jobs.len(), 1);
    assert!(
        matches!(&reconcile.outcome.stop, Stop::Waiting { wait, .. } if wait.message.contains("virt-operator:v1.9.0"))
    );
    assert_eq!(cluster.reconcile().writes(), [""; 0], "the Job is created once");
    // The Job fails: the failure is reported, and the Job is created again after a while.
    let job = cluster.objects.keys().find(|(kind, _)| kind == "Job").cloned().unwrap();
    let job_status =
        json!({"conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": cluster.now.to_string()}]});
    cluster.object_by_id(&job)["status"] = job_status;
    let reconcile = cluster.reconcile();
    assert!(matches!(&reconcile.outcome.stop, Stop::Waiting { wait, .. } if wait.message.contains("failed")
        && wait.requeue_after.is_some()));
    cluster.now += SignedDuration::from_secs(60);
    cluster.reconcile();
    assert!(!cluster.objects.contains_key(&job));
    cluster.reconcile();
    assert!(cluster.objects.contains_key(&job));
    // The Job succeeds: its strategy is installed, and the Job is deleted.
    let config = DeploymentConfig::new(&cluster.kubevirt, &cluster.environment);
    let strategy = InstallStrategy::generate(&config, None, None).unwrap();
    let map = serde_json::to_value(config_map(&config, &strategy).unwrap()).unwrap();
    cluster.put("ConfigMap", config.strategy_key(), map, "other");
    let job_status =
        json!({"conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": cluster.now.to_string()}]});
    cluster.object_by_id(&job)["status"] = job_status;
    cluster.settle();
    assert_eq!(cluster.status()["observedKubeVirtVersion"], "v1.9.0");
    assert!(!cluster.objects.contains_key(&job));
    // The strategy is lost and must be dumped again. What is installed keeps running.
    cluster.objects.remove(&("ConfigMap".to_owned(), config.strategy_key()));
    cluster.reconcile();
    assert!(cluster.objects.contains_key(&job));
    let conditions = cluster.status()["conditions"].clone();
    let available = conditions.as_array().unwrap().iter().find(|condition| condition["type"] == "Available").unwrap();
    assert_eq!((&available["status"], &available["reason"]), (&json!("True"), &json!("AllComponentsReady")));
}

/// A mistyped imageTag on a cluster without an installation: only the Job and its permissions exist.
#[test]
fn a_resource_whose_strategy_is_missing_can_be_deleted_with_its_job() {
    let mut cluster = TestCluster::new(&json!({"imageTag": "v9.9.9"}));
    cluster.reconcile();
    let id = cluster.objects.keys().find(|(kind, _)| kind == "Job").cloned().unwrap();
    // The garbage collector deletes the Job with the resource.
    let owner = cluster.objects[&id]["metadata"]["ownerReferences"][0].clone();
    assert_eq!((&owner["kind"], &owner["name"], &owner["uid"]), (&json!("KubeVirt"), &json!("kubevirt"), &json!("cr")));
    assert_eq!(owner["apiVersion"], "kubevirt.io/v1");
    for _ in 0..25 {
        cluster.reconcile();
    }
    let conditions = cluster.status()["conditions"].to_string();
    assert!(conditions.contains("describe pods -l job-name=") && conditions.contains("spec.imageTag"), "{conditions}");
    // While it is being deleted, nothing is created for it.
    cluster.objects.remove(&id);
    cluster.kubevirt.metadata.deletion_timestamp = Some(Time(cluster.now));
    assert_eq!(cluster.reconcile().writes(), [""; 0]);
    // The finalizer stays until the permissions of the Job are gone.
    for _ in 0..6 {
        cluster.remove(RemovalMode::Operator, &[], Vec::new());
    }
    assert_eq!(cluster.kubevirt.metadata.finalizers.clone().unwrap_or_default(), [""; 0]);
    assert_eq!(cluster.objects.keys().map(|(kind, _)| kind.as_str()).collect::<Vec<_>>(), ["Namespace"]);
}

#[test]
fn a_job_of_a_corrected_tag_is_deleted_even_if_it_never_ends() {
    for corrected in [json!({"imageTag": "v1.9.0"}), json!({})] {
        let mut cluster = TestCluster::new(&json!({"imageTag": "v9.9.9"}));
        cluster.reconcile();
        let id = cluster.objects.keys().find(|(kind, _)| kind == "Job").cloned().unwrap();
        cluster.edit(&corrected);
        for _ in 0..12 {
            cluster.reconcile();
            cluster.roll_out();
        }
        assert!(!cluster.objects.contains_key(&id), "{corrected}");
    }
}

#[test]
fn customizations_do_not_change_the_job() {
    let patch = json!([{"op": "replace", "path": "/spec/replicas", "value": 3}]).to_string();
    let patches = json!([{"resourceType": "*", "resourceName": "*", "type": "json", "patch": patch}]);
    let mut cluster = TestCluster::new(&json!({"imageTag": "v1.9.0", "customizeComponents": {"patches": patches}}));
    let reconcile = cluster.reconcile();
    assert!(matches!(reconcile.outcome.stop, Stop::Waiting { .. }), "{:?}", reconcile.outcome.stop);
}

#[test]
fn a_strategy_without_its_label_or_annotation_is_recreated() {
    for pointer in [
        "/metadata/labels/kubevirt.io~1install-strategy",
        "/metadata/annotations/kubevirt.io~1install-strategy-identifier",
    ] {
        let mut cluster = installed(&json!({}));
        let id = cluster.objects.keys().find(|(_, key)| key.name().starts_with("kubevirt-install-strategy")).cloned();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let key = key.replace("~1", "/");
        cluster.object_by_id(&id.unwrap()).pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(&key);
        let writes: Vec<String> = cluster.settle().iter().flat_map(Reconcile::writes).collect();
        assert_eq!(writes.len(), 2, "{pointer}: {writes:?}");
        assert_eq!(cluster.status()["phase"], "Deployed");
    }
}
