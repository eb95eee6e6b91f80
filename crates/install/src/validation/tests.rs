use serde_json::{Value, json};

use super::*;

fn kubevirt(spec: &Value) -> KubeVirt {
    let object = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt"}, "spec": spec,
    });
    serde_json::from_value(object).unwrap()
}

fn told(verdict: &Verdict) -> Vec<String> {
    verdict.refusals.iter().map(ToString::to_string).collect()
}

/// What is said when an empty specification becomes this one.
fn refused(spec: &Value) -> Vec<String> {
    told(&update(&kubevirt(&json!({})), &kubevirt(spec)))
}

#[track_caller]
fn table(rows: impl IntoIterator<Item = (Value, &'static str)>) {
    for (spec, expected) in rows {
        let told = refused(&spec);
        match expected {
            "" => assert_eq!(told, [""; 0], "{spec}"),
            expected => assert_eq!(told, [expected], "{spec}"),
        }
    }
}

#[test]
fn patches_that_are_none() {
    let patch = |kind: &str, patch: &str| {
        let patch = json!({"resourceName": "virt-api", "resourceType": "Deployment", "type": kind, "patch": patch});
        json!({"customizeComponents": {"patches": [patch]}})
    };
    table([
        (patch("json", r#"[{"op": "replace", "path": "/spec/replicas", "value": 3}]"#), ""),
        (patch("merge", "{}"), ""),
        (patch("strategic", r#"{"metadata": {"labels": {"a": "b"}}}"#), ""),
        (
            patch("strategic", "json: not valid"),
            "spec.customizeComponents.patches[0] is not JSON: expected value at line 1 column 1",
        ),
        (
            patch("yaml", "{}"),
            r#"spec.customizeComponents.patches[0] has the type "yaml"; it must be json, merge or strategic"#,
        ),
        (patch("strategic", "[]"), "spec.customizeComponents.patches[0] is not a JSON object"),
    ]);
    let [told] = refused(&patch("json", "{}")).try_into().unwrap();
    assert!(told.starts_with("spec.customizeComponents.patches[0] is not a JSON patch: "), "{told}");
}

#[test]
fn every_bad_patch_is_named_by_its_place() {
    let good = json!({"resourceName": "a", "resourceType": "b", "type": "merge", "patch": "{}"});
    let bad = json!({"resourceName": "a", "resourceType": "b", "type": "merge", "patch": "{"});
    let told = refused(&json!({"customizeComponents": {"patches": [bad, good, bad]}}));
    assert_eq!(told.len(), 2);
    assert!(told[0].starts_with("spec.customizeComponents.patches[0] is not JSON"), "{told:?}");
    assert!(told[1].starts_with("spec.customizeComponents.patches[2] is not JSON"), "{told:?}");
}

#[test]
fn lifetimes_of_certificates() {
    let selfsigned = |settings: Value| json!({"certificateRotateStrategy": {"selfSigned": settings}});
    table([
        (selfsigned(json!({})), ""),
        (selfsigned(json!({"ca": {"duration": "20h", "renewBefore": "4h"}, "server": {"duration": "20h"}})), ""),
        (selfsigned(json!({"ca": {"duration": "48h", "renewBefore": "48h"}})), ""),
        (
            selfsigned(json!({"server": {"duration": "5s", "renewBefore": "1s"}})),
            "spec.certificateRotateStrategy.selfSigned.server.duration is 5s, which is too short to be renewed in \
             time; give it at least 10s",
        ),
        (selfsigned(json!({"caRotateInterval": "168h", "certRotateInterval": "24h", "caOverlapInterval": "24h"})), ""),
        (
            selfsigned(json!({"ca": {"duration": "48h", "renewBefore": "49h"}})),
            "spec.certificateRotateStrategy.selfSigned.ca.renewBefore is 49h0m0s, which is longer than ca.duration, \
             48h0m0s: a certificate would be renewed before it is made; shorten it",
        ),
        (
            selfsigned(json!({"server": {"duration": "1h", "renewBefore": "90m"}})),
            "spec.certificateRotateStrategy.selfSigned.server.renewBefore is 1h30m0s, which is longer than \
             server.duration, 1h0m0s: a certificate would be renewed before it is made; shorten it",
        ),
        (
            selfsigned(json!({"ca": {"duration": "20h"}})),
            "spec.certificateRotateStrategy.selfSigned.server.duration is 24h0m0s, which is longer than ca.duration, \
             20h0m0s: a certificate cannot outlive the authority that signs it; shorten it, or lengthen ca.duration",
        ),
        (
            selfsigned(json!({"caRotateInterval": "168h", "server": {"duration": "24h"}})),
            "spec.certificateRotateStrategy.selfSigned mixes two ways to say the same: take away caRotateInterval, \
             certRotateInterval and caOverlapInterval, which are deprecated, and keep ca and server",
        ),
        (
            selfsigned(json!({"ca": {"duration": "a week"}})),
            "spec.certificateRotateStrategy.selfSigned.ca.duration must be a duration such as 24h or 90m, and \
             \"a week\" is not",
        ),
    ]);
}

#[test]
fn at_least_one_replica() {
    table([
        (json!({"infra": {"replicas": 1}}), ""),
        (json!({"infra": {}}), ""),
        (
            json!({"infra": {"replicas": 0}}),
            "spec.infra.replicas cannot be 0, because KubeVirt does not work without its control plane; set it to 1 or \
             more, or leave it out for the usual number",
        ),
        (json!({"infra": {"replicas": -1}}), "spec.infra.replicas must be a number from 1 to 255, and -1 is not"),
        (json!({"infra": {"replicas": 256}}), "spec.infra.replicas must be a number from 1 to 255, and 256 is not"),
    ]);
}

#[test]
fn the_overhead_of_guests() {
    let ratio = |text: &str| json!({"configuration": {"additionalGuestMemoryOverheadRatio": text}});
    table([(ratio("1.0"), ""), (ratio("2"), ""), (ratio("1e1"), "")]);
    for text in ["0.9", "", "half", "NaN", "inf", "-1", "1,5"] {
        let expected = format!(
            "spec.configuration.additionalGuestMemoryOverheadRatio must be a number of 1.0 or more, such as \"1.5\", \
             and {text:?} is not"
        );
        assert_eq!(refused(&ratio(text)), [expected]);
    }
}

#[test]
fn what_needs_a_gate() {
    let with = |gates: Value, rest: (&str, Value)| {
        let mut configuration = json!({"developerConfiguration": {"featureGates": gates}});
        configuration[rest.0] = rest.1;
        json!({"configuration": configuration})
    };
    let template = |enabled: bool| ("virtTemplateDeployment", json!({"enabled": enabled}));
    let aggregation = |strategy: &str| ("roleAggregationStrategy", json!(strategy));
    table([
        (with(json!(["Template"]), template(true)), ""),
        (with(json!([]), template(false)), ""),
        (
            with(json!([]), template(true)),
            "spec.configuration.virtTemplateDeployment.enabled cannot be true without the feature gate Template: add it \
             to spec.configuration.developerConfiguration.featureGates",
        ),
        (with(json!(["OptOutRoleAggregation"]), aggregation("Manual")), ""),
        (with(json!([]), aggregation("AggregateToDefault")), ""),
        (
            with(json!(["Template"]), aggregation("Manual")),
            "spec.configuration.roleAggregationStrategy cannot be Manual without the feature gate \
             OptOutRoleAggregation: add it to spec.configuration.developerConfiguration.featureGates",
        ),
    ]);
}

#[test]
fn gates_on_both_lists() {
    let gates = |on: &[&str], off: &[&str]| json!({"configuration": {"developerConfiguration": {"featureGates": on, "disabledFeatureGates": off}}});
    table([
        (gates(&["Snapshot"], &["VMExport"]), ""),
        (
            gates(&["Snapshot", "VMExport"], &["VMExport"]),
            "spec.configuration.developerConfiguration.featureGates and disabledFeatureGates both name VMExport: take it \
             off one of the lists",
        ),
    ]);
}

#[test]
fn versions_and_ciphers_of_tls() {
    let tls = |settings: Value| json!({"configuration": {"tlsConfiguration": settings}});
    let too_new = "spec.configuration.tlsConfiguration.ciphers can only be chosen up to TLS 1.2: set minTLSVersion to \
                   VersionTLS12, or take the ciphers away";
    let good = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256";
    table([
        (tls(json!({"minTLSVersion": "VersionTLS13"})), ""),
        (tls(json!({"minTLSVersion": "VersionTLS12", "ciphers": [good, "TLS_RSA_WITH_RC4_128_SHA"]})), ""),
        (tls(json!({"minTLSVersion": "VersionTLS10", "ciphers": []})), ""),
        (tls(json!({"minTLSVersion": "VersionTLS13", "ciphers": [good]})), too_new),
        (tls(json!({"ciphers": [good]})), too_new),
        (
            tls(json!({"minTLSVersion": "VersionTLS12", "ciphers": [good, "ROT13"]})),
            "spec.configuration.tlsConfiguration.ciphers[1] is \"ROT13\", which is no cipher suite; write it as \
             TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
        ),
    ]);
}

#[test]
fn seccomp_profiles() {
    let profile = |profile: Value| json!({"configuration": {"seccompConfiguration": profile}});
    let custom = |custom: Value| profile(json!({"virtualMachineInstanceProfile": {"customProfile": custom}}));
    table([
        (profile(json!({})), ""),
        (custom(json!({"localhostProfile": "a.json"})), ""),
        (custom(json!({"runtimeDefaultProfile": true})), ""),
        (custom(json!({"runtimeDefaultProfile": false, "localhostProfile": "a.json"})), ""),
        (
            custom(json!({"runtimeDefaultProfile": true, "localhostProfile": "a.json"})),
            "spec.configuration.seccompConfiguration.virtualMachineInstanceProfile.customProfile has both \
             localhostProfile and runtimeDefaultProfile; only one can be used, so take one away",
        ),
        (
            profile(json!({"virtualMachineInstanceProfile": {}})),
            "spec.configuration.seccompConfiguration.virtualMachineInstanceProfile.customProfile must be set: give it a \
             localhostProfile or runtimeDefaultProfile, or take the profile away",
        ),
    ]);
}

#[test]
fn images_that_cannot_be() {
    for registry in ["quay.io/kubevirt", "localhost:5000", "Registry.example:5000/a/b-c_d", "[::1]:5000/x", "docker"] {
        assert_eq!(refused(&json!({"imageRegistry": registry})), [""; 0], "{registry}");
    }
    for registry in
        ["https://quay.io/kubevirt", "quay.io/kubevirt/", "quay.io/Kube", "a b", "host:port/x", "/x", "[x]/y"]
    {
        let expected = format!(
            "spec.imageRegistry must be a registry with a path, such as quay.io/kubevirt, without a scheme and without a \
             slash at its end, and {registry:?} is not"
        );
        assert_eq!(refused(&json!({"imageRegistry": registry})), [expected]);
    }
    for tag in ["v1.8.4", "latest", "_x", "20260101_abc-def"] {
        assert_eq!(refused(&json!({"imageTag": tag})), [""; 0], "{tag}");
    }
    // A digest is of one image, and the tag is that of all.
    let digest = format!("sha256:{}", "0a".repeat(32));
    for tag in ["v1.8.4 ", ":v1", "-v1", "a/b", &digest, &"x".repeat(129)] {
        let expected = format!("spec.imageTag must be a tag of KubeVirt's images, such as v1.8.4, and {tag:?} is not");
        assert_eq!(refused(&json!({"imageTag": tag})), [expected]);
    }
}

#[test]
fn several_things_are_told_at_once() {
    let told = refused(&json!({"infra": {"replicas": 0}, "imageTag": "a b", "configuration": {
        "additionalGuestMemoryOverheadRatio": "0"}}));
    assert_eq!(told.len(), 3, "{told:?}");
}

#[test]
fn what_is_not_changed_is_judged_only_where_the_release_does() {
    let both = |replicas: u8, ciphers: &[&str]| {
        kubevirt(&json!({"infra": {"replicas": replicas}, "imageTag": "a b", "configuration": {
            "tlsConfiguration": {"minTLSVersion": "VersionTLS13", "ciphers": ciphers},
            "developerConfiguration": {"featureGates": ["A"], "disabledFeatureGates": ["A"]},
        }}))
    };
    let (old, mut new) = (both(0, &["x"]), both(0, &["x"]));
    new.spec.product_name = "another".to_owned();
    let told = told(&update(&old, &new));
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].starts_with("spec.infra.replicas"));
}

#[test]
fn a_finalizer_can_always_be_taken_off() {
    let old = kubevirt(&json!({"infra": {"replicas": 0}}));
    let mut new = old.clone();
    new.metadata.finalizers = Some(Vec::new());
    assert_eq!(update(&old, &new), Verdict::default());

    let mut new = kubevirt(&json!({"infra": {"replicas": 0}, "imageTag": "v1"}));
    assert_eq!(update(&old, &new).refusals.len(), 1);
    new.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert_eq!(update(&old, &new), Verdict::default());
}

#[test]
fn a_second_installation() {
    let new = kubevirt(&json!({}));
    assert_eq!(create(&new, &[]), Verdict::default());
    let told = told(&create(&new, &[ObjectKey::namespaced("kubevirt", "kubevirt")]));
    assert_eq!(
        told,
        [
            "KubeVirt is already created: there is kubevirt/kubevirt, and a cluster has one installation; change that one, \
          or delete it and wait wait_for it is gone"
        ]
    );
    assert_eq!(create(&kubevirt(&json!({"infra": {"replicas": 0}})), &[]).refusals.len(), 1);
}

#[test]
fn removal_is_guarded_by_strategy_and_phase() {
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
fn what_is_left_is_named() {
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
        "KubeVirt is not removed, because there are still Virtual Machine Instances present (shop/a, shop/b and others) \
         and Virtual Machines present (shop/a), and spec.uninstallStrategy is BlockUninstallIfWorkloadsExist: delete \
         them first, or set spec.uninstallStrategy to RemoveWorkloads to have them deleted with KubeVirt"
    );
}

#[test]
fn placement_is_shown_to_the_server_when_it_changes() {
    let placed = json!({"nodePlacement": {"nodeSelector": {"a": "b"}}});
    let old = kubevirt(&json!({}));
    let new = kubevirt(&json!({"infra": placed, "workloads": placed}));
    let dry_runs = update(&old, &new).dry_runs;
    let fields: Vec<&str> = dry_runs.iter().map(|dry_run| dry_run.field).collect();
    assert_eq!(fields, ["spec.infra.nodePlacement", "spec.workloads.nodePlacement"]);
    let [Template::Deployment(deployment), Template::DaemonSet(daemon_set)] =
        [&dry_runs[0].template, &dry_runs[1].template]
    else {
        panic!("{dry_runs:?}");
    };
    for template in [&deployment.spec.as_ref().unwrap().template, &daemon_set.spec.as_ref().unwrap().template] {
        let pod = template.spec.as_ref().unwrap();
        assert_eq!(pod.node_selector.as_ref().unwrap()["a"], "b");
    }
    let refusal = dry_runs[0].refusal("spec.template.spec.tolerations[0].operator", "Invalid value: \"x\"");
    assert_eq!(
        refusal.to_string(),
        "spec.infra.nodePlacement.tolerations[0].operator cannot be used for pods: Invalid value: \"x\""
    );
    assert_eq!(dry_runs[1].refusal("", "odd").field, "spec.workloads.nodePlacement");

    let more = kubevirt(&json!({"infra": placed, "workloads": placed, "imageTag": "v1"}));
    assert_eq!(update(&new, &more).dry_runs, []);
    let other = kubevirt(&json!({"infra": placed, "workloads": {}}));
    assert_eq!(update(&new, &other).dry_runs, []);
}

#[test]
fn warnings_refuse_nothing() {
    let verdict = update(
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
    assert_eq!(verdict.refusals, []);
    let about = [
        "feature gate LiveMigration is always on",
        "feature gate NUMA is always on",
        "permitSlirpInterface does nothing",
        "mediatedDevicesConfiguration.mediatedDevicesTypes is deprecated: use mediatedDeviceTypes",
        "mediatedDevicesConfiguration.nodeMediatedDeviceTypes[1].mediatedDevicesTypes is deprecated",
        "architectureConfiguration.ppc64le does nothing",
    ];
    assert_eq!(verdict.warnings.len(), about.len(), "{:?}", verdict.warnings);
    for (warning, about) in verdict.warnings.iter().zip(about) {
        assert!(warning.contains(about), "{warning}");
    }
}

#[test]
fn what_is_refused_is_not_told_a_second_time_as_a_warning() {
    let doubtful = json!({"configuration": {
        "roleAggregationStrategy": "Manual",
        "tlsConfiguration": {"minTLSVersion": "VersionTLS13", "ciphers": ["x"]},
        "developerConfiguration": {"featureGates": ["A"], "disabledFeatureGates": ["A"]},
    }, "imageTag": "a b", "infra": {"replicas": 0}});
    let verdict = create(&kubevirt(&doubtful), &[]);
    assert_eq!(verdict.refusals.len(), 5, "{verdict:?}");
    assert_eq!(verdict.warnings, [""; 0]);

    // What is not changed is let through, or refused only where the release refuses it; the rest is told.
    let mut changed = kubevirt(&doubtful);
    changed.spec.product_name = "another".to_owned();
    let verdict = update(&kubevirt(&doubtful), &changed);
    let refused = told(&verdict);
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(refused[0].starts_with("spec.infra.replicas") && refused[1].contains("roleAggregationStrategy"));
    assert_eq!(verdict.warnings.len(), 3, "{:?}", verdict.warnings);
    for (warning, about) in verdict.warnings.iter().zip(["spec.imageTag", "ciphers", "both name A"]) {
        assert!(warning.contains(about), "{warning}");
    }
}

#[test]
fn faults_are_what_cannot_be_installed_and_doubts_what_the_release_installs() {
    let doubtful = json!({"configuration": {"roleAggregationStrategy": "Manual"}});
    assert_eq!(sound(&kubevirt(&doubtful)), Ok(()));
    assert_eq!(doubts(&kubevirt(&doubtful)).len(), 1);
    let faulty = json!({"infra": {"replicas": 0}, "imageTag": "a b"});
    assert_eq!(doubts(&kubevirt(&faulty)), []);
    let failure = sound(&kubevirt(&faulty)).unwrap_err();
    assert_eq!((failure.class, failure.reason), (vitivirt_api::ErrorClass::Invalid, INVALID_RESOURCE));
    assert!(failure.message.contains("spec.infra.replicas cannot be 0") && failure.message.contains("; spec.imageTag"));
}
