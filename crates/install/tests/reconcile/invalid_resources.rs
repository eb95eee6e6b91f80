//! Resources that are wrong, and some that are only doubtful: what is made of them, and what is said.

use serde_json::{Value, json};
use vitivirt_api::Stop;

use crate::world::World;
use crate::{installed, installed_from};

#[test]
fn a_resource_that_cannot_be_understood_says_so_and_heals() {
    let patch = |patch: &str| {
        json!({"customizeComponents": {"patches": [
            {"resourceType": "Deployment", "resourceName": "virt-api", "type": "json", "patch": patch},
        ]}})
    };
    let mut world = World::new(&patch(r#"[{"op": "remove", "path": "/spec/nothing"}]"#));
    let pass = world.reconcile();
    assert_eq!(pass.outcome.stop, Stop::Done);
    let conditions = world.status()["conditions"].to_string();
    assert!(conditions.contains("DeploymentFailed") && conditions.contains("patches[0]"), "{conditions}");
    assert!(!world.has("Deployment", "virt-api"));
    world.edit(&patch(r#"[{"op": "add", "path": "/spec/minReadySeconds", "value": 3}]"#));
    world.settle();
    assert_eq!(world.status()["phase"], "Deployed");
    assert_eq!(world.object("Deployment", "virt-api")["spec"]["minReadySeconds"], 3);
}

/// What the resource asks for that nobody can install soundly, and the field that has to be named.
fn faults() -> Vec<(Value, &'static str)> {
    let selfsigned = |settings: Value| json!({"certificateRotateStrategy": {"selfSigned": settings}});
    let patch = |kind: &str, patch: &str| {
        json!({"customizeComponents": {"patches": [
            {"resourceType": "Deployment", "resourceName": "virt-api", "type": kind, "patch": patch},
        ]}})
    };
    vec![
        (json!({"infra": {"replicas": 0}}), "spec.infra.replicas"),
        (json!({"infra": {"replicas": 300}}), "spec.infra.replicas"),
        (patch("json", r#"[{"op": "replace", "path": "/spec/replicas", "value": 0}]"#), "spec.customizeComponents"),
        (patch("json", "{"), "spec.customizeComponents.patches[0]"),
        (patch("odd", "{}"), "spec.customizeComponents.patches[0]"),
        (selfsigned(json!({"server": {"duration": "5s", "renewBefore": "1s"}})), "selfSigned.server.duration"),
        (selfsigned(json!({"ca": {"duration": "a week"}})), "selfSigned.ca.duration"),
        (json!({"imageRegistry": "not a registry!!"}), "spec.imageRegistry"),
        // Another release, whose operator would be asked what it consists of.
        (json!({"imageTag": "no tag"}), "spec.imageTag"),
        (json!({"imageTag": "v1.9.0", "infra": {"replicas": 0}}), "spec.infra.replicas"),
    ]
}

/// The webhook that refuses these is installed with the first resource: that one is checked by nobody before.
#[test]
fn a_first_resource_that_cannot_be_installed_soundly_makes_nothing_says_why_and_heals() {
    let renewal = json!({"certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "1h", "renewBefore": "2h"}}}});
    for (spec, field) in faults().into_iter().chain([(renewal, "selfSigned.ca.renewBefore")]) {
        let mut world = World::new(&spec);
        let pass = world.reconcile();
        assert_eq!(pass.writes(), [""; 0], "{spec}");
        assert_eq!(world.kubevirt.metadata.finalizers, None, "there is nothing to clean up after {spec}");
        let conditions = world.status()["conditions"].clone();
        let degraded = conditions.as_array().unwrap().iter().find(|condition| condition["type"] == "Degraded").unwrap();
        assert_eq!((&degraded["status"], &degraded["reason"]), (&json!("True"), &json!("DeploymentFailed")), "{spec}");
        assert!(degraded["message"].as_str().unwrap().contains(field), "{degraded}");
        assert_eq!(world.status().get("targetDeploymentConfig"), None, "{spec}");
        assert!(world.reconcile().is_silent(), "what was said is not said again for {spec}");
        world.edit(&json!({}));
        world.reconcile();
        assert!(world.has("Deployment", "virt-api"), "{spec}");
        assert!(!world.status()["conditions"].to_string().contains("DeploymentFailed"), "{spec}");
    }
}

#[test]
fn everything_that_is_wrong_is_told_at_once() {
    let mut world = World::new(&json!({"infra": {"replicas": 0}, "imageTag": "a b",
        "certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "1h", "renewBefore": "2h"}}}}));
    world.reconcile();
    let conditions = world.status()["conditions"].to_string();
    for field in ["spec.infra.replicas", "spec.imageTag", "ca.renewBefore"] {
        assert!(conditions.contains(field), "{field}: {conditions}");
    }
}

/// An installation that is renewed too often runs; one that is not renewed at all ends.
#[test]
fn lifetimes_that_contradict_each_other_do_not_hold_up_what_runs() {
    let selfsigned = |settings: Value| json!({"certificateRotateStrategy": {"selfSigned": settings}});
    for (spec, told) in [
        (selfsigned(json!({"ca": {"duration": "1h", "renewBefore": "2h"}})), "ca.renewBefore is 2h0m0s"),
        (selfsigned(json!({"server": {"duration": "8760h"}})), "server.duration is 8760h0m0s"),
    ] {
        let mut world = installed(&json!({}));
        world.edit(&spec);
        let events: Vec<String> =
            world.settle().into_iter().flat_map(|pass| pass.report.events).map(|event| event.message).collect();
        assert_eq!(world.status()["phase"], "Deployed");
        assert!(!world.status()["conditions"].to_string().contains("DeploymentFailed"), "{spec}");
        assert!(events.iter().any(|event| event.contains(told)), "{events:?}");
    }
    let outlives = World::new(&selfsigned(json!({"server": {"duration": "8760h"}}))).settle();
    assert!(!outlives.is_empty(), "the release installs it");
}

/// It was made before anybody checked, or while nobody could.
#[test]
fn an_installation_whose_resource_cannot_be_installed_stays_as_it_is_and_says_so() {
    let base = installed(&json!({}));
    for (spec, field) in faults() {
        let mut world = installed_from(&base);
        world.edit(&spec);
        world.object("Deployment", "virt-api")["spec"]["minReadySeconds"] = json!(7);
        assert_eq!(world.reconcile().writes(), [""; 0], "{spec}");
        let conditions = world.status()["conditions"].to_string();
        assert!(conditions.contains("DeploymentFailed") && conditions.contains(field), "{conditions}");
        let finalizers = world.kubevirt.metadata.finalizers.clone();
        assert_eq!(finalizers, Some(vec!["foregroundDeleteKubeVirt".to_owned()]));
        // What is done about a deletion does not depend on it.
        world.kubevirt.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(world.now));
        assert_eq!(world.reconcile().writes(), [""; 0], "{spec}");
        assert_eq!(world.kubevirt.metadata.finalizers, finalizers);
        assert!(world.status()["conditions"].to_string().contains("does not remove"));
    }
}

#[test]
fn what_should_be_looked_at_is_told_once_and_installed_all_the_same() {
    let patch = |kind: &str, name: &str| json!({"resourceType": kind, "resourceName": name, "type": "merge", "patch": "{\"metadata\":{}}"});
    let mut world = World::new(&json!({
        "configuration": {
            "roleAggregationStrategy": "Manual",
            "developerConfiguration": {"featureGates": ["LiveMigration"]},
        },
        "customizeComponents": {"patches": [patch("Deployment", "nope"), patch("ClusterRole", "*")]},
    }));
    let passes = world.settle();
    let events = passes.iter().flat_map(|pass| &pass.report.events);
    let told: Vec<_> = events.map(|event| (event.reason, event.message.as_str())).collect();
    assert_eq!(world.status()["phase"], "Deployed");
    for (reason, about) in [
        ("Deprecated", "feature gate LiveMigration"),
        ("Doubtful", "spec.configuration.roleAggregationStrategy"),
        ("NoEffect", "spec.customizeComponents.patches[0]"),
        ("NoEffect", "spec.customizeComponents.patches[1]"),
    ] {
        let count = told.iter().filter(|(of, message)| *of == reason && message.contains(about)).count();
        assert_eq!(count, 1, "{about}: {told:?}");
    }
    assert_eq!(told.len(), 5, "{told:?}");
}

#[test]
fn the_example_is_installed_without_a_word() {
    let kubevirt: Value = serde_saphyr::from_str(include_str!("../../../../examples/kubevirt.yaml")).unwrap();
    assert_eq!(
        (&kubevirt["metadata"]["name"], &kubevirt["metadata"]["namespace"]),
        (&json!("kubevirt"), &json!("kubevirt"))
    );
    let mut world = World::new(&kubevirt["spec"]);
    assert_eq!(world.observed().warnings(), [""; 0]);
    world.settle();
    assert_eq!(world.status()["phase"], "Deployed");
    let page = include_str!("../../../../docs/installing-kubevirt.md");
    let example = include_str!("../../../../examples/kubevirt.yaml").split_once('\n').unwrap().1;
    assert!(page.contains(example), "the page shows another one");
}
