//! Identifiers and JSON that upstream virt-operator computed for the same resources.

use serde_json::json;

use super::*;

fn environment() -> Environment {
    Environment {
        operator_image: "quay.io/kubevirt/virt-operator:v1.8.4".to_owned(),
        kubevirt_version: "v1.8.4".to_owned(),
        ..Environment::default()
    }
}

fn config(spec: &serde_json::Value) -> DeploymentConfig {
    let object = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt"}, "spec": spec,
    });
    DeploymentConfig::new(&serde_json::from_value(object).unwrap(), &environment())
}

#[test]
fn identifiers_equal_those_of_upstream() {
    for (spec, id) in [
        (json!({}), "0b862b5055cacaa3de8240463b634da97b943b97"),
        (json!({"imagePullPolicy": "IfNotPresent"}), "b38e7025a18ad9dcc2f64bb5a65dac314a112abb"),
        (
            json!({"imageRegistry": "registry.example.com/virt", "imageTag": "v1.8.4", "imagePullPolicy": "Always",
                   "imagePullSecrets": [{"name": "pull-me"}]}),
            "bb305793623c627c04f31c9b0121dd79cbd0a266",
        ),
        (
            json!({"monitorNamespace": "monitoring", "monitorAccount": "prometheus-k8s",
                   "serviceMonitorNamespace": "monitoring", "productName": "acme-virt", "productVersion": "4.2",
                   "productComponent": "platform"}),
            "e364cb1fcceee1d819728a499e64b1d598d4e775",
        ),
        (
            json!({"imagePullSecrets": [{"name": "a"}, {"name": "b"}], "configuration": {
                "migrations": {"network": "mignet"}, "roleAggregationStrategy": "Manual",
                "developerConfiguration": {"featureGates": ["Template", "PersistentReservation",
                    "ExternalNetResourceInjection", "OptOutRoleAggregation", "ContainerPathVolumes"]}}}),
            "291d180719b6d87cb43e28e061062bcabd087c6d",
        ),
    ] {
        assert_eq!(config(&spec).id, id, "{spec}");
    }
}

#[test]
fn settings_that_are_not_strings_do_not_change_the_identifier() {
    let plain = config(&json!({})).id;
    let configured = config(&json!({"infra": {"replicas": 3}, "configuration": {"network": {}},
        "customizeComponents": {"flags": {"api": {"v": "5"}}}}));
    assert_eq!(configured.id, plain);
}

#[test]
fn json_has_the_format_of_go() {
    let json = config(&json!({})).json();
    assert!(json.starts_with(r#"{"id":"0b862b5055cacaa3de8240463b634da97b943b97","namespace":"kubevirt","registry":"#));
    assert!(json.contains(r#""Configuration":"\u003cv1.KubeVirtConfiguration Value\u003e","#), "{json}");
    let back: DeploymentConfig = serde_json::from_str(&json).unwrap();
    assert_eq!(back, config(&json!({})));
}

#[test]
fn a_tag_or_registry_of_the_resource_changes_every_derived_image() {
    let tagged = config(&json!({"imageTag": "v9"}));
    assert_eq!(tagged.launcher_image(), "quay.io/kubevirt/virt-launcher:v9");
    assert_eq!(tagged.images.virt_operator_image, "quay.io/kubevirt/virt-operator:v9");
    let moved = config(&json!({"imageRegistry": "r"}));
    assert_eq!(moved.image("", "virt-api"), "r/virt-api:v1.8.4");
    assert_eq!(moved.image("r/x@sha256:1", "virt-api"), "r/x@sha256:1");
}

#[test]
fn a_prefix_belongs_to_derived_images_and_a_digest_falls_back_to_the_version() {
    let object: KubeVirt = serde_json::from_value(json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt"})).unwrap();
    let image = |image: &str| {
        let environment = Environment { operator_image: image.to_owned(), ..environment() };
        DeploymentConfig::new(&object, &environment).launcher_image()
    };
    assert_eq!(image("r/my-virt-operator:t"), "r/my-virt-launcher:t");
    assert_eq!(image("r/virt-operator@sha256:0"), "r/virt-launcher:v1.8.4");
}

#[test]
fn label_values_are_checked() {
    for valid in ["", "a", "4.2", "a_b-C", &"x".repeat(63)] {
        assert!(is_label_value(valid), "{valid}");
    }
    for invalid in ["-a", "a.", "a b", &"x".repeat(64)] {
        assert!(!is_label_value(invalid), "{invalid}");
    }
}
