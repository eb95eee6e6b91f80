//! The permissions of virt-api.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::rule;

pub(super) fn cluster_rules() -> Vec<PolicyRule> {
    vec![
        rule(&[""], &["pods"], &["get", "list", "delete", "patch"]),
        rule(
            &["kubevirt.io"],
            &["virtualmachines", "virtualmachineinstances"],
            &["get", "list", "watch", "patch", "update"],
        ),
        rule(&[""], &["persistentvolumeclaims"], &["get", "list"]),
        rule(&["kubevirt.io"], &["virtualmachines/status"], &["patch"]),
        rule(&["kubevirt.io"], &["virtualmachineinstancemigrations"], &["create", "get", "list", "watch", "patch"]),
        rule(&["kubevirt.io"], &["virtualmachineinstancepresets"], &["watch", "list"]),
        rule(&[""], &["configmaps"], &["get", "list", "watch"]),
        rule(&[""], &["limitranges"], &["watch", "list"]),
        rule(&["apiextensions.k8s.io"], &["customresourcedefinitions"], &["get", "list", "watch"]),
        rule(&["kubevirt.io"], &["kubevirts"], &["get", "list", "watch"]),
        rule(
            &["snapshot.kubevirt.io"],
            &["virtualmachinesnapshots", "virtualmachinerestores", "virtualmachinesnapshotcontents"],
            &["get", "list", "watch"],
        ),
        rule(&["backup.kubevirt.io"], &["virtualmachinebackups"], &["get", "list", "watch"]),
        rule(&["backup.kubevirt.io"], &["virtualmachinebackuptrackers"], &["get", "list", "watch"]),
        rule(&["cdi.kubevirt.io"], &["datasources", "datavolumes"], &["get", "list", "watch"]),
        rule(&[""], &["namespaces"], &["get", "list", "watch"]),
        rule(
            &["instancetype.kubevirt.io"],
            &[
                "virtualmachineinstancetypes",
                "virtualmachineclusterinstancetypes",
                "virtualmachinepreferences",
                "virtualmachineclusterpreferences",
            ],
            &["get", "list", "watch"],
        ),
        rule(&["migrations.kubevirt.io"], &["migrationpolicies"], &["get", "list", "watch"]),
        rule(&["apps"], &["controllerrevisions"], &["create", "list", "get"]),
        rule(&[""], &["nodes"], &["get"]),
    ]
}

pub(super) fn namespace_rules() -> Vec<PolicyRule> {
    vec![rule(&[""], &["configmaps"], &["get", "list", "watch"])]
}
