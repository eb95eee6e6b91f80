//! The mutating webhooks of virt-api.

use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations};

use super::{CORE, CREATE, TIMEOUT_SECONDS, WRITE, client, rule};
use crate::{
    certificates,
    config::DeploymentConfig,
    metadata::{cluster_scoped, label_selector, strings, with_annotations},
    names::{VIRT_API, annotation, label},
};

const MUTATOR: &str = "virt-api-mutator";
/// Only with the feature gate ContainerPathVolumes.
pub(crate) const POD_MUTATOR: &str = "virt-launcher-pod-mutator";

pub(crate) fn mutating(config: &DeploymentConfig) -> Vec<MutatingWebhookConfiguration> {
    let core = |operations: &[&str], resource: &str| rule(operations, "kubevirt.io", CORE, &[resource]);
    let clones = rule(CREATE, "clone.kubevirt.io", &["v1beta1"], &["virtualmachineclones"]);
    let completes = [
        ("virtualmachines-mutator.kubevirt.io", "/virtualmachines-mutate", core(WRITE, "virtualmachines")),
        (
            "virtualmachineinstances-mutator.kubevirt.io",
            "/virtualmachineinstances-mutate",
            core(WRITE, "virtualmachineinstances"),
        ),
        (
            "migrations-mutator.kubevirt.io",
            "/migration-mutate-create",
            core(CREATE, "virtualmachineinstancemigrations"),
        ),
        ("virtualmachineclones-mutator.kubevirt.io", "/vm-clone-mutate-create", clones),
    ];
    let webhooks = completes.map(|(name, path, rule)| webhook(config, name, path, rule));
    let pods = MutatingWebhook {
        // An unmodified virt-launcher pod still runs, so a failure of the webhook must not block its creation.
        failure_policy: Some("Ignore".to_owned()),
        reinvocation_policy: Some("IfNeeded".to_owned()),
        object_selector: Some(label_selector(&[(label::APP, "virt-launcher")])),
        ..webhook(
            config,
            "virt-launcher-pod-mutator.kubevirt.io",
            "/virt-launcher-pod-mutate",
            rule(CREATE, "", &["v1"], &["pods"]),
        )
    };
    vec![configuration(MUTATOR, webhooks.into()), configuration(POD_MUTATOR, vec![pods])]
}

fn configuration(name: &str, webhooks: Vec<MutatingWebhook>) -> MutatingWebhookConfiguration {
    MutatingWebhookConfiguration {
        metadata: with_annotations(
            cluster_scoped(name, &[(label::APP, name)]),
            &[(annotation::CERTIFICATE_SECRET, certificates::VIRT_API)],
        ),
        webhooks: Some(webhooks),
    }
}

fn webhook(config: &DeploymentConfig, name: &str, path: &str, rule: RuleWithOperations) -> MutatingWebhook {
    MutatingWebhook {
        name: name.to_owned(),
        client_config: client(&config.namespace, VIRT_API, path),
        rules: Some(vec![rule]),
        failure_policy: Some("Fail".to_owned()),
        side_effects: "None".to_owned(),
        timeout_seconds: Some(TIMEOUT_SECONDS),
        admission_review_versions: strings(&["v1"]),
        ..MutatingWebhook::default()
    }
}
