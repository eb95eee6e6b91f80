//! The permissions of virt-template and its users.

use k8s_openapi::api::rbac::v1::PolicyRule;

use crate::rbac::{rule, urls};

pub(super) fn apiserver() -> Vec<PolicyRule> {
    vec![
        rule(&["kubevirt.io"], &["virtualmachines"], &["create"]),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplates", "virtualmachinetemplates/status"], &["get"]),
    ]
}

pub(super) fn manager() -> Vec<PolicyRule> {
    vec![
        rule(&[""], &["persistentvolumeclaims", "pods"], &["create"]),
        rule(&["cdi.kubevirt.io"], &["datavolumes"], &["create", "delete", "get", "list", "patch", "watch"]),
        rule(&["cdi.kubevirt.io"], &["datavolumes/source"], &["create"]),
        rule(&["snapshot.kubevirt.io"], &["virtualmachinesnapshotcontents"], &["get", "list", "watch"]),
        rule(&["snapshot.kubevirt.io"], &["virtualmachinesnapshots"], &["create", "delete", "get", "list", "watch"]),
        rule(&["subresources.kubevirt.io"], &["expand-vm-spec"], &["update"]),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplaterequests"], &["get", "list", "patch", "watch"]),
        rule(
            &["template.kubevirt.io"],
            &["virtualmachinetemplaterequests/finalizers", "virtualmachinetemplates/finalizers"],
            &["update"],
        ),
        rule(
            &["template.kubevirt.io"],
            &["virtualmachinetemplaterequests/status", "virtualmachinetemplates/status"],
            &["get", "patch"],
        ),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplates"], &["create", "get", "list", "watch"]),
    ]
}

pub(super) fn metrics_auth() -> Vec<PolicyRule> {
    vec![
        rule(&["authentication.k8s.io"], &["tokenreviews"], &["create"]),
        rule(&["authorization.k8s.io"], &["subjectaccessreviews"], &["create"]),
    ]
}

pub(super) fn metrics_reader() -> Vec<PolicyRule> {
    vec![urls(&["/metrics"], &["get"])]
}

pub(super) fn virtualmachinetemplate_admin() -> Vec<PolicyRule> {
    vec![
        rule(
            &["template.kubevirt.io"],
            &["virtualmachinetemplates"],
            &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
        ),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplates/status"], &["get"]),
    ]
}

pub(super) fn virtualmachinetemplate_editor() -> Vec<PolicyRule> {
    vec![
        rule(
            &["template.kubevirt.io"],
            &["virtualmachinetemplates"],
            &["create", "delete", "get", "list", "patch", "update", "watch"],
        ),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplates/status"], &["get"]),
    ]
}

pub(super) fn virtualmachinetemplate_viewer() -> Vec<PolicyRule> {
    vec![
        rule(&["template.kubevirt.io"], &["virtualmachinetemplates"], &["get", "list", "watch"]),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplates/status"], &["get"]),
    ]
}

pub(super) fn virtualmachinetemplaterequest_admin() -> Vec<PolicyRule> {
    vec![
        rule(
            &["template.kubevirt.io"],
            &["virtualmachinetemplaterequests"],
            &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
        ),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplaterequests/status"], &["get"]),
    ]
}

pub(super) fn virtualmachinetemplaterequest_editor() -> Vec<PolicyRule> {
    vec![
        rule(
            &["template.kubevirt.io"],
            &["virtualmachinetemplaterequests"],
            &["create", "delete", "get", "list", "patch", "update", "watch"],
        ),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplaterequests/status"], &["get"]),
    ]
}

pub(super) fn virtualmachinetemplaterequest_source() -> Vec<PolicyRule> {
    vec![rule(&["template.kubevirt.io"], &["virtualmachinetemplaterequests/source"], &["create"])]
}

pub(super) fn virtualmachinetemplaterequest_viewer() -> Vec<PolicyRule> {
    vec![
        rule(&["template.kubevirt.io"], &["virtualmachinetemplaterequests"], &["get", "list", "watch"]),
        rule(&["template.kubevirt.io"], &["virtualmachinetemplaterequests/status"], &["get"]),
    ]
}

pub(super) fn leader_election() -> Vec<PolicyRule> {
    vec![
        rule(&[""], &["configmaps"], &["get", "list", "watch", "create", "update", "patch", "delete"]),
        rule(&["coordination.k8s.io"], &["leases"], &["get", "list", "watch", "create", "update", "patch", "delete"]),
        rule(&[""], &["events"], &["create", "patch"]),
    ]
}
