//! The admission webhooks of the operator and of virt-api.
//!
//! Their CA bundle is inserted when an object is sent (`InstallationObject::body`).

mod mutating;
mod validating;

use k8s_openapi::{
    api::admissionregistration::v1::{
        RuleWithOperations, ServiceReference, ValidatingWebhook, ValidatingWebhookConfiguration, WebhookClientConfig,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use crate::metadata::strings;

pub(crate) use mutating::{POD_MUTATOR, mutating};
pub(crate) use validating::validating;

/// Both API versions of `kubevirt.io`.
const CORE: &[&str] = &["v1alpha3", "v1"];
const CREATE: &[&str] = &["CREATE"];
const UPDATE: &[&str] = &["UPDATE"];
const WRITE: &[&str] = &["CREATE", "UPDATE"];
const TIMEOUT_SECONDS: i32 = 10;

fn rule(operations: &[&str], group: &str, versions: &[&str], resources: &[&str]) -> RuleWithOperations {
    RuleWithOperations {
        operations: Some(strings(operations)),
        api_groups: Some(strings(&[group])),
        api_versions: Some(strings(versions)),
        resources: Some(strings(resources)),
        scope: None,
    }
}

fn client(namespace: &str, service: &str, path: &str) -> WebhookClientConfig {
    WebhookClientConfig {
        service: Some(ServiceReference {
            namespace: namespace.to_owned(),
            name: service.to_owned(),
            path: Some(path.to_owned()),
            port: None,
        }),
        ..WebhookClientConfig::default()
    }
}

/// How the names of blocking webhook configurations begin.
pub(crate) const BLOCKING_PREFIX: &str = "virt-operator-tmp-webhook";

/// Rejects new objects of CRDs that did not exist before, until virt-api, which validates them, is ready: the webhook
/// points to a Service that does not exist. `crds` are pairs of a group and a plural.
pub(crate) fn blocking_webhook(namespace: &str, crds: &[(&str, &str)]) -> ValidatingWebhookConfiguration {
    let webhook = |(group, plural): &(&str, &str)| ValidatingWebhook {
        name: format!("{plural}-tmp-validator.{group}"),
        client_config: client(namespace, "fake-validation-service", &format!("/fake-path/{plural}.{group}")),
        rules: Some(vec![rule(CREATE, group, &["*"], &[plural])]),
        failure_policy: Some("Fail".to_owned()),
        side_effects: "None".to_owned(),
        admission_review_versions: strings(&["v1"]),
        ..ValidatingWebhook::default()
    };
    ValidatingWebhookConfiguration {
        metadata: ObjectMeta { generate_name: Some(BLOCKING_PREFIX.to_owned()), ..ObjectMeta::default() },
        webhooks: Some(crds.iter().map(webhook).collect()),
    }
}
