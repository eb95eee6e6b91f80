//! virt-template, a separate service that creates VMs from templates. Only with the feature gate Template.
//!
//! It is a separate project with its own version, which is a label of its objects.

mod rules;
mod workloads;

use k8s_openapi::{
    api::{
        admissionregistration::v1::{
            RuleWithOperations, ServiceReference, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
            ValidatingAdmissionPolicyBindingSpec, ValidatingAdmissionPolicySpec, ValidatingWebhook,
            ValidatingWebhookConfiguration, WebhookClientConfig,
        },
        core::v1::{Service, ServiceAccount, ServicePort, ServiceSpec},
        rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding},
    },
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};

use crate::{
    api_services,
    config::DeploymentConfig,
    metadata::{cluster_scoped, namespaced, string_map, strings, with_annotations},
    names::{VIRT_TEMPLATE_API_SERVER, label},
    policy::{forbidden, matching, variable},
    rbac::{role_ref, service_account},
};

pub(crate) use workloads::{API_SERVER_CONTAINER, CONTROLLER_CONTAINER, deployments};

const NAME: &str = "virt-template";
const VERSION: (&str, &str) = ("template.kubevirt.io/virt-template-version", "v0.1.8");
const API_SERVER_ACCOUNT: &str = VIRT_TEMPLATE_API_SERVER;
const CONTROLLER_ACCOUNT: &str = "virt-template-controller-manager";
const API_SERVICE: &str = "virt-template-api-service";
const WEBHOOK_SERVICE: &str = "virt-template-webhook-service";
const GROUP: &str = "template.kubevirt.io";
const POLICY: &str = "virt-template-vmtr-authz";
const API_SERVER: (&str, &str) = ("control-plane", "apiserver");
const CONTROLLER: (&str, &str) = ("control-plane", "controller-manager");

fn labelled(metadata: ObjectMeta, app: &str) -> ObjectMeta {
    let mut metadata = with_annotations(metadata, &[VERSION]);
    metadata.labels.get_or_insert_default().extend(string_map(&[(label::NAME, NAME), (label::APP, app)]));
    metadata
}

fn in_cluster(name: &str) -> ObjectMeta {
    labelled(cluster_scoped(name, &[]), name)
}

fn in_namespace(config: &DeploymentConfig, name: &str) -> ObjectMeta {
    labelled(namespaced(&config.namespace, name, &[]), name)
}

pub(crate) fn service_accounts(config: &DeploymentConfig) -> Vec<ServiceAccount> {
    [API_SERVER_ACCOUNT, CONTROLLER_ACCOUNT]
        .map(|name| ServiceAccount { metadata: in_namespace(config, name), ..ServiceAccount::default() })
        .into()
}

pub(crate) fn cluster_roles() -> Vec<ClusterRole> {
    let role = |metadata: ObjectMeta, rules: Vec<PolicyRule>| ClusterRole {
        metadata,
        rules: Some(rules),
        ..ClusterRole::default()
    };
    let unlabelled = |name: &str| with_annotations(cluster_scoped(name, &[]), &[VERSION]);
    let aggregated = |name: &str, to: &[&str]| {
        let mut metadata = in_cluster(&format!("virt-template-{name}-role"));
        let keys = to.iter().map(|to| format!("rbac.authorization.k8s.io/aggregate-to-{to}"));
        metadata.labels.get_or_insert_default().extend(keys.map(|key| (key, "true".to_owned())));
        metadata
    };
    vec![
        role(unlabelled("virt-template-apiserver-role"), rules::apiserver()),
        role(unlabelled("virt-template-manager-role"), rules::manager()),
        role(in_cluster("virt-template-metrics-auth-role"), rules::metrics_auth()),
        role(in_cluster("virt-template-metrics-reader"), rules::metrics_reader()),
        role(aggregated("virtualmachinetemplate-admin", &["admin"]), rules::virtualmachinetemplate_admin()),
        role(aggregated("virtualmachinetemplate-editor", &["edit"]), rules::virtualmachinetemplate_editor()),
        role(aggregated("virtualmachinetemplate-viewer", &["view"]), rules::virtualmachinetemplate_viewer()),
        role(
            aggregated("virtualmachinetemplaterequest-admin", &["admin"]),
            rules::virtualmachinetemplaterequest_admin(),
        ),
        role(
            aggregated("virtualmachinetemplaterequest-editor", &["edit"]),
            rules::virtualmachinetemplaterequest_editor(),
        ),
        role(
            aggregated("virtualmachinetemplaterequest-source", &["admin", "edit"]),
            rules::virtualmachinetemplaterequest_source(),
        ),
        role(
            aggregated("virtualmachinetemplaterequest-viewer", &["view"]),
            rules::virtualmachinetemplaterequest_viewer(),
        ),
    ]
}

pub(crate) fn cluster_role_bindings(config: &DeploymentConfig) -> Vec<ClusterRoleBinding> {
    let binding = |metadata: ObjectMeta, role: &str, account: &str| ClusterRoleBinding {
        metadata,
        role_ref: role_ref("ClusterRole", role),
        subjects: Some(vec![service_account(&config.namespace, account)]),
    };
    // A label cannot contain colons.
    let delegator = labelled(
        cluster_scoped("virt-template-apiserver:system:auth-delegator", &[]),
        "virt-template-apiserver-system-auth-delegator",
    );
    vec![
        binding(in_cluster("virt-template-apiserver-rolebinding"), "virt-template-apiserver-role", API_SERVER_ACCOUNT),
        binding(delegator, "system:auth-delegator", API_SERVER_ACCOUNT),
        binding(in_cluster("virt-template-manager-rolebinding"), "virt-template-manager-role", CONTROLLER_ACCOUNT),
        binding(
            in_cluster("virt-template-metrics-auth-rolebinding"),
            "virt-template-metrics-auth-role",
            CONTROLLER_ACCOUNT,
        ),
    ]
}

pub(crate) fn roles(config: &DeploymentConfig) -> Vec<Role> {
    vec![Role {
        metadata: in_namespace(config, "virt-template-leader-election-role"),
        rules: Some(rules::leader_election()),
    }]
}

pub(crate) fn role_bindings(config: &DeploymentConfig) -> Vec<RoleBinding> {
    let binding = |metadata: ObjectMeta, role: &str, account: &str| RoleBinding {
        metadata,
        role_ref: role_ref("Role", role),
        subjects: Some(vec![service_account(&config.namespace, account)]),
    };
    // The configuration of the authentication of aggregated APIs is in that namespace.
    let reader = "virt-template-apiserver-auth-reader";
    vec![
        binding(
            labelled(namespaced("kube-system", reader, &[]), reader),
            "extension-apiserver-authentication-reader",
            API_SERVER_ACCOUNT,
        ),
        binding(
            in_namespace(config, "virt-template-leader-election-rolebinding"),
            "virt-template-leader-election-role",
            CONTROLLER_ACCOUNT,
        ),
    ]
}

pub(crate) fn services(config: &DeploymentConfig) -> Vec<Service> {
    let service = |name: &str, of: (&str, &str), port_name: Option<&str>, port: i32, target: i32| Service {
        metadata: in_namespace(config, name),
        spec: Some(ServiceSpec {
            selector: Some(string_map(&[(label::NAME, NAME), of])),
            ports: Some(vec![ServicePort {
                name: port_name.map(ToOwned::to_owned),
                port,
                target_port: Some(IntOrString::Int(target)),
                protocol: Some("TCP".to_owned()),
                ..ServicePort::default()
            }]),
            ..ServiceSpec::default()
        }),
        status: None,
    };
    let mut metrics =
        service("virt-template-controller-manager-metrics-service", CONTROLLER, Some("https"), 8443, 8443);
    metrics.metadata.labels.get_or_insert_default().extend(string_map(&[CONTROLLER]));
    vec![
        service(API_SERVICE, API_SERVER, None, 443, 9443),
        metrics,
        service(WEBHOOK_SERVICE, CONTROLLER, None, 443, 9443),
    ]
}

pub(crate) fn api_services(config: &DeploymentConfig) -> Vec<APIService> {
    let (group, version) = ("subresources.template.kubevirt.io", "v1alpha1");
    vec![APIService {
        metadata: labelled(cluster_scoped(&format!("{version}.{group}"), &[]), "virt-template-apiserver-aggregator"),
        spec: Some(api_services::spec(group, version, &config.namespace, API_SERVICE)),
        status: None,
    }]
}

pub(crate) fn validating(config: &DeploymentConfig) -> Vec<ValidatingWebhookConfiguration> {
    let webhook = ValidatingWebhook {
        name: "vvirtualmachinetemplate-v1alpha1.kb.io".to_owned(),
        client_config: WebhookClientConfig {
            service: Some(ServiceReference {
                namespace: config.namespace.clone(),
                name: WEBHOOK_SERVICE.to_owned(),
                path: Some("/validate-template-kubevirt-io-v1alpha1-virtualmachinetemplate".to_owned()),
                port: None,
            }),
            ..WebhookClientConfig::default()
        },
        rules: Some(vec![RuleWithOperations {
            operations: Some(strings(&["CREATE", "UPDATE"])),
            api_groups: Some(strings(&[GROUP])),
            api_versions: Some(strings(&["v1alpha1"])),
            resources: Some(strings(&["virtualmachinetemplates"])),
            scope: None,
        }]),
        failure_policy: Some("Fail".to_owned()),
        side_effects: "None".to_owned(),
        admission_review_versions: strings(&["v1"]),
        ..ValidatingWebhook::default()
    };
    vec![ValidatingWebhookConfiguration {
        metadata: with_annotations(cluster_scoped("virt-template-validating-webhook-configuration", &[]), &[VERSION]),
        webhooks: Some(vec![webhook]),
    }]
}

/// virt-template acts with its own permissions, so the policy requires that the requesting user has them too: to read
/// the VM and to create the result.
pub(crate) fn policy() -> ValidatingAdmissionPolicy {
    let may_create = |group: &str, resource: &str| {
        format!(
            "authorizer.group('{group}').resource('{resource}').namespace(variables.into).check('create').allowed()"
        )
    };
    let may_use = format!(
        "variables.machine.namespace == variables.into || authorizer.group('{GROUP}')\
         .resource('virtualmachinetemplaterequests').subresource('source').namespace(variables.machine.namespace)\
         .name(variables.machine.name).check('create').allowed()"
    );
    ValidatingAdmissionPolicy {
        metadata: in_cluster(POLICY),
        spec: Some(ValidatingAdmissionPolicySpec {
            failure_policy: Some("Fail".to_owned()),
            match_constraints: Some(matching("CREATE", GROUP, "v1alpha1", "virtualmachinetemplaterequests")),
            variables: Some(vec![
                variable("into", "object.metadata.namespace"),
                variable("machine", "object.spec.virtualMachineRef"),
            ]),
            validations: Some(vec![
                forbidden(&may_use, "the user may not create a template from a virtual machine in that namespace"),
                forbidden(
                    &may_create("cdi.kubevirt.io", "datavolumes"),
                    "the user may not create DataVolumes in the namespace of the request",
                ),
                forbidden(
                    &may_create(GROUP, "virtualmachinetemplates"),
                    "the user may not create VirtualMachineTemplates in the namespace of the request",
                ),
            ]),
            ..ValidatingAdmissionPolicySpec::default()
        }),
        status: None,
    }
}

pub(crate) fn policy_binding() -> ValidatingAdmissionPolicyBinding {
    ValidatingAdmissionPolicyBinding {
        metadata: in_cluster(POLICY),
        spec: Some(ValidatingAdmissionPolicyBindingSpec {
            policy_name: Some(POLICY.to_owned()),
            validation_actions: Some(strings(&["Deny"])),
            ..ValidatingAdmissionPolicyBindingSpec::default()
        }),
    }
}
