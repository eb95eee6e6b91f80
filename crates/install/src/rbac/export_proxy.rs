//! What virt-exportproxy may do.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::{named, rule};

pub(super) fn cluster_rules() -> Vec<PolicyRule> {
    vec![
        rule(&["export.kubevirt.io"], &["virtualmachineexports"], &["get", "list", "watch"]),
        rule(&["kubevirt.io"], &["kubevirts"], &["list", "watch"]),
    ]
}

pub(super) fn namespace_rules() -> Vec<PolicyRule> {
    vec![named(rule(&[""], &["configmaps"], &["get", "list", "watch"]), &["kubevirt-export-ca"])]
}
