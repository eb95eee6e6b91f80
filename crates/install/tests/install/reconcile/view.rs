//! What people see of an installation.

use serde_json::json;
use vitivirt_api::{ObjectKey, view::StepState};
use vitivirt_install::{
    Lane,
    view::{DriftedObject, drifted_objects, workloads},
};

use super::{installed, test_cluster::TestCluster};

fn drifted(cluster: &TestCluster) -> Vec<DriftedObject> {
    let observed = cluster.observed();
    let desired = cluster.desired(&observed);
    let plan = vitivirt_install::plan(&observed, &desired, Lane::Components).unwrap();
    drifted_objects(&observed, &desired, &plan)
}

#[test]
fn drift_has_the_object_and_the_client_that_changed_it() {
    let mut cluster = installed(&json!({}));
    assert_eq!(drifted(&cluster), []);
    let id = ("Deployment".to_owned(), ObjectKey::namespaced("kubevirt", "virt-api"));
    cluster.change_as("kubectl-edit", &id, |deployment| deployment["spec"]["replicas"] = json!(7));
    let [only] = drifted(&cluster).try_into().unwrap();
    assert_eq!(only.target.to_string(), "Deployment kubevirt/virt-api");
    assert_eq!((only.managers.as_slice(), only.deleted), (&["kubectl-edit".to_owned()][..], false));
    cluster.settle();
    assert_eq!(drifted(&cluster), [], "it is repaired");
}

#[test]
fn a_deleted_object_is_drift_and_an_edit_of_the_resource_is_not() {
    let mut cluster = installed(&json!({}));
    cluster.objects.retain(|(kind, key), _| !(kind == "Service" && key.name() == "virt-api"));
    let [only] = drifted(&cluster).try_into().unwrap();
    assert!(only.deleted && only.managers.is_empty(), "{only:?}");
    cluster.settle();
    cluster.edit(&json!({"imagePullSecrets": [{"name": "registry"}]}));
    assert_eq!(drifted(&cluster), []);
}

#[test]
fn a_workload_that_is_not_rolled_out_says_what_it_waits_for() {
    let mut cluster = installed(&json!({}));
    let observed = cluster.observed();
    let steps = workloads(&observed.objects, &observed.pods);
    let names: Vec<&str> = steps.iter().map(|step| step.name.as_str()).collect();
    assert!(["virt-api", "virt-controller", "virt-handler"].iter().all(|name| names.contains(name)), "{names:?}");
    assert!(steps.iter().all(|step| step.state == StepState::Ok), "{steps:?}");
    cluster.object("Deployment", "virt-api")["status"]["readyReplicas"] = json!(0);
    let observed = cluster.observed();
    let steps = workloads(&observed.objects, &observed.pods);
    let api = steps.iter().find(|step| step.name == "virt-api").unwrap();
    assert_eq!((api.state, api.summary.as_str()), (StepState::Waiting, "none of its pods are ready"));
}
