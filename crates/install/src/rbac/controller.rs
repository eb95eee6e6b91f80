//! The permissions of virt-controller.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::rule;

pub(super) fn cluster_rules() -> Vec<PolicyRule> {
    vec![
        rule(&[""], &["namespaces"], &["get", "list", "watch", "patch"]),
        rule(&["policy"], &["poddisruptionbudgets"], &["get", "list", "watch", "delete", "create", "patch"]),
        rule(
            &[""],
            &["pods", "configmaps", "endpoints", "services"],
            &["get", "list", "watch", "delete", "update", "create", "patch"],
        ),
        rule(&[""], &["events"], &["update", "create", "patch"]),
        rule(&[""], &["secrets"], &["create"]),
        rule(&[""], &["pods/finalizers"], &["update"]),
        rule(&[""], &["pods/eviction"], &["create"]),
        rule(&[""], &["pods/status"], &["patch"]),
        rule(&[""], &["nodes"], &["get", "list", "watch", "update", "patch"]),
        rule(&["apps"], &["daemonsets"], &["list"]),
        rule(&["apps"], &["controllerrevisions"], &["watch", "list", "create", "delete", "get", "update"]),
        rule(&[""], &["persistentvolumeclaims"], &["get", "list", "watch", "create", "update", "delete", "patch"]),
        rule(
            &["snapshot.kubevirt.io"],
            &[
                "virtualmachinesnapshots",
                "virtualmachinesnapshots/status",
                "virtualmachinesnapshots/finalizers",
                "virtualmachinesnapshotcontents",
                "virtualmachinesnapshotcontents/status",
                "virtualmachinesnapshotcontents/finalizers",
                "virtualmachinerestores",
                "virtualmachinerestores/status",
            ],
            &["get", "list", "watch", "create", "update", "delete", "patch"],
        ),
        rule(
            &["export.kubevirt.io"],
            &["virtualmachineexports", "virtualmachineexports/status", "virtualmachineexports/finalizers"],
            &["get", "list", "watch", "create", "update", "delete", "patch"],
        ),
        rule(
            &["backup.kubevirt.io"],
            &["virtualmachinebackups", "virtualmachinebackups/status", "virtualmachinebackups/finalizers"],
            &["get", "list", "watch", "create", "update", "delete", "patch"],
        ),
        rule(
            &["backup.kubevirt.io"],
            &["virtualmachinebackuptrackers", "virtualmachinebackuptrackers/status"],
            &["get", "list", "watch", "create", "update", "delete", "patch"],
        ),
        rule(
            &["pool.kubevirt.io"],
            &[
                "virtualmachinepools",
                "virtualmachinepools/finalizers",
                "virtualmachinepools/status",
                "virtualmachinepools/scale",
            ],
            &["watch", "list", "create", "delete", "update", "patch", "get"],
        ),
        rule(&["kubevirt.io"], &["*"], &["*"]),
        rule(&["kubevirt.io"], &["virtualmachines/finalizers", "virtualmachineinstances/finalizers"], &["update"]),
        rule(
            &["subresources.kubevirt.io"],
            &[
                "virtualmachines/stop",
                "virtualmachineinstances/addvolume",
                "virtualmachineinstances/removevolume",
                "virtualmachineinstances/backup",
                "virtualmachineinstances/redefine-checkpoint",
                "virtualmachineinstances/freeze",
                "virtualmachineinstances/unfreeze",
                "virtualmachineinstances/reset",
                "virtualmachineinstances/softreboot",
                "virtualmachineinstances/sev/setupsession",
                "virtualmachineinstances/sev/injectlaunchsecret",
            ],
            &["update"],
        ),
        rule(&["cdi.kubevirt.io"], &["*"], &["*"]),
        rule(&["apiextensions.k8s.io"], &["customresourcedefinitions"], &["get", "list", "watch"]),
        rule(&["authorization.k8s.io"], &["subjectaccessreviews"], &["create"]),
        rule(&["snapshot.storage.k8s.io"], &["volumesnapshotclasses"], &["get", "list", "watch"]),
        rule(
            &["snapshot.storage.k8s.io"],
            &["volumesnapshots"],
            &["get", "list", "watch", "create", "update", "delete"],
        ),
        rule(&["storage.k8s.io"], &["storageclasses"], &["get", "list", "watch"]),
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
        rule(
            &["clone.kubevirt.io"],
            &["virtualmachineclones", "virtualmachineclones/status", "virtualmachineclones/finalizers"],
            &["get", "list", "watch", "update", "patch", "delete"],
        ),
        rule(&[""], &["namespaces"], &["get"]),
        rule(&[""], &["resourcequotas"], &["list", "watch"]),
        rule(&["batch"], &["jobs"], &["create", "get", "delete"]),
        rule(&["resource.k8s.io"], &["resourceslices", "resourceclaims"], &["list", "watch", "get"]),
    ]
}

/// Only needed if KubeVirt reads NetworkAttachmentDefinitions itself.
pub(super) fn network_attachment_rule() -> PolicyRule {
    rule(&["k8s.cni.cncf.io"], &["network-attachment-definitions"], &["get"])
}

pub(super) fn namespace_rules() -> Vec<PolicyRule> {
    vec![
        rule(&["route.openshift.io"], &["routes"], &["list", "get", "watch"]),
        rule(&[""], &["secrets"], &["list", "get", "watch"]),
        rule(&["networking.k8s.io"], &["ingresses"], &["list", "get", "watch"]),
        rule(&["coordination.k8s.io"], &["leases"], &["get", "list", "watch", "delete", "update", "create", "patch"]),
    ]
}
