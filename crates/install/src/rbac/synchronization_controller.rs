//! The permissions of virt-synchronization-controller.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::{rule, with_names};

pub(super) fn cluster_rules() -> Vec<PolicyRule> {
    vec![
        rule(&["kubevirt.io"], &["virtualmachineinstances"], &["get", "list", "watch", "update", "patch"]),
        rule(&["kubevirt.io"], &["virtualmachineinstancemigrations"], &["get", "list", "watch", "patch", "delete"]),
        rule(&["kubevirt.io"], &["kubevirts"], &["get", "list", "watch"]),
        rule(&[""], &["events"], &["update", "create", "patch"]),
        rule(&["apiextensions.k8s.io"], &["customresourcedefinitions"], &["get", "list", "watch"]),
    ]
}

pub(super) fn namespace_rules() -> Vec<PolicyRule> {
    vec![
        with_names(rule(&[""], &["configmaps"], &["get", "list", "watch"]), &["kubevirt-ca"]),
        rule(&["coordination.k8s.io"], &["leases"], &["get", "list", "watch", "delete", "update", "create", "patch"]),
    ]
}
