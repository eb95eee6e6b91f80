//! Invalid and questionable KubeVirt resources: what is installed and what is reported.

use serde_json::{Value, json};
use vitivirt_api::Stop;

use super::{installed, installed_from, test_cluster::TestCluster};

#[test]
fn a_patch_that_does_not_apply_is_reported_and_can_be_fixed() {
    let patch = |patch: &str| {
        json!({"customizeComponents": {"patches": [
            {"resourceType": "Deployment", "resourceName": "virt-api", "type": "json", "patch": patch},
        ]}})
    };
    let mut cluster = TestCluster::new(&patch(r#"[{"op": "remove", "path": "/spec/nothing"}]"#));
    let reconcile = cluster.reconcile();
    assert_eq!(reconcile.outcome.stop, Stop::Done);
    let conditions = cluster.status()["conditions"].to_string();
    assert!(conditions.contains("DeploymentFailed") && conditions.contains("patches[0]"), "{conditions}");
    assert!(!cluster.has("Deployment", "virt-api"));
    cluster.edit(&patch(r#"[{"op": "add", "path": "/spec/minReadySeconds", "value": 3}]"#));
    cluster.settle();
    assert_eq!(cluster.status()["phase"], "Deployed");
    assert_eq!(cluster.object("Deployment", "virt-api")["spec"]["minReadySeconds"], 3);
}

/// Invalid specifications, and the field that the message must name.
fn invalid_specs() -> Vec<(Value, &'static str)> {
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
        // Another release, which would need a Job.
        (json!({"imageTag": "no tag"}), "spec.imageTag"),
        (json!({"imageTag": "v1.9.0", "infra": {"replicas": 0}}), "spec.infra.replicas"),
    ]
}

/// The webhook that rejects these is part of the installation, so it does not check the first resource.
#[test]
fn an_invalid_first_resource_installs_nothing_is_reported_and_can_be_fixed() {
    let renewal = json!({"certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "1h", "renewBefore": "2h"}}}});
    for (spec, field) in invalid_specs().into_iter().chain([(renewal, "selfSigned.ca.renewBefore")]) {
        let mut cluster = TestCluster::new(&spec);
        let reconcile = cluster.reconcile();
        assert_eq!(reconcile.writes(), [""; 0], "{spec}");
        assert_eq!(cluster.kubevirt.metadata.finalizers, None, "there is nothing to clean up for {spec}");
        let conditions = cluster.status()["conditions"].clone();
        let degraded = conditions.as_array().unwrap().iter().find(|condition| condition["type"] == "Degraded").unwrap();
        assert_eq!((&degraded["status"], &degraded["reason"]), (&json!("True"), &json!("DeploymentFailed")), "{spec}");
        assert!(degraded["message"].as_str().unwrap().contains(field), "{degraded}");
        assert_eq!(cluster.status().get("targetDeploymentConfig"), None, "{spec}");
        assert!(cluster.reconcile().is_silent(), "nothing is reported twice for {spec}");
        cluster.edit(&json!({}));
        cluster.reconcile();
        assert!(cluster.has("Deployment", "virt-api"), "{spec}");
        assert!(!cluster.status()["conditions"].to_string().contains("DeploymentFailed"), "{spec}");
    }
}

#[test]
fn all_errors_are_reported_together() {
    let mut cluster = TestCluster::new(&json!({"infra": {"replicas": 0}, "imageTag": "a b",
        "certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "1h", "renewBefore": "2h"}}}}));
    cluster.reconcile();
    let conditions = cluster.status()["conditions"].to_string();
    for field in ["spec.infra.replicas", "spec.imageTag", "ca.renewBefore"] {
        assert!(conditions.contains(field), "{field}: {conditions}");
    }
}

/// An installation whose certificates are renewed too often works; one without renewal stops.
#[test]
fn contradicting_lifetimes_do_not_block_an_existing_installation() {
    let selfsigned = |settings: Value| json!({"certificateRotateStrategy": {"selfSigned": settings}});
    for (spec, message) in [
        (selfsigned(json!({"ca": {"duration": "1h", "renewBefore": "2h"}})), "ca.renewBefore: invalid value 2h0m0s"),
        (selfsigned(json!({"server": {"duration": "8760h"}})), "server.duration: invalid value 8760h0m0s"),
    ] {
        let mut cluster = installed(&json!({}));
        cluster.edit(&spec);
        let events: Vec<String> = cluster
            .settle()
            .into_iter()
            .flat_map(|reconcile| reconcile.report.events)
            .map(|event| event.message)
            .collect();
        assert_eq!(cluster.status()["phase"], "Deployed");
        assert!(!cluster.status()["conditions"].to_string().contains("DeploymentFailed"), "{spec}");
        assert!(events.iter().any(|event| event.contains(message)), "{events:?}");
    }
    let outlives = TestCluster::new(&selfsigned(json!({"server": {"duration": "8760h"}}))).settle();
    assert!(!outlives.is_empty(), "upstream installs it");
}

/// The resource was changed before the webhook existed, or while it was unavailable.
#[test]
fn an_installation_with_an_invalid_resource_is_kept_unchanged_and_reported() {
    let base = installed(&json!({}));
    for (spec, field) in invalid_specs() {
        let mut cluster = installed_from(&base);
        cluster.edit(&spec);
        cluster.object("Deployment", "virt-api")["spec"]["minReadySeconds"] = json!(7);
        // The Secrets of certificates are a lane of their own. It knows only what concerns Secrets.
        let writes = cluster.reconcile().writes();
        assert!(writes.iter().all(|write| write.starts_with("Patch(Secret ")), "{spec}: {writes:?}");
        let conditions = cluster.status()["conditions"].to_string();
        assert!(conditions.contains("DeploymentFailed") && conditions.contains(field), "{conditions}");
        let finalizers = cluster.kubevirt.metadata.finalizers.clone();
        assert_eq!(finalizers, Some(vec!["foregroundDeleteKubeVirt".to_owned()]));
    }
}

#[test]
fn warnings_are_reported_once_and_do_not_block_the_installation() {
    let patch = |kind: &str, name: &str| json!({"resourceType": kind, "resourceName": name, "type": "merge", "patch": "{\"metadata\":{}}"});
    let mut cluster = TestCluster::new(&json!({
        "configuration": {
            "roleAggregationStrategy": "Manual",
            "developerConfiguration": {"featureGates": ["LiveMigration"]},
        },
        "customizeComponents": {"patches": [patch("Deployment", "nope"), patch("ClusterRole", "*")]},
    }));
    let reconciles = cluster.settle();
    let events = reconciles.iter().flat_map(|reconcile| &reconcile.report.events);
    let reported: Vec<_> = events.map(|event| (event.reason, event.message.as_str())).collect();
    assert_eq!(cluster.status()["phase"], "Deployed");
    for (reason, about) in [
        ("Deprecated", "featureGates: LiveMigration"),
        ("ConfigurationWarning", "spec.configuration.roleAggregationStrategy"),
        ("NoEffect", "spec.customizeComponents.patches[0]"),
        ("NoEffect", "spec.customizeComponents.patches[1]"),
    ] {
        let count = reported.iter().filter(|(of, message)| *of == reason && message.contains(about)).count();
        assert_eq!(count, 1, "{about}: {reported:?}");
    }
    assert_eq!(reported.len(), 5, "{reported:?}");
}

#[test]
fn the_example_is_installed_without_warnings() {
    let kubevirt: Value = serde_saphyr::from_str(include_str!("../../../../../examples/kubevirt.yaml")).unwrap();
    assert_eq!(
        (&kubevirt["metadata"]["name"], &kubevirt["metadata"]["namespace"]),
        (&json!("kubevirt"), &json!("kubevirt"))
    );
    let mut cluster = TestCluster::new(&kubevirt["spec"]);
    let observed = cluster.observed();
    let desired = cluster.desired(&observed);
    let installation = desired.installation().map(|installation| &**installation);
    assert_eq!(vitivirt_install::warnings(&observed.kubevirt, installation), [""; 0]);
    cluster.settle();
    assert_eq!(cluster.status()["phase"], "Deployed");
    let page = include_str!("../../../../../docs/installing-kubevirt.md");
    let example = include_str!("../../../../../examples/kubevirt.yaml").split_once('\n').unwrap().1;
    assert!(page.contains(example), "the page shows another example");
}
