//! The permissions of the operator: those that it uses, and those that it grants to others, because a client can grant
//! only permissions that it holds.
//!
//! They are the permissions of upstream virt-operator. Additional ones are in `additional_rules` and nowhere else.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::{api_server, controller, export_proxy, handler, rule, synchronization_controller, urls, users, with_names};
use crate::certificates::{
    BACKUP_CA, CA, EXPORT_CA, SYNCHRONIZATION_CLIENT, SYNCHRONIZATION_SERVER, TEMPLATE_API, TEMPLATE_METRICS,
    TEMPLATE_WEBHOOK, VIRT_API, VIRT_CONTROLLER, VIRT_EXPORT_PROXY, VIRT_HANDLER_CLIENT, VIRT_HANDLER_MIGRATION,
    VIRT_HANDLER_SERVER, VIRT_HANDLER_VSOCK, VIRT_OPERATOR,
};

const ALL_BUT_UPDATE: [&str; 6] = ["create", "get", "list", "watch", "patch", "delete"];
const EVERYTHING: [&str; 7] = ["get", "list", "watch", "create", "delete", "update", "patch"];
const CONSTRAINTS: [&str; 1] = ["securitycontextconstraints"];
const OPENSHIFT_SECURITY: [&str; 1] = ["security.openshift.io"];
const CONSTRAINTS_OF_KUBEVIRT: [&str; 2] = ["kubevirt-handler", "kubevirt-controller"];

/// The permissions in the whole cluster.
pub(crate) fn cluster_rules() -> Vec<PolicyRule> {
    let mut rules = own_cluster_rules();
    rules.extend(api_server::cluster_rules());
    rules.extend(controller::cluster_rules());
    rules.push(controller::network_attachment_rule());
    rules.extend(handler::cluster_rules());
    rules.extend(export_proxy::cluster_rules());
    rules.extend(synchronization_controller::cluster_rules());
    for role in [users::everyone, users::admin, users::edit, users::view, users::view_instancetypes, users::migrate] {
        rules.extend(role());
    }
    rules.extend(delegated_authentication());
    rules.extend(additional_rules());
    rules
}

/// The permissions in the namespace of the operator.
pub(crate) fn namespace_rules() -> Vec<PolicyRule> {
    let mut rules = own_namespace_rules();
    rules.extend(api_server::namespace_rules());
    rules.extend(controller::namespace_rules());
    rules.extend(handler::namespace_rules());
    rules.extend(export_proxy::namespace_rules());
    rules.extend(synchronization_controller::namespace_rules());
    rules
}

/// Permissions that upstream virt-operator does not need.
fn additional_rules() -> Vec<PolicyRule> {
    vec![
        // This operator uses the newer events API, upstream the older one.
        rule(&["events.k8s.io"], &["events"], &["create", "patch"]),
        // Upstream does not store objects again before an upgrade.
        rule(&["apiextensions.k8s.io"], &["customresourcedefinitions/status"], &["patch"]),
        rule(&["migrations.kubevirt.io"], &["migrationpolicies"], &["patch"]),
        // Upstream replaces these objects. This operator patches the differences.
        with_names(rule(&OPENSHIFT_SECURITY, &CONSTRAINTS, &["patch"]), &CONSTRAINTS_OF_KUBEVIRT),
    ]
}

fn own_cluster_rules() -> Vec<PolicyRule> {
    vec![
        rule(&["kubevirt.io"], &["kubevirts"], &["get", "list", "watch", "patch", "update"]),
        rule(&[""], &["serviceaccounts", "services", "endpoints", "pods/exec"], &EVERYTHING),
        rule(&[""], &["configmaps"], &["patch", "delete"]),
        rule(&["batch"], &["jobs"], &ALL_BUT_UPDATE),
        rule(&["apps"], &["controllerrevisions"], &["watch", "list", "create", "delete", "patch"]),
        rule(&["apps"], &["deployments", "daemonsets"], &ALL_BUT_UPDATE),
        rule(
            &["rbac.authorization.k8s.io"],
            &["clusterroles", "clusterrolebindings", "roles", "rolebindings"],
            &EVERYTHING,
        ),
        rule(&["apiextensions.k8s.io"], &["customresourcedefinitions"], &ALL_BUT_UPDATE),
        rule(&OPENSHIFT_SECURITY, &CONSTRAINTS, &["create", "get", "list", "watch"]),
        with_names(rule(&OPENSHIFT_SECURITY, &CONSTRAINTS, &["get", "patch", "update"]), &["privileged"]),
        with_names(
            rule(&OPENSHIFT_SECURITY, &CONSTRAINTS, &["get", "list", "watch", "update", "delete"]),
            &CONSTRAINTS_OF_KUBEVIRT,
        ),
        rule(
            &["admissionregistration.k8s.io"],
            &[
                "validatingwebhookconfigurations",
                "mutatingwebhookconfigurations",
                "validatingadmissionpolicybindings",
                "validatingadmissionpolicies",
            ],
            &EVERYTHING,
        ),
        rule(&["apiregistration.k8s.io"], &["apiservices"], &EVERYTHING),
        rule(&["monitoring.coreos.com"], &["servicemonitors", "prometheusrules"], &EVERYTHING),
        rule(&[""], &["namespaces"], &["get", "list", "watch", "patch"]),
        rule(
            &["template.kubevirt.io"],
            &["virtualmachinetemplates", "virtualmachinetemplaterequests"],
            &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
        ),
        rule(
            &["template.kubevirt.io"],
            &["virtualmachinetemplates/status", "virtualmachinetemplaterequests/status"],
            &["get", "patch"],
        ),
        rule(
            &["template.kubevirt.io"],
            &["virtualmachinetemplates/finalizers", "virtualmachinetemplaterequests/finalizers"],
            &["update"],
        ),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplaterequests/source"], &["create"]),
        urls(&["/metrics"], &["get"]),
    ]
}

/// The permissions of `system:auth-delegator`, to which virt-api is bound.
fn delegated_authentication() -> Vec<PolicyRule> {
    vec![
        rule(&["authentication.k8s.io"], &["tokenreviews"], &["create"]),
        rule(&["authorization.k8s.io"], &["subjectaccessreviews"], &["create"]),
    ]
}

fn own_namespace_rules() -> Vec<PolicyRule> {
    let certificates = [
        CA,
        EXPORT_CA,
        BACKUP_CA,
        VIRT_HANDLER_CLIENT,
        VIRT_HANDLER_SERVER,
        VIRT_HANDLER_MIGRATION,
        VIRT_HANDLER_VSOCK,
        VIRT_OPERATOR,
        VIRT_API,
        VIRT_CONTROLLER,
        VIRT_EXPORT_PROXY,
        SYNCHRONIZATION_CLIENT,
        SYNCHRONIZATION_SERVER,
        TEMPLATE_API,
        TEMPLATE_WEBHOOK,
        TEMPLATE_METRICS,
    ];
    vec![
        with_names(rule(&[""], &["secrets"], &ALL_BUT_UPDATE), &certificates),
        rule(&[""], &["configmaps"], &ALL_BUT_UPDATE),
        rule(&["route.openshift.io"], &["routes"], &ALL_BUT_UPDATE),
        rule(&["route.openshift.io"], &["routes/custom-host"], &["create"]),
        rule(&["coordination.k8s.io"], &["leases"], &EVERYTHING),
    ]
}
