//! The permissions of virt-handler. The admission policy restricts it to its own node.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::rule;

pub(super) fn cluster_rules() -> Vec<PolicyRule> {
    vec![
        rule(&["kubevirt.io"], &["virtualmachineinstances"], &["update", "patch", "list", "watch"]),
        rule(&[""], &["nodes"], &["patch", "list", "watch", "get"]),
        rule(&[""], &["configmaps"], &["get", "list", "watch"]),
        rule(&[""], &["events"], &["create", "patch"]),
        rule(&["apiextensions.k8s.io"], &["customresourcedefinitions"], &["get", "list", "watch"]),
        rule(&["kubevirt.io"], &["kubevirts"], &["get", "list", "watch"]),
        rule(&["migrations.kubevirt.io"], &["migrationpolicies"], &["get", "list", "watch"]),
        rule(
            &["backup.kubevirt.io"],
            &["virtualmachinebackuptrackers", "virtualmachinebackuptrackers/status"],
            &["list", "watch", "patch"],
        ),
        rule(&["apps"], &["controllerrevisions"], &["get"]),
    ]
}

pub(super) fn namespace_rules() -> Vec<PolicyRule> {
    vec![rule(&[""], &["configmaps"], &["get", "list", "watch"])]
}
