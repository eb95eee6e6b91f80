//! The admission policy that restricts virt-handler to its own node.
//!
//! RBAC allows virt-handler to patch every node, because RBAC does not know which pod sends a request. The policy does:
//! a token that is bound to a pod contains the name of the node. On that node virt-handler may change only the labels
//! and annotations of KubeVirt.

use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MatchResources, NamedRuleWithOperations, ValidatingAdmissionPolicy,
    ValidatingAdmissionPolicyBinding, ValidatingAdmissionPolicyBindingSpec, ValidatingAdmissionPolicySpec, Validation,
    Variable,
};

use crate::{
    config::DeploymentConfig,
    metadata::{cluster_scoped, strings},
    names::{HANDLER_SERVICE_ACCOUNT, label},
};

const POLICY: &str = "kubevirt-node-restriction-policy";
const BINDING: &str = "kubevirt-node-restriction-binding";

pub(crate) fn binding() -> ValidatingAdmissionPolicyBinding {
    ValidatingAdmissionPolicyBinding {
        metadata: cluster_scoped(BINDING, &[(label::APP, "kubevirt-node-restriction")]),
        spec: Some(ValidatingAdmissionPolicyBindingSpec {
            policy_name: Some(POLICY.to_owned()),
            validation_actions: Some(strings(&["Deny"])),
            match_resources: Some(matching("*", "", "*", "nodes")),
            param_ref: None,
        }),
    }
}

pub(crate) fn policy(config: &DeploymentConfig) -> ValidatingAdmissionPolicy {
    let account = format!("system:serviceaccount:{}:{HANDLER_SERVICE_ACCOUNT}", config.namespace);
    ValidatingAdmissionPolicy {
        metadata: cluster_scoped(POLICY, &[]),
        spec: Some(ValidatingAdmissionPolicySpec {
            failure_policy: Some("Fail".to_owned()),
            match_constraints: Some(matching("UPDATE", "", "*", "nodes")),
            match_conditions: Some(vec![MatchCondition {
                name: "asked-by-virt-handler".to_owned(),
                expression: format!("request.userInfo.username == '{account}'"),
            }]),
            variables: Some(variables()),
            validations: Some(validations()),
            ..ValidatingAdmissionPolicySpec::default()
        }),
        status: None,
    }
}

/// A node may have no labels or annotations.
fn variables() -> Vec<Variable> {
    ["labels", "annotations"]
        .into_iter()
        .flat_map(|field| {
            [("before", "oldObject"), ("after", "object")].map(|(when, object)| {
                let path = format!("{object}.metadata.{field}");
                variable(&format!("{field}_{when}"), &format!("has({path}) ? {path} : {{}}"))
            })
        })
        .collect()
}

fn validations() -> Vec<Validation> {
    const BOUND_TO: &str = "authentication.kubernetes.io/node-name";
    const MAY_CHANGE: &str = "field in ['labels', 'annotations', 'managedFields', 'resourceVersion']";
    let own_node = format!(
        "'{BOUND_TO}' in request.userInfo.extra && request.userInfo.extra['{BOUND_TO}'] == [object.metadata.name]"
    );
    let metadata = format!(
        "object.metadata.all(field, {MAY_CHANGE} || (field in oldObject.metadata \
         && object.metadata[field] == oldObject.metadata[field])) \
         && oldObject.metadata.all(field, {MAY_CHANGE} || field in object.metadata)"
    );
    vec![
        forbidden(&own_node, "virt-handler may change only the node that it runs on"),
        forbidden("object.spec == oldObject.spec", "virt-handler may not change the spec of a node"),
        forbidden(&metadata, "virt-handler may change only labels and annotations in the metadata of a node"),
        forbidden(
            &unchanged("labels", "key.contains('kubevirt.io') || key == 'cpumanager'"),
            "virt-handler may add, change and remove only KubeVirt's labels of a node",
        ),
        forbidden(
            &unchanged("annotations", "key.contains('kubevirt.io')"),
            "virt-handler may add, change and remove only KubeVirt's annotations of a node",
        ),
    ]
}

/// Every key that does not belong to KubeVirt exists before and after, with the same value.
fn unchanged(field: &str, ours: &str) -> String {
    format!(
        "variables.{field}_before.all(key, {ours} || (key in variables.{field}_after \
         && variables.{field}_after[key] == variables.{field}_before[key])) \
         && variables.{field}_after.all(key, {ours} || key in variables.{field}_before)"
    )
}

pub(crate) fn forbidden(expression: &str, message: &str) -> Validation {
    Validation {
        expression: expression.to_owned(),
        message: Some(message.to_owned()),
        reason: Some("Forbidden".to_owned()),
        message_expression: None,
    }
}

pub(crate) fn variable(name: &str, expression: &str) -> Variable {
    Variable { name: name.to_owned(), expression: expression.to_owned() }
}

pub(crate) fn matching(operation: &str, group: &str, version: &str, resource: &str) -> MatchResources {
    MatchResources {
        resource_rules: Some(vec![NamedRuleWithOperations {
            operations: Some(strings(&[operation])),
            api_groups: Some(strings(&[group])),
            api_versions: Some(strings(&[version])),
            resources: Some(strings(&[resource])),
            ..NamedRuleWithOperations::default()
        }]),
        ..MatchResources::default()
    }
}
