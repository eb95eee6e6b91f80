use serde_json::{Value, json};
use vitivirt_api::ObjectKey;

use super::*;
use crate::admission::{ValidationResult, validate_create, validate_update};

fn kubevirt(spec: &Value) -> KubeVirt {
    let object = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt"}, "spec": spec,
    });
    serde_json::from_value(object).unwrap()
}

fn messages(result: &ValidationResult) -> Vec<String> {
    result.refusals.iter().map(ToString::to_string).collect()
}

/// The refusals of a change from an empty specification to this one.
fn refused(spec: &Value) -> Vec<String> {
    messages(&validate_update(&kubevirt(&json!({})), &kubevirt(spec)))
}

#[track_caller]
fn assert_refusals(rows: impl IntoIterator<Item = (Value, &'static str)>) {
    for (spec, expected) in rows {
        let refused = refused(&spec);
        match expected {
            "" => assert_eq!(refused, [""; 0], "{spec}"),
            expected => assert_eq!(refused, [expected], "{spec}"),
        }
    }
}

#[test]
fn an_invalid_patch_is_refused() {
    let patch = |kind: &str, patch: &str| {
        let patch = json!({"resourceName": "virt-api", "resourceType": "Deployment", "type": kind, "patch": patch});
        json!({"customizeComponents": {"patches": [patch]}})
    };
    assert_refusals([
        (patch("json", r#"[{"op": "replace", "path": "/spec/replicas", "value": 3}]"#), ""),
        (patch("merge", "{}"), ""),
        (patch("strategic", r#"{"metadata": {"labels": {"a": "b"}}}"#), ""),
        (
            patch("strategic", "json: not valid"),
            "spec.customizeComponents.patches[0]: invalid patch: not JSON: expected value at line 1 column 1",
        ),
        (
            patch("yaml", "{}"),
            r#"spec.customizeComponents.patches[0]: type: unsupported value "yaml"; supported values: json, merge, strategic"#,
        ),
        (patch("strategic", "[]"), "spec.customizeComponents.patches[0]: invalid patch: must be a JSON object"),
    ]);
    let [refused] = refused(&patch("json", "{}")).try_into().unwrap();
    assert!(refused.starts_with("spec.customizeComponents.patches[0]: invalid patch: not a JSON patch: "), "{refused}");
}

#[test]
fn every_invalid_patch_is_reported_with_its_index() {
    let good = json!({"resourceName": "a", "resourceType": "b", "type": "merge", "patch": "{}"});
    let bad = json!({"resourceName": "a", "resourceType": "b", "type": "merge", "patch": "{"});
    let refused = refused(&json!({"customizeComponents": {"patches": [bad, good, bad]}}));
    assert_eq!(refused.len(), 2);
    assert!(refused[0].starts_with("spec.customizeComponents.patches[0]: invalid patch: not JSON"), "{refused:?}");
    assert!(refused[1].starts_with("spec.customizeComponents.patches[2]: invalid patch: not JSON"), "{refused:?}");
}

#[test]
fn contradicting_lifetimes_are_refused() {
    let selfsigned = |settings: Value| json!({"certificateRotateStrategy": {"selfSigned": settings}});
    assert_refusals([
        (selfsigned(json!({})), ""),
        (selfsigned(json!({"ca": {"duration": "20h", "renewBefore": "4h"}, "server": {"duration": "20h"}})), ""),
        (selfsigned(json!({"ca": {"duration": "48h", "renewBefore": "48h"}})), ""),
        (
            selfsigned(json!({"server": {"duration": "5s", "renewBefore": "1s"}})),
            "spec.certificateRotateStrategy.selfSigned.server.duration: invalid value 5s: must be at least 10s, so that \
             certificates can be renewed in time",
        ),
        (selfsigned(json!({"caRotateInterval": "168h", "certRotateInterval": "24h", "caOverlapInterval": "24h"})), ""),
        (
            selfsigned(json!({"ca": {"duration": "48h", "renewBefore": "49h"}})),
            "spec.certificateRotateStrategy.selfSigned.ca.renewBefore: invalid value 49h0m0s: must not be longer than \
             ca.duration, which is 48h0m0s",
        ),
        (
            selfsigned(json!({"server": {"duration": "1h", "renewBefore": "90m"}})),
            "spec.certificateRotateStrategy.selfSigned.server.renewBefore: invalid value 1h30m0s: must not be longer than \
             server.duration, which is 1h0m0s",
        ),
        (
            selfsigned(
                json!({"ca": {"duration": "60s", "renewBefore": "20s"}, "server": {"duration": "16s", "renewBefore": "9s"}}),
            ),
            "",
        ),
        (
            selfsigned(json!({"server": {"duration": "1h", "renewBefore": "0"}})),
            "spec.certificateRotateStrategy.selfSigned.server.renewBefore: invalid value 0s: must be at least 5s, because \
             pods load a new certificate some time after it is issued",
        ),
        (
            selfsigned(json!({"ca": {"duration": "48h", "renewBefore": "4s"}})),
            "spec.certificateRotateStrategy.selfSigned.ca.renewBefore: invalid value 4s: must be at least 5s, because pods \
             load a new certificate some time after it is issued",
        ),
        (
            selfsigned(json!({"ca": {"duration": "20h"}})),
            "spec.certificateRotateStrategy.selfSigned.server.duration: invalid value 24h0m0s: must not be longer than \
             ca.duration, which is 20h0m0s: a certificate cannot outlive its CA",
        ),
        (
            selfsigned(json!({"caRotateInterval": "168h", "server": {"duration": "24h"}})),
            "spec.certificateRotateStrategy.selfSigned: deprecated fields cannot be combined with ca and server; remove \
             caRotateInterval, certRotateInterval and caOverlapInterval",
        ),
        (
            selfsigned(json!({"ca": {"duration": "a week"}})),
            "spec.certificateRotateStrategy.selfSigned.ca.duration: invalid value \"a week\": must be a duration such as 24h \
             or 90m",
        ),
    ]);
}

#[test]
fn replicas_must_be_from_1_to_255() {
    assert_refusals([
        (json!({"infra": {"replicas": 1}}), ""),
        (json!({"infra": {}}), ""),
        (
            json!({"infra": {"replicas": 0}}),
            "spec.infra.replicas: invalid value 0: infra replica count can't be 0; must be at least 1, because KubeVirt \
             needs its control plane; remove the field to use the default",
        ),
        (json!({"infra": {"replicas": -1}}), "spec.infra.replicas: invalid value -1: must be from 1 to 255"),
        (json!({"infra": {"replicas": 256}}), "spec.infra.replicas: invalid value 256: must be from 1 to 255"),
    ]);
}

#[test]
fn the_memory_overhead_ratio_must_be_at_least_1() {
    let ratio = |text: &str| json!({"configuration": {"additionalGuestMemoryOverheadRatio": text}});
    assert_refusals([(ratio("1.0"), ""), (ratio("2"), ""), (ratio("1e1"), "")]);
    for text in ["0.9", "", "half", "NaN", "inf", "-1", "1,5"] {
        let expected = format!(
            "spec.configuration.additionalGuestMemoryOverheadRatio: invalid value {text:?}: must be a number of at least \
             1.0, such as \"1.5\""
        );
        assert_eq!(refused(&ratio(text)), [expected]);
    }
}

#[test]
fn settings_without_their_feature_gate_are_refused() {
    let with = |gates: Value, rest: (&str, Value)| {
        let mut configuration = json!({"developerConfiguration": {"featureGates": gates}});
        configuration[rest.0] = rest.1;
        json!({"configuration": configuration})
    };
    let template = |enabled: bool| ("virtTemplateDeployment", json!({"enabled": enabled}));
    let aggregation = |strategy: &str| ("roleAggregationStrategy", json!(strategy));
    assert_refusals([
        (with(json!(["Template"]), template(true)), ""),
        (with(json!([]), template(false)), ""),
        (
            with(json!([]), template(true)),
            "spec.configuration.virtTemplateDeployment.enabled: invalid value true: requires the feature gate Template; add \
             it to spec.configuration.developerConfiguration.featureGates",
        ),
        (with(json!(["OptOutRoleAggregation"]), aggregation("Manual")), ""),
        (with(json!([]), aggregation("AggregateToDefault")), ""),
        (
            with(json!(["Template"]), aggregation("Manual")),
            "spec.configuration.roleAggregationStrategy: invalid value Manual: requires the feature gate \
             OptOutRoleAggregation; add it to spec.configuration.developerConfiguration.featureGates",
        ),
    ]);
}

#[test]
fn a_gate_on_both_lists_is_refused() {
    let gates = |on: &[&str], off: &[&str]| json!({"configuration": {"developerConfiguration": {"featureGates": on, "disabledFeatureGates": off}}});
    assert_refusals([
        (gates(&["Snapshot"], &["VMExport"]), ""),
        (
            gates(&["Snapshot", "VMExport"], &["VMExport"]),
            "spec.configuration.developerConfiguration.featureGates: VMExport is also in disabledFeatureGates; remove it \
             from one of the lists",
        ),
    ]);
}

#[test]
fn ciphers_are_refused_with_tls_1_3_or_if_unknown() {
    let tls = |settings: Value| json!({"configuration": {"tlsConfiguration": settings}});
    let too_new = "spec.configuration.tlsConfiguration.ciphers: cannot be configured for TLS 1.3; set minTLSVersion \
     to VersionTLS12, or remove the ciphers";
    let good = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256";
    assert_refusals([
        (tls(json!({"minTLSVersion": "VersionTLS13"})), ""),
        (tls(json!({"minTLSVersion": "VersionTLS12", "ciphers": [good, "TLS_RSA_WITH_RC4_128_SHA"]})), ""),
        (tls(json!({"minTLSVersion": "VersionTLS10", "ciphers": []})), ""),
        (tls(json!({"minTLSVersion": "VersionTLS13", "ciphers": [good]})), too_new),
        (tls(json!({"ciphers": [good]})), too_new),
        (
            tls(json!({"minTLSVersion": "VersionTLS12", "ciphers": [good, "ROT13"]})),
            "spec.configuration.tlsConfiguration.ciphers[1]: unsupported value \"ROT13\"; use a name such as \
             TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
        ),
    ]);
}

#[test]
fn a_seccomp_profile_has_exactly_one_source() {
    let profile = |profile: Value| json!({"configuration": {"seccompConfiguration": profile}});
    let custom = |custom: Value| profile(json!({"virtualMachineInstanceProfile": {"customProfile": custom}}));
    assert_refusals([
        (profile(json!({})), ""),
        (custom(json!({"localhostProfile": "a.json"})), ""),
        (custom(json!({"runtimeDefaultProfile": true})), ""),
        (custom(json!({"runtimeDefaultProfile": false, "localhostProfile": "a.json"})), ""),
        (
            custom(json!({"runtimeDefaultProfile": true, "localhostProfile": "a.json"})),
            "spec.configuration.seccompConfiguration.virtualMachineInstanceProfile.customProfile: localhostProfile and \
             runtimeDefaultProfile are mutually exclusive; remove one of them",
        ),
        (
            profile(json!({"virtualMachineInstanceProfile": {}})),
            "spec.configuration.seccompConfiguration.virtualMachineInstanceProfile.customProfile: required value: set \
             localhostProfile or runtimeDefaultProfile, or remove virtualMachineInstanceProfile",
        ),
    ]);
}

#[test]
fn invalid_registries_and_tags_are_refused() {
    for registry in ["quay.io/kubevirt", "localhost:5000", "Registry.example:5000/a/b-c_d", "[::1]:5000/x", "docker"] {
        assert_eq!(refused(&json!({"imageRegistry": registry})), [""; 0], "{registry}");
    }
    for registry in
        ["https://quay.io/kubevirt", "quay.io/kubevirt/", "quay.io/Kube", "a b", "host:port/x", "/x", "[x]/y"]
    {
        let expected = format!(
            "spec.imageRegistry: invalid value {registry:?}: must be a registry with a path, such as quay.io/kubevirt, without \
             a scheme and a trailing slash"
        );
        assert_eq!(refused(&json!({"imageRegistry": registry})), [expected]);
    }
    for tag in ["v1.8.4", "latest", "_x", "20260101_abc-def"] {
        assert_eq!(refused(&json!({"imageTag": tag})), [""; 0], "{tag}");
    }
    // A digest identifies one image, but the tag is that of every image.
    let digest = format!("sha256:{}", "0a".repeat(32));
    for tag in ["v1.8.4 ", ":v1", "-v1", "a/b", &digest, &"x".repeat(129)] {
        let expected =
            format!("spec.imageTag: invalid value {tag:?}: must be a tag of KubeVirt's images, such as v1.8.4");
        assert_eq!(refused(&json!({"imageTag": tag})), [expected]);
    }
}

#[test]
fn all_refusals_are_returned_together() {
    let refused = refused(&json!({"infra": {"replicas": 0}, "imageTag": "a b", "configuration": {
        "additionalGuestMemoryOverheadRatio": "0"}}));
    assert_eq!(refused.len(), 3, "{refused:?}");
}

#[test]
fn unchanged_fields_are_refused_only_where_upstream_refuses_them() {
    let both = |replicas: u8, ciphers: &[&str]| {
        kubevirt(&json!({"infra": {"replicas": replicas}, "imageTag": "a b", "configuration": {
            "tlsConfiguration": {"minTLSVersion": "VersionTLS13", "ciphers": ciphers},
            "developerConfiguration": {"featureGates": ["A"], "disabledFeatureGates": ["A"]},
        }}))
    };
    let (old, mut new) = (both(0, &["x"]), both(0, &["x"]));
    new.spec.product_name = "another".to_owned();
    let refused = messages(&validate_update(&old, &new));
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].starts_with("spec.infra.replicas"));
}

#[test]
fn a_finalizer_can_always_be_removed() {
    let old = kubevirt(&json!({"infra": {"replicas": 0}}));
    let mut new = old.clone();
    new.metadata.finalizers = Some(Vec::new());
    assert_eq!(validate_update(&old, &new), ValidationResult::default());

    let mut new = kubevirt(&json!({"infra": {"replicas": 0}, "imageTag": "v1"}));
    assert_eq!(validate_update(&old, &new).refusals.len(), 1);
    new.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert_eq!(validate_update(&old, &new), ValidationResult::default());
}

#[test]
fn a_second_kubevirt_resource_is_refused() {
    let new = kubevirt(&json!({}));
    assert_eq!(validate_create(&new, &[]), ValidationResult::default());
    let refused = messages(&validate_create(&new, &[ObjectKey::namespaced("kubevirt", "kubevirt")]));
    assert_eq!(
        refused,
        ["Kubevirt is already created: KubeVirt kubevirt/kubevirt already exists, and a cluster can have only one \
             installation; change that one, or delete it and wait until it is gone"]
    );
    assert_eq!(validate_create(&kubevirt(&json!({"infra": {"replicas": 0}})), &[]).refusals.len(), 1);
}

#[test]
fn deletion_is_guarded_by_strategy_and_phase() {
    for (strategy, phase, guarded) in [
        ("BlockUninstallIfWorkloadsExist", "Deployed", true),
        ("BlockUninstallIfWorkloadsExist", "Deploying", false),
        ("BlockUninstallIfWorkloadsExist", "Deleting", false),
        ("RemoveWorkloads", "Deployed", false),
        ("", "Deployed", false),
        ("SomethingElse", "Deployed", true),
    ] {
        let mut resource = kubevirt(&json!({"uninstallStrategy": strategy}));
        resource.status.get_or_insert_default().phase = phase.to_owned();
        assert_eq!(is_guarded(&resource), guarded, "{strategy} {phase}");
    }
    assert!(!is_guarded(&kubevirt(&json!({"uninstallStrategy": "BlockUninstallIfWorkloadsExist"}))));
}

#[test]
fn remaining_workloads_are_named() {
    let resource = kubevirt(&json!({"uninstallStrategy": "BlockUninstallIfWorkloadsExist"}));
    let remaining = |kind, names: &[&str], more| Remaining {
        kind,
        examples: names.iter().map(|name| ObjectKey::namespaced("shop", name)).collect(),
        more,
    };
    assert_eq!(delete(&resource, &[remaining("Virtual Machines", &[], false)]), None);
    let refusal = delete(
        &resource,
        &[
            remaining("Virtual Machine Instances", &["a", "b"], true),
            remaining("Virtual Machines", &["a"], false),
            remaining("Virtual Machine Instance Replica Sets", &[], false),
        ],
    );
    assert_eq!(
        refusal.unwrap().to_string(),
        "KubeVirt cannot be deleted: there are still Virtual Machine Instances present (shop/a, shop/b and others) and \
         Virtual Machines present (shop/a), and spec.uninstallStrategy is BlockUninstallIfWorkloadsExist; delete them \
         first, or set spec.uninstallStrategy to RemoveWorkloads to delete them together with KubeVirt"
    );
}

#[test]
fn a_changed_placement_needs_a_dry_run() {
    let placed = json!({"nodePlacement": {"nodeSelector": {"a": "b"}}});
    let old = kubevirt(&json!({}));
    let new = kubevirt(&json!({"infra": placed, "workloads": placed}));
    let dry_runs = validate_update(&old, &new).dry_runs;
    let fields: Vec<&str> = dry_runs.iter().map(|dry_run| dry_run.field).collect();
    assert_eq!(fields, ["spec.infra.nodePlacement", "spec.workloads.nodePlacement"]);
    let [DryRunObject::Deployment(deployment), DryRunObject::DaemonSet(daemon_set)] =
        [&dry_runs[0].object, &dry_runs[1].object]
    else {
        panic!("{dry_runs:?}");
    };
    for template in [&deployment.spec.as_ref().unwrap().template, &daemon_set.spec.as_ref().unwrap().template] {
        let pod = template.spec.as_ref().unwrap();
        assert_eq!(pod.node_selector.as_ref().unwrap()["a"], "b");
    }
    let refusal = dry_runs[0].refusal("spec.template.spec.tolerations[0].key", "Invalid value: \"x\"");
    assert_eq!(
        refusal.to_string(),
        "spec.infra.nodePlacement.tolerations[0].key: invalid placement: Invalid value: \"x\""
    );
    let refusal = dry_runs[1].refusal("spec.template.spec.tolerations[3].operator", "Unsupported value: \"x\"");
    assert_eq!(
        refusal.to_string(),
        "spec.workloads.nodePlacement.tolerations[3].operator: spec.workloads.nodePlacement.tolerations.operator in \
         body should be one of the supported values: Unsupported value: \"x\""
    );
    assert_eq!(dry_runs[1].refusal("", "odd").field, "spec.workloads.nodePlacement");

    let more = kubevirt(&json!({"infra": placed, "workloads": placed, "imageTag": "v1"}));
    assert_eq!(validate_update(&new, &more).dry_runs, []);
    let other = kubevirt(&json!({"infra": placed, "workloads": {}}));
    assert_eq!(validate_update(&new, &other).dry_runs, []);
}

#[test]
fn warnings_are_not_refusals() {
    let result = validate_update(
        &kubevirt(&json!({})),
        &kubevirt(&json!({"configuration": {
            "developerConfiguration": {"featureGates": ["LiveMigration", "NUMA"]},
            "network": {"permitSlirpInterface": false},
            "mediatedDevicesConfiguration": {
                "mediatedDevicesTypes": ["x"],
                "nodeMediatedDeviceTypes": [{"mediatedDeviceTypes": ["y"]}, {"mediatedDevicesTypes": ["z"]}],
            },
            "architectureConfiguration": {"ppc64le": {}},
        }})),
    );
    assert_eq!(result.refusals, []);
    let about = [
        "developerConfiguration.featureGates: LiveMigration is always enabled",
        "developerConfiguration.featureGates: NUMA is always enabled",
        "permitSlirpInterface has no effect",
        "mediatedDevicesConfiguration.mediatedDevicesTypes is deprecated; use mediatedDeviceTypes",
        "mediatedDevicesConfiguration.nodeMediatedDeviceTypes[1].mediatedDevicesTypes is deprecated",
        "architectureConfiguration.ppc64le has no effect",
    ];
    assert_eq!(result.warnings.len(), about.len(), "{:?}", result.warnings);
    for (warning, about) in result.warnings.iter().zip(about) {
        assert!(warning.contains(about), "{warning}");
    }
}

#[test]
fn a_refusal_is_not_repeated_as_a_warning() {
    let questionable_spec = json!({"configuration": {
        "roleAggregationStrategy": "Manual",
        "tlsConfiguration": {"minTLSVersion": "VersionTLS13", "ciphers": ["x"]},
        "developerConfiguration": {"featureGates": ["A"], "disabledFeatureGates": ["A"]},
    }, "imageTag": "a b", "infra": {"replicas": 0}});
    let result = validate_create(&kubevirt(&questionable_spec), &[]);
    assert_eq!(result.refusals.len(), 5, "{result:?}");
    assert_eq!(result.warnings, [""; 0]);

    // Unchanged fields are refused only where upstream refuses them; the other errors become warnings.
    let mut changed = kubevirt(&questionable_spec);
    changed.spec.product_name = "another".to_owned();
    let result = validate_update(&kubevirt(&questionable_spec), &changed);
    let refused = messages(&result);
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(refused[0].starts_with("spec.infra.replicas") && refused[1].contains("roleAggregationStrategy"));
    assert_eq!(result.warnings.len(), 3, "{:?}", result.warnings);
    for (warning, about) in
        result.warnings.iter().zip(["spec.imageTag", "ciphers", "A is also in disabledFeatureGates"])
    {
        assert!(warning.contains(about), "{warning}");
    }
}

#[test]
fn errors_block_the_installation_and_questionable_settings_do_not() {
    let questionable_spec = json!({"configuration": {"roleAggregationStrategy": "Manual"}});
    assert_eq!(check_installable(&kubevirt(&questionable_spec)), Ok(()));
    assert_eq!(questionable(&kubevirt(&questionable_spec)).len(), 1);
    let invalid = json!({"infra": {"replicas": 0}, "imageTag": "a b"});
    assert_eq!(questionable(&kubevirt(&invalid)), []);
    let failure = check_installable(&kubevirt(&invalid)).unwrap_err();
    assert_eq!((failure.class, failure.reason), (vitivirt_api::ErrorClass::Invalid, INVALID_RESOURCE));
    assert!(
        failure.message.contains("spec.infra.replicas: invalid value 0") && failure.message.contains("; spec.imageTag")
    );
}
