//! The permissions of virt-exportproxy.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::{rule, with_names};

pub(super) fn cluster_rules() -> Vec<PolicyRule> {
    vec![
        rule(&["export.kubevirt.io"], &["virtualmachineexports"], &["get", "list", "watch"]),
        rule(&["kubevirt.io"], &["kubevirts"], &["list", "watch"]),
    ]
}

pub(super) fn namespace_rules() -> Vec<PolicyRule> {
    vec![with_names(rule(&[""], &["configmaps"], &["get", "list", "watch"]), &["kubevirt-export-ca"])]
}
