//! What the operator itself may do: what it works with, and everything that it grants to others, because nobody can
//! grant what they do not have.
//!
//! The permissions are the release's. What ours needs beyond them is in `beyond_the_release`, and nowhere else.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::{api_server, controller, export_proxy, handler, named, rule, synchronization_controller, urls, users};
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

/// In the whole cluster.
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
    rules.extend(beyond_the_release());
    rules
}

/// In the namespace that it runs in.
pub(crate) fn namespace_rules() -> Vec<PolicyRule> {
    let mut rules = own_namespace_rules();
    rules.extend(api_server::namespace_rules());
    rules.extend(controller::namespace_rules());
    rules.extend(handler::namespace_rules());
    rules.extend(export_proxy::namespace_rules());
    rules.extend(synchronization_controller::namespace_rules());
    rules
}

/// What the release's operator can do without.
fn beyond_the_release() -> Vec<PolicyRule> {
    vec![
        // Ours reports through the newer events API, the release's through the older one.
        rule(&["events.k8s.io"], &["events"], &["create", "patch"]),
        // The release's replaces these objects whole. Ours sends only what differs, with a test of their UID.
        named(rule(&OPENSHIFT_SECURITY, &CONSTRAINTS, &["patch"]), &CONSTRAINTS_OF_KUBEVIRT),
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
        named(rule(&OPENSHIFT_SECURITY, &CONSTRAINTS, &["get", "patch", "update"]), &["privileged"]),
        named(
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

/// What `system:auth-delegator` holds, which virt-api is bound to.
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
        named(rule(&[""], &["secrets"], &ALL_BUT_UPDATE), &certificates),
        rule(&[""], &["configmaps"], &ALL_BUT_UPDATE),
        rule(&["route.openshift.io"], &["routes"], &ALL_BUT_UPDATE),
        rule(&["route.openshift.io"], &["routes/custom-host"], &["create"]),
        rule(&["coordination.k8s.io"], &["leases"], &EVERYTHING),
    ]
}
