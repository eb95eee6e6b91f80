//! The validating webhooks of the operator and of virt-api.

use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, RuleWithOperations, ValidatingWebhook, ValidatingWebhookConfiguration,
};

use super::{CORE, CREATE, TIMEOUT_SECONDS, UPDATE, WRITE, client, rule};
use crate::{
    certificates,
    config::DeploymentConfig,
    metadata::{cluster_scoped, strings, with_annotations},
    names::{OPERATOR_WEBHOOK_SERVICE, VIRT_API, annotation, label},
};

const OPERATOR_VALIDATOR: &str = "virt-operator-validator";
const API_VALIDATOR: &str = "virt-api-validator";

/// The name and path of a webhook, and the requests that it validates.
type WebhookCheck<'a> = (&'a str, &'a str, RuleWithOperations);

pub(crate) fn validating(config: &DeploymentConfig) -> Vec<ValidatingWebhookConfiguration> {
    let namespace = &config.namespace;
    let checks = |service: &str, checks: Vec<WebhookCheck<'_>>| -> Vec<ValidatingWebhook> {
        checks.into_iter().map(|check| webhook(namespace, service, check)).collect()
    };
    let operator = ValidatingWebhookConfiguration {
        metadata: with_annotations(
            cluster_scoped(OPERATOR_VALIDATOR, &[(label::APP, OPERATOR_VALIDATOR)]),
            &[(annotation::CERTIFICATE_SECRET, certificates::VIRT_OPERATOR)],
        ),
        webhooks: Some(checks(OPERATOR_WEBHOOK_SERVICE, kubevirts())),
    };
    let mut webhooks = evictions(namespace);
    webhooks.extend(checks(VIRT_API, machines()));
    webhooks.extend(checks(VIRT_API, extensions()));
    let api = ValidatingWebhookConfiguration {
        metadata: with_annotations(
            cluster_scoped(API_VALIDATOR, &[(label::APP, API_VALIDATOR)]),
            &[(annotation::CERTIFICATE_SECRET, certificates::VIRT_API)],
        ),
        webhooks: Some(webhooks),
    };
    vec![operator, api]
}

fn kubevirts() -> Vec<WebhookCheck<'static>> {
    let kubevirts = |operations: &[&str]| rule(operations, "kubevirt.io", CORE, &["kubevirts"]);
    vec![
        ("kubevirt-validator.kubevirt.io", "/kubevirt-validate-delete", kubevirts(&["DELETE"])),
        ("kubevirt-update-validator.kubevirt.io", "/kubevirt-validate-update", kubevirts(UPDATE)),
        ("kubevirt-create-validator.kubevirt.io", "/kubevirt-validate-create", kubevirts(CREATE)),
    ]
}

/// A VMI is migrated instead of evicted. These webhooks intercept the evictions of its pods.
fn evictions(namespace: &str) -> Vec<ValidatingWebhook> {
    let interceptor = |name: &str, condition: &str, prefix: &str, versions: &[&str]| ValidatingWebhook {
        side_effects: "NoneOnDryRun".to_owned(),
        admission_review_versions: strings(versions),
        match_conditions: Some(vec![MatchCondition {
            name: condition.to_owned(),
            expression: format!("object.metadata.name.startsWith(\"{prefix}\")"),
        }]),
        ..webhook(namespace, VIRT_API, (name, "/pod-eviction-validate", rule(&["*"], "", &["v1"], &["pods/eviction"])))
    };
    vec![
        interceptor("virt-launcher-eviction-interceptor.kubevirt.io", "only-vms", "virt-launcher", &["v1"]),
        interceptor(
            "hotplug-pod-eviction-interceptor.kubevirt.io",
            "only-hotplug-pods",
            "hp-volume-",
            &["v1", "v1beta1"],
        ),
    ]
}

fn machines() -> Vec<WebhookCheck<'static>> {
    let core = |operations: &[&str], resource: &str| rule(operations, "kubevirt.io", CORE, &[resource]);
    let pools = rule(WRITE, "pool.kubevirt.io", &["v1beta1"], &["virtualmachinepools"]);
    vec![
        (
            "virtualmachineinstances-create-validator.kubevirt.io",
            "/virtualmachineinstances-validate-create",
            core(CREATE, "virtualmachineinstances"),
        ),
        (
            "virtualmachineinstances-update-validator.kubevirt.io",
            "/virtualmachineinstances-validate-update",
            core(UPDATE, "virtualmachineinstances"),
        ),
        ("virtualmachine-validator.kubevirt.io", "/virtualmachines-validate", core(WRITE, "virtualmachines")),
        (
            "virtualmachinereplicaset-validator.kubevirt.io",
            "/virtualmachinereplicaset-validate",
            core(WRITE, "virtualmachineinstancereplicasets"),
        ),
        ("virtualmachinepool-validator.kubevirt.io", "/virtualmachinepool-validate", pools),
        (
            "virtualmachinepreset-validator.kubevirt.io",
            "/vmipreset-validate",
            core(WRITE, "virtualmachineinstancepresets"),
        ),
        (
            "migration-create-validator.kubevirt.io",
            "/migration-validate-create",
            core(CREATE, "virtualmachineinstancemigrations"),
        ),
        (
            "migration-update-validator.kubevirt.io",
            "/migration-validate-update",
            core(UPDATE, "virtualmachineinstancemigrations"),
        ),
    ]
}

fn extensions() -> Vec<WebhookCheck<'static>> {
    let of = |group: &str, version: &str, resource: &str| rule(WRITE, group, &[version], &[resource]);
    let snapshot = |resource| of("snapshot.kubevirt.io", "v1beta1", resource);
    let backup = |resource| of("backup.kubevirt.io", "v1alpha1", resource);
    let instancetype = |resource| of("instancetype.kubevirt.io", "v1beta1", resource);
    let statuses = [
        "virtualmachines/status",
        "virtualmachineinstancereplicasets/status",
        "virtualmachineinstancemigrations/status",
    ];
    vec![
        (
            "virtualmachinesnapshot-validator.snapshot.kubevirt.io",
            "/virtualmachinesnapshots-validate",
            snapshot("virtualmachinesnapshots"),
        ),
        (
            "virtualmachinerestore-validator.snapshot.kubevirt.io",
            "/virtualmachinerestores-validate",
            snapshot("virtualmachinerestores"),
        ),
        (
            "virtualmachinebackup-validator.backup.kubevirt.io",
            "/virtualmachinebackups-validate",
            backup("virtualmachinebackups"),
        ),
        (
            "virtualmachinebackuptracker-validator.backup.kubevirt.io",
            "/virtualmachinebackuptrackers-validate",
            backup("virtualmachinebackuptrackers"),
        ),
        (
            "virtualmachineexport-validator.export.kubevirt.io",
            "/virtualmachineexports-validate",
            of("export.kubevirt.io", "v1beta1", "virtualmachineexports"),
        ),
        (
            "virtualmachineinstancetype-validator.instancetype.kubevirt.io",
            "/virtualmachineinstancetypes-validate",
            instancetype("virtualmachineinstancetypes"),
        ),
        (
            "virtualmachineclusterinstancetype-validator.instancetype.kubevirt.io",
            "/virtualmachineclusterinstancetypes-validate",
            instancetype("virtualmachineclusterinstancetypes"),
        ),
        (
            "virtualmachinepreference-validator.instancetype.kubevirt.io",
            "/virtualmachinepreferences-validate",
            instancetype("virtualmachinepreferences"),
        ),
        (
            "virtualmachineclusterpreference-validator.instancetype.kubevirt.io",
            "/virtualmachineclusterpreferences-validate",
            instancetype("virtualmachineclusterpreferences"),
        ),
        ("kubevirt-crd-status-validator.kubevirt.io", "/status-validate", rule(WRITE, "kubevirt.io", CORE, &statuses)),
        (
            "migration-policy-validator.kubevirt.io",
            "/migration-policy-validate-create",
            of("migrations.kubevirt.io", "v1alpha1", "migrationpolicies"),
        ),
        (
            "vm-clone-validator.kubevirt.io",
            "/vm-clone-validate-create",
            of("clone.kubevirt.io", "v1beta1", "virtualmachineclones"),
        ),
    ]
}

fn webhook(namespace: &str, service: &str, (name, path, rule): WebhookCheck<'_>) -> ValidatingWebhook {
    ValidatingWebhook {
        name: name.to_owned(),
        client_config: client(namespace, service, path),
        rules: Some(vec![rule]),
        failure_policy: Some("Fail".to_owned()),
        side_effects: "None".to_owned(),
        timeout_seconds: Some(TIMEOUT_SECONDS),
        admission_review_versions: strings(&["v1"]),
        ..ValidatingWebhook::default()
    }
}
