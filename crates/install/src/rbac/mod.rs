//! RBAC: ServiceAccounts, roles and bindings of the components, and the roles of users.
//!
//! The permissions of each component have a separate file. This file names and binds them.

mod api_server;
mod controller;
mod export_proxy;
mod handler;
pub(crate) mod operator;
pub(crate) mod previous;
mod synchronization_controller;
mod users;

use k8s_openapi::{
    api::{
        core::v1::ServiceAccount,
        rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use crate::{
    config::DeploymentConfig,
    metadata::{cluster_scoped, namespaced, strings, with_annotations},
    names::{
        API_SERVICE_ACCOUNT, CONTROLLER_SERVICE_ACCOUNT, EXPORT_PROXY_SERVICE_ACCOUNT, HANDLER_SERVICE_ACCOUNT,
        SYNCHRONIZATION_SERVICE_ACCOUNT, label,
    },
};

const GROUP: &str = "rbac.authorization.k8s.io";
const AUTOUPDATE: (&str, &str) = ("rbac.authorization.kubernetes.io/autoupdate", "true");
pub(crate) const AGGREGATE: &str = "rbac.authorization.k8s.io/aggregate-to-";
const MONITORING: &str = "kubevirt-monitoring";
pub(crate) const APP_LABEL: [(&str, &str); 1] = [(label::APP, "")];

const ACCOUNTS: [&str; 5] = [
    API_SERVICE_ACCOUNT,
    CONTROLLER_SERVICE_ACCOUNT,
    HANDLER_SERVICE_ACCOUNT,
    EXPORT_PROXY_SERVICE_ACCOUNT,
    SYNCHRONIZATION_SERVICE_ACCOUNT,
];

pub(crate) fn rule(groups: &[&str], resources: &[&str], verbs: &[&str]) -> PolicyRule {
    PolicyRule {
        api_groups: Some(strings(groups)),
        resources: Some(strings(resources)),
        verbs: strings(verbs),
        ..PolicyRule::default()
    }
}

/// Restricts a rule to objects with these names.
pub(crate) fn with_names(rule: PolicyRule, names: &[&str]) -> PolicyRule {
    PolicyRule { resource_names: Some(strings(names)), ..rule }
}

pub(crate) fn urls(paths: &[&str], verbs: &[&str]) -> PolicyRule {
    PolicyRule { non_resource_urls: Some(strings(paths)), verbs: strings(verbs), ..PolicyRule::default() }
}

pub(crate) fn service_account(namespace: &str, name: &str) -> Subject {
    Subject {
        kind: "ServiceAccount".to_owned(),
        name: name.to_owned(),
        namespace: Some(namespace.to_owned()),
        api_group: None,
    }
}

pub(crate) fn role_ref(kind: &str, name: &str) -> RoleRef {
    RoleRef { api_group: GROUP.to_owned(), kind: kind.to_owned(), name: name.to_owned() }
}

pub(crate) fn service_accounts(config: &DeploymentConfig) -> Vec<ServiceAccount> {
    let account = |name: &&str| ServiceAccount {
        metadata: namespaced(&config.namespace, name, &APP_LABEL),
        ..ServiceAccount::default()
    };
    ACCOUNTS.iter().map(account).collect()
}

pub(crate) fn cluster_roles(config: &DeploymentConfig) -> Vec<ClusterRole> {
    let aggregated = |to: &str| {
        let mut metadata = cluster_scoped(&format!("kubevirt.io:{to}"), &APP_LABEL);
        metadata.labels.get_or_insert_default().insert(format!("{AGGREGATE}{to}"), "true".to_owned());
        metadata
    };
    let bootstrapping = [(label::APP, ""), ("kubernetes.io/bootstrapping", "rbac-defaults")];
    let mut controller = controller::cluster_rules();
    if !config.external_net_resource_injection() {
        controller.push(controller::network_attachment_rule());
    }
    let role = |metadata: ObjectMeta, rules: Vec<PolicyRule>| ClusterRole {
        metadata,
        rules: Some(rules),
        ..ClusterRole::default()
    };
    vec![
        role(with_annotations(cluster_scoped("kubevirt.io:default", &bootstrapping), &[AUTOUPDATE]), users::everyone()),
        role(aggregated("admin"), users::admin()),
        role(aggregated("edit"), users::edit()),
        role(aggregated("view"), users::view()),
        role(cluster_scoped("instancetype.kubevirt.io:view", &APP_LABEL), users::view_instancetypes()),
        role(cluster_scoped("kubevirt.io:migrate", &APP_LABEL), users::migrate()),
        role(cluster_scoped(API_SERVICE_ACCOUNT, &APP_LABEL), api_server::cluster_rules()),
        role(cluster_scoped(CONTROLLER_SERVICE_ACCOUNT, &APP_LABEL), controller),
        role(cluster_scoped(HANDLER_SERVICE_ACCOUNT, &APP_LABEL), handler::cluster_rules()),
        role(cluster_scoped(EXPORT_PROXY_SERVICE_ACCOUNT, &APP_LABEL), export_proxy::cluster_rules()),
        role(cluster_scoped(SYNCHRONIZATION_SERVICE_ACCOUNT, &APP_LABEL), synchronization_controller::cluster_rules()),
    ]
}

pub(crate) fn cluster_role_bindings(config: &DeploymentConfig) -> Vec<ClusterRoleBinding> {
    let everyone = |name: &str| ClusterRoleBinding {
        metadata: with_annotations(cluster_scoped(name, &APP_LABEL), &[AUTOUPDATE]),
        role_ref: role_ref("ClusterRole", name),
        subjects: Some(vec![Subject {
            kind: "Group".to_owned(),
            name: "system:authenticated".to_owned(),
            api_group: Some(GROUP.to_owned()),
            namespace: None,
        }]),
    };
    let component = |name: &str, role: &str, account: &str| ClusterRoleBinding {
        metadata: cluster_scoped(name, &APP_LABEL),
        role_ref: role_ref("ClusterRole", role),
        subjects: Some(vec![service_account(&config.namespace, account)]),
    };
    let delegator =
        component(&format!("{API_SERVICE_ACCOUNT}-auth-delegator"), "system:auth-delegator", API_SERVICE_ACCOUNT);
    let mut bindings = vec![everyone("kubevirt.io:default"), everyone("instancetype.kubevirt.io:view")];
    for account in ACCOUNTS {
        bindings.push(component(account, account, account));
        if account == API_SERVICE_ACCOUNT {
            bindings.push(delegator.clone());
        }
    }
    bindings
}

pub(crate) fn roles(config: &DeploymentConfig, monitor_namespace: Option<&str>) -> Vec<Role> {
    let role = |name: &str, rules: Vec<PolicyRule>| Role {
        metadata: namespaced(&config.namespace, name, &APP_LABEL),
        rules: Some(rules),
    };
    let mut roles = vec![
        role(API_SERVICE_ACCOUNT, api_server::namespace_rules()),
        role(CONTROLLER_SERVICE_ACCOUNT, controller::namespace_rules()),
        role(HANDLER_SERVICE_ACCOUNT, handler::namespace_rules()),
        role(EXPORT_PROXY_SERVICE_ACCOUNT, export_proxy::namespace_rules()),
        role(SYNCHRONIZATION_SERVICE_ACCOUNT, synchronization_controller::namespace_rules()),
    ];
    if monitor_namespace.is_some() {
        let scrape = rule(&[""], &["services", "endpoints", "pods"], &["get", "list", "watch"]);
        roles.push(role(MONITORING, vec![scrape]));
    }
    roles
}

pub(crate) fn role_bindings(config: &DeploymentConfig, monitor_namespace: Option<&str>) -> Vec<RoleBinding> {
    let binding = |name: &str, subject: Subject| RoleBinding {
        metadata: namespaced(&config.namespace, name, &APP_LABEL),
        role_ref: role_ref("Role", name),
        subjects: Some(vec![subject]),
    };
    let components = ACCOUNTS.iter().map(|account| binding(account, service_account(&config.namespace, account)));
    let monitor = monitor_namespace
        .zip(config.monitor_account())
        .map(|(namespace, account)| binding(MONITORING, service_account(namespace, account)));
    components.chain(monitor).collect()
}

/// Sets the aggregation labels of a role to `false`.
pub(crate) fn opt_out_of_aggregation(role: &mut ClusterRole) {
    let labels = role.metadata.labels.iter_mut().flatten();
    for (_, value) in labels.filter(|(key, _)| key.starts_with(AGGREGATE)) {
        *value = "false".to_owned();
    }
}
