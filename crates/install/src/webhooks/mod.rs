//! Admission webhooks: what the operator and virt-api check, and what virt-api completes.
//!
//! The authority that the API server trusts them by is filled in when an object is sent (`object::Object::body`).

mod mutating;
mod validating;

use k8s_openapi::api::admissionregistration::v1::{
    RuleWithOperations, ServiceReference, ValidatingWebhook, ValidatingWebhookConfiguration, WebhookClientConfig,
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::build::strings;

pub(crate) use mutating::{POD_MUTATOR, mutating};
pub(crate) use validating::validating;

/// Both of KubeVirt's own API versions.
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

/// Names of blocking configurations begin so; the server completes them.
pub const BLOCKING_PREFIX: &str = "virt-operator-tmp-webhook";

/// Refuses new objects of resources that did not exist before, until the virt-api that checks them is ready: it points
/// to a service that does not exist. `definitions` are pairs of a group and a plural.
pub fn blocking(namespace: &str, definitions: &[(&str, &str)]) -> ValidatingWebhookConfiguration {
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
        webhooks: Some(definitions.iter().map(webhook).collect()),
    }
}
