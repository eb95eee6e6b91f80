//! Cases that the snapshots of `tests/reference` do not contain: feature gates, OpenShift and edge cases of the
//! resource.

use serde_json::json;

use super::*;
use crate::certificates::NoCertificates;
use crate::names::annotation;

fn openshift() -> Cluster {
    Cluster {
        service_monitors: true,
        prometheus_rules: true,
        admission_policies: true,
        security_context_constraints: true,
        routes: true,
        monitor_namespace: None,
        schedulable_nodes: 2,
    }
}

fn install_on(cluster: &Cluster, spec: &Value) -> Installation {
    let object = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt", "generation": 7}, "spec": spec,
    });
    let kubevirt = serde_json::from_value(object).unwrap();
    let environment = Environment { operator_image: "r/virt-operator:v1".to_owned(), ..Environment::default() };
    Installation::new(&kubevirt, &environment, cluster).unwrap()
}

fn install(spec: &Value) -> Installation {
    install_on(&openshift(), spec)
}

fn names(installation: &Installation, kind: Kind) -> Vec<&str> {
    let all = installation.objects.iter().filter(|object| object.kind == kind);
    all.map(|object| object.key.name()).collect()
}

fn object(installation: &Installation, kind: Kind, name: &str) -> Value {
    let found = installation.objects.iter().find(|object| object.kind == kind && object.key.name() == name);
    found.unwrap().body(&NoCertificates).unwrap().into_json()
}

fn gates(gates: &[&str]) -> Value {
    json!({"configuration": {"developerConfiguration": {"featureGates": gates}}})
}

#[test]
fn a_feature_gate_adds_its_objects() {
    let plain = install(&json!({}));
    assert_eq!(names(&plain, Kind::Deployment), [VIRT_API, VIRT_CONTROLLER]);
    assert_eq!(names(&plain, Kind::MutatingWebhookConfiguration), ["virt-api-mutator"]);
    assert_eq!(names(&plain, Kind::Route), [""; 0]);
    assert_eq!(names(&plain, Kind::SecurityContextConstraints).len(), 2);

    let export = install(&gates(&["VMExport"]));
    assert_eq!(names(&export, Kind::Deployment), [VIRT_API, VIRT_CONTROLLER, VIRT_EXPORT_PROXY]);
    assert_eq!(names(&export, Kind::Route), [VIRT_EXPORT_PROXY]);
    assert_eq!(names(&install_on(&Cluster::default(), &gates(&["VMExport"])), Kind::Route), [""; 0]);

    let template = install(&gates(&["Template"]));
    assert_eq!(names(&template, Kind::Deployment).len(), 4);
    assert_eq!(names(&template, Kind::CustomResourceDefinition).len(), 20);
    assert_eq!(names(&template, Kind::ValidatingAdmissionPolicy).len(), 2);
    assert_eq!(names(&template, Kind::PodDisruptionBudget), ["virt-api-pdb", "virt-controller-pdb"]);
}

#[test]
fn the_pod_mutator_is_generated_and_never_customized() {
    let spec = json!({
        "configuration": {"developerConfiguration": {"featureGates": ["ContainerPathVolumes"]}},
        "customizeComponents": {"patches": [{"resourceType": "*", "resourceName": "*", "type": "merge",
                                             "patch": "{\"metadata\":{\"labels\":{\"a\":\"b\"}}}"}]},
    });
    let installation = install(&spec);
    let of = |name: &str| object(&installation, Kind::MutatingWebhookConfiguration, name)["metadata"].clone();
    assert_eq!(of("virt-api-mutator")["labels"]["a"], "b");
    assert!(of("virt-api-mutator")["annotations"].get(annotation::CUSTOMIZER_IDENTIFIER).is_some());
    assert_eq!(of("virt-launcher-pod-mutator")["labels"].get("a"), None);
    assert_eq!(of("virt-launcher-pod-mutator")["annotations"].get(annotation::CUSTOMIZER_IDENTIFIER), None);
}

#[test]
fn virt_template_keeps_one_replica_and_gets_tls_settings_as_arguments() {
    let mut spec = gates(&["Template"]);
    spec["infra"] = json!({"replicas": 3});
    spec["configuration"]["tlsConfiguration"] = json!({"minTLSVersion": "VersionTLS13"});
    let installation = install(&spec);
    for name in [VIRT_TEMPLATE_API_SERVER, VIRT_TEMPLATE_CONTROLLER] {
        let deployment = object(&installation, Kind::Deployment, name);
        assert_eq!(deployment["spec"]["replicas"], 1, "{name}");
        assert_eq!(deployment["metadata"]["labels"][label::MANAGED_BY], "virt-operator");
        let arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"].to_string();
        assert!(arguments.ends_with(r#""-v","2","--tls-min-version","VersionTLS13"]"#), "{arguments}");
    }
    assert_eq!(object(&installation, Kind::Deployment, VIRT_API)["spec"]["replicas"], 3);
    let budget = object(&installation, Kind::PodDisruptionBudget, "virt-api-pdb");
    assert_eq!(budget["spec"]["minAvailable"], 2);
}

#[test]
fn the_replicas_of_virt_api_follow_from_the_nodes_or_a_patch() {
    let cluster = Cluster { schedulable_nodes: 1, ..openshift() };
    let single = install_on(&cluster, &json!({}));
    assert_eq!(object(&single, Kind::Deployment, VIRT_API)["spec"]["replicas"], 1);
    assert_eq!(object(&single, Kind::Deployment, VIRT_CONTROLLER)["spec"]["replicas"], 2);
    assert_eq!(names(&single, Kind::PodDisruptionBudget), ["virt-controller-pdb"]);
    let patched = install_on(
        &cluster,
        &json!({"customizeComponents": {"patches": [{"resourceType": "Deployment", "resourceName": "virt-api",
            "type": "json", "patch": "[{\"op\":\"replace\",\"path\":\"/spec/replicas\",\"value\":5}]"}]}}),
    );
    assert_eq!(object(&patched, Kind::Deployment, VIRT_API)["spec"]["replicas"], 5);
}

#[test]
fn virt_handler_gets_the_limit_of_vmis_per_node() {
    let spec = json!({"configuration": {"virtualMachineInstancesPerNode": 10}});
    let handler = object(&install(&spec), Kind::DaemonSet, VIRT_HANDLER);
    let command = &handler["spec"]["template"]["spec"]["containers"][0]["command"];
    assert_eq!(*command, json!(["virt-handler", "--max-devices", "10"]));
}

#[test]
fn instancetypes_can_be_disabled() {
    let off = install(&json!({"configuration": {"commonInstancetypesDeployment": {"enabled": false}}}));
    assert_eq!(names(&off, Kind::Instancetype).len() + names(&off, Kind::Preference).len(), 0);
}

#[test]
fn invalid_product_labels_are_not_set() {
    let spec = json!({"productName": "no spaces", "productVersion": "-", "productComponent": "a/b"});
    let labels = object(&install(&spec), Kind::Service, VIRT_API)["metadata"]["labels"].clone();
    let expected = json!({label::APP: VIRT_API, label::COMPONENT: "kubevirt", label::MANAGED_BY: "virt-operator"});
    assert_eq!(labels, expected);
}

#[test]
fn the_generation_is_an_annotation_of_objects_but_not_of_pods() {
    let api = object(&install(&json!({})), Kind::Deployment, VIRT_API);
    assert_eq!(api["metadata"]["annotations"][annotation::GENERATION], "7");
    assert_eq!(api["spec"]["template"]["metadata"]["annotations"].get(annotation::GENERATION), None);
}

#[test]
fn the_export_and_backup_cas_have_the_duration_of_the_ca() {
    let spec = json!({"certificateRotateStrategy": {"selfSigned": {
        "ca": {"duration": "48h", "renewBefore": "24h"}, "server": {"duration": "12h", "renewBefore": "3h"}}}});
    let installation = install(&spec);
    let duration =
        |name: &str| object(&installation, Kind::Secret, name)["metadata"]["annotations"][annotation::DURATION].clone();
    for name in [certificates::CA, certificates::EXPORT_CA, certificates::BACKUP_CA] {
        assert_eq!(duration(name), "&Duration{Duration:48h0m0s,}");
    }
    assert_eq!(duration(certificates::VIRT_API), "&Duration{Duration:12h0m0s,}");
    let renew_before = |name: &str| {
        let found = installation.certificates.iter().find(|certificate| certificate.secret == name);
        found.unwrap().lifetime.renew_before.as_secs() / 3600
    };
    assert_eq!((renew_before(certificates::CA), renew_before(certificates::EXPORT_CA)), (24, 3));
}

#[test]
fn the_failure_of_an_invalid_resource_names_the_field() {
    let failure = |spec: &Value| {
        let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "spec": spec});
        let kubevirt = serde_json::from_value(object).unwrap();
        Installation::new(&kubevirt, &Environment::default(), &openshift()).map(|_| ()).unwrap_err()
    };
    let duration = failure(&json!({"certificateRotateStrategy": {"selfSigned": {"ca": {"duration": "soon"}}}}));
    assert_eq!((duration.class, duration.reason), (vitivirt_api::ErrorClass::Invalid, validation::INVALID_RESOURCE));
    assert!(
        duration.message.contains("selfSigned.ca.duration: invalid value \"soon\": must be a duration"),
        "{duration}"
    );
    let patch = failure(&json!({"customizeComponents": {"patches": [
        {"resourceType": "Service", "resourceName": "virt-api", "type": "merge", "patch": "{\"spec\":1}"}]}}));
    assert_eq!((patch.class, patch.reason), (vitivirt_api::ErrorClass::Invalid, INVALID_CUSTOMIZATION));
}

#[test]
fn objects_are_sorted_by_stage_and_unique() {
    let installation = install(&gates(&["Template", "VMExport", "DecentralizedLiveMigration"]));
    assert!(installation.objects.windows(2).all(|pair| pair[0].stage <= pair[1].stage));
    let mut keys: Vec<(Kind, &ObjectKey)> =
        installation.objects.iter().map(|object| (object.kind, &object.key)).collect();
    let count = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), count);
}

#[test]
fn a_dumped_strategy_gives_the_same_installation() {
    let kubevirt: KubeVirt = serde_json::from_value(json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"namespace": "kubevirt"}}))
    .unwrap();
    let config = DeploymentConfig::new(&kubevirt, &Environment::default());
    let strategy = InstallStrategy::generate(&config, None, None).unwrap();
    let map = crate::strategy::config_map(&config, &strategy).unwrap();
    let read = |text: &str| serde_json::from_str(text).map_err(|error| error.to_string());
    let theirs = InstallStrategy::decode(&map, read).unwrap();
    let theirs = Installation::from_strategy(theirs, config, &kubevirt, &openshift()).unwrap();
    let ours = Installation::new(&kubevirt, &Environment::default(), &openshift()).unwrap();
    assert_eq!(theirs.objects.len() + 1, ours.objects.len());
    for (theirs, ours) in theirs.objects.iter().zip(&ours.objects[1..]) {
        assert_eq!((theirs.kind, &theirs.key, theirs.stage), (ours.kind, &ours.key, ours.stage));
        let json = |object: &InstallationObject| object.body(&NoCertificates).unwrap().into_json();
        assert_eq!(json(theirs), json(ours), "{}", ours.key);
    }
}

#[test]
fn a_patch_without_a_matching_object_is_reported() {
    let patch = |kind: &str, name: &str| json!({"resourceType": kind, "resourceName": name, "type": "merge", "patch": "{\"metadata\":{}}"});
    let mut spec = gates(&["ContainerPathVolumes"]);
    spec["customizeComponents"] = json!({
        "patches": [
            patch("Deployment", "virt-api"),
            patch("deployment", "nope"),
            patch("*", "nope"),
            patch("DaemonSet", "*"),
            patch("MutatingWebhookConfiguration", webhooks::POD_MUTATOR),
            patch("Deployment", VIRT_EXPORT_PROXY),
            patch("ClusterRole", "nope"),
        ],
        "flags": {"api": {"v": "5"}, "handler": {"v": "5"}},
    });
    assert_eq!(
        install(&spec).unused_customizations,
        [
            "spec.customizeComponents.patches[1] has no effect: deployment \"nope\" not found in the installation; \
             available: virt-api, virt-controller",
            "spec.customizeComponents.patches[2] has no effect: no object that can be patched is named \"nope\"",
            "spec.customizeComponents.patches[4] has no effect: MutatingWebhookConfiguration \
             \"virt-launcher-pod-mutator\" not found in the installation; available: virt-api-mutator",
            "spec.customizeComponents.patches[5] has no effect: Deployment \"virt-exportproxy\" not found in the \
             installation; available: virt-api, virt-controller",
        ]
    );
    assert_eq!(install(&gates(&["VMExport"])).unused_customizations, [""; 0]);
}

#[test]
fn an_overridden_patch_of_replicas_is_reported() {
    let replicas = |name: &str, kind: &str, patch: Value| {
        json!({"customizeComponents": {"patches": [
            {"resourceType": "Deployment", "resourceName": name, "type": kind, "patch": patch.to_string()}]}})
    };
    let merge = || json!({"spec": {"replicas": 5}});
    let replace = json!([{"op": "replace", "path": "/spec/replicas", "value": 5}]);
    assert_eq!(
        install(&replicas(VIRT_API, "merge", merge())).unused_customizations,
        ["spec.customizeComponents has no effect on the replicas of virt-api: the patch sets 5, but the Deployment \
         has 2; set spec.infra.replicas, or use a patch of type json that replaces /spec/replicas"]
    );
    assert_eq!(install(&replicas(VIRT_API, "json", replace)).unused_customizations, [""; 0]);
    assert_eq!(install(&replicas(VIRT_CONTROLLER, "merge", merge())).unused_customizations, [""; 0]);
    let mut both = replicas(VIRT_CONTROLLER, "merge", merge());
    both["infra"] = json!({"replicas": 3});
    assert_eq!(
        install(&both).unused_customizations,
        ["spec.customizeComponents has no effect on the replicas of virt-controller: the patch sets 5, but the \
         Deployment has 3; spec.infra.replicas overrides it"]
    );
}
