//! The permissions of users: the roles that extend the default roles of Kubernetes.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::rule;

pub(super) fn everyone() -> Vec<PolicyRule> {
    vec![
        rule(&["kubevirt.io"], &["kubevirts"], &["get", "list"]),
        rule(&["subresources.kubevirt.io"], &["version", "guestfs"], &["get", "list"]),
    ]
}

pub(super) fn admin() -> Vec<PolicyRule> {
    vec![
        rule(
            &["subresources.kubevirt.io"],
            &[
                "virtualmachineinstances/console",
                "virtualmachineinstances/vnc",
                "virtualmachineinstances/vnc/screenshot",
                "virtualmachineinstances/portforward",
                "virtualmachineinstances/guestosinfo",
                "virtualmachineinstances/filesystemlist",
                "virtualmachineinstances/userlist",
                "virtualmachineinstances/sev/fetchcertchain",
                "virtualmachineinstances/sev/querylaunchmeasurement",
                "virtualmachineinstances/usbredir",
                "virtualmachines/objectgraph",
                "virtualmachineinstances/objectgraph",
            ],
            &["get"],
        ),
        rule(
            &["subresources.kubevirt.io"],
            &[
                "virtualmachineinstances/pause",
                "virtualmachineinstances/unpause",
                "virtualmachineinstances/addvolume",
                "virtualmachineinstances/removevolume",
                "virtualmachineinstances/freeze",
                "virtualmachineinstances/unfreeze",
                "virtualmachineinstances/softreboot",
                "virtualmachineinstances/reset",
                "virtualmachineinstances/sev/setupsession",
                "virtualmachineinstances/sev/injectlaunchsecret",
                "virtualmachineinstances/evacuate/cancel",
            ],
            &["update"],
        ),
        rule(&["subresources.kubevirt.io"], &["virtualmachines/expand-spec", "virtualmachines/portforward"], &["get"]),
        rule(
            &["subresources.kubevirt.io"],
            &[
                "virtualmachines/start",
                "virtualmachines/stop",
                "virtualmachines/restart",
                "virtualmachines/addvolume",
                "virtualmachines/removevolume",
                "virtualmachines/memorydump",
                "virtualmachines/evacuate/cancel",
            ],
            &["update"],
        ),
        rule(&["subresources.kubevirt.io"], &["expand-vm-spec"], &["update"]),
        rule(
            &["kubevirt.io"],
            &[
                "virtualmachines",
                "virtualmachineinstances",
                "virtualmachineinstancepresets",
                "virtualmachineinstancereplicasets",
            ],
            &["get", "delete", "create", "update", "patch", "list", "watch", "deletecollection"],
        ),
        rule(&["kubevirt.io"], &["virtualmachineinstancemigrations"], &["get", "list", "watch"]),
        rule(
            &["snapshot.kubevirt.io"],
            &["virtualmachinesnapshots", "virtualmachinesnapshotcontents", "virtualmachinerestores"],
            &["get", "delete", "create", "update", "patch", "list", "watch", "deletecollection"],
        ),
        rule(
            &["backup.kubevirt.io"],
            &["virtualmachinebackups", "virtualmachinebackuptrackers"],
            &["get", "delete", "create", "update", "patch", "list", "watch", "deletecollection"],
        ),
        rule(
            &["export.kubevirt.io"],
            &["virtualmachineexports"],
            &["get", "delete", "create", "update", "patch", "list", "watch", "deletecollection"],
        ),
        rule(
            &["clone.kubevirt.io"],
            &["virtualmachineclones"],
            &["get", "delete", "create", "update", "patch", "list", "watch", "deletecollection"],
        ),
        rule(
            &["instancetype.kubevirt.io"],
            &[
                "virtualmachineinstancetypes",
                "virtualmachineclusterinstancetypes",
                "virtualmachinepreferences",
                "virtualmachineclusterpreferences",
            ],
            &["get", "delete", "create", "update", "patch", "list", "watch", "deletecollection"],
        ),
        rule(
            &["pool.kubevirt.io"],
            &["virtualmachinepools"],
            &["get", "delete", "create", "update", "patch", "list", "watch", "deletecollection"],
        ),
        rule(&["migrations.kubevirt.io"], &["migrationpolicies"], &["get", "list", "watch"]),
    ]
}

pub(super) fn edit() -> Vec<PolicyRule> {
    vec![
        rule(
            &["subresources.kubevirt.io"],
            &[
                "virtualmachineinstances/console",
                "virtualmachineinstances/vnc",
                "virtualmachineinstances/portforward",
                "virtualmachineinstances/guestosinfo",
                "virtualmachineinstances/filesystemlist",
                "virtualmachineinstances/userlist",
                "virtualmachineinstances/sev/fetchcertchain",
                "virtualmachineinstances/sev/querylaunchmeasurement",
                "virtualmachineinstances/usbredir",
                "virtualmachines/objectgraph",
                "virtualmachineinstances/objectgraph",
            ],
            &["get"],
        ),
        rule(
            &["subresources.kubevirt.io"],
            &[
                "virtualmachineinstances/pause",
                "virtualmachineinstances/unpause",
                "virtualmachineinstances/addvolume",
                "virtualmachineinstances/removevolume",
                "virtualmachineinstances/freeze",
                "virtualmachineinstances/unfreeze",
                "virtualmachineinstances/softreboot",
                "virtualmachineinstances/reset",
                "virtualmachineinstances/sev/setupsession",
                "virtualmachineinstances/sev/injectlaunchsecret",
                "virtualmachineinstances/evacuate/cancel",
            ],
            &["update"],
        ),
        rule(&["subresources.kubevirt.io"], &["virtualmachines/expand-spec", "virtualmachines/portforward"], &["get"]),
        rule(
            &["subresources.kubevirt.io"],
            &[
                "virtualmachines/start",
                "virtualmachines/stop",
                "virtualmachines/restart",
                "virtualmachines/addvolume",
                "virtualmachines/removevolume",
                "virtualmachines/memorydump",
                "virtualmachines/evacuate/cancel",
            ],
            &["update"],
        ),
        rule(&["subresources.kubevirt.io"], &["expand-vm-spec"], &["update"]),
        rule(
            &["kubevirt.io"],
            &[
                "virtualmachines",
                "virtualmachineinstances",
                "virtualmachineinstancepresets",
                "virtualmachineinstancereplicasets",
            ],
            &["get", "delete", "create", "update", "patch", "list", "watch"],
        ),
        rule(&["kubevirt.io"], &["virtualmachineinstancemigrations"], &["get", "list", "watch"]),
        rule(
            &["snapshot.kubevirt.io"],
            &["virtualmachinesnapshots", "virtualmachinesnapshotcontents", "virtualmachinerestores"],
            &["get", "delete", "create", "update", "patch", "list", "watch"],
        ),
        rule(
            &["backup.kubevirt.io"],
            &["virtualmachinebackups", "virtualmachinebackuptrackers"],
            &["get", "delete", "create", "update", "patch", "list", "watch"],
        ),
        rule(
            &["export.kubevirt.io"],
            &["virtualmachineexports"],
            &["get", "delete", "create", "update", "patch", "list", "watch"],
        ),
        rule(
            &["clone.kubevirt.io"],
            &["virtualmachineclones"],
            &["get", "delete", "create", "update", "patch", "list", "watch"],
        ),
        rule(
            &["instancetype.kubevirt.io"],
            &[
                "virtualmachineinstancetypes",
                "virtualmachineclusterinstancetypes",
                "virtualmachinepreferences",
                "virtualmachineclusterpreferences",
            ],
            &["get", "delete", "create", "update", "patch", "list", "watch"],
        ),
        rule(
            &["pool.kubevirt.io"],
            &["virtualmachinepools"],
            &["get", "delete", "create", "update", "patch", "list", "watch"],
        ),
        rule(&["kubevirt.io"], &["kubevirts"], &["get", "list"]),
        rule(&["migrations.kubevirt.io"], &["migrationpolicies"], &["get", "list", "watch"]),
    ]
}

pub(super) fn view() -> Vec<PolicyRule> {
    vec![
        rule(&["kubevirt.io"], &["kubevirts"], &["get", "list"]),
        rule(
            &["subresources.kubevirt.io"],
            &[
                "virtualmachines/expand-spec",
                "virtualmachineinstances/guestosinfo",
                "virtualmachineinstances/filesystemlist",
                "virtualmachineinstances/userlist",
                "virtualmachineinstances/sev/fetchcertchain",
                "virtualmachineinstances/sev/querylaunchmeasurement",
                "virtualmachines/objectgraph",
                "virtualmachineinstances/objectgraph",
            ],
            &["get"],
        ),
        rule(&["subresources.kubevirt.io"], &["expand-vm-spec"], &["update"]),
        rule(
            &["kubevirt.io"],
            &[
                "virtualmachines",
                "virtualmachineinstances",
                "virtualmachineinstancepresets",
                "virtualmachineinstancereplicasets",
                "virtualmachineinstancemigrations",
            ],
            &["get", "list", "watch"],
        ),
        rule(
            &["snapshot.kubevirt.io"],
            &["virtualmachinesnapshots", "virtualmachinesnapshotcontents", "virtualmachinerestores"],
            &["get", "list", "watch"],
        ),
        rule(
            &["backup.kubevirt.io"],
            &["virtualmachinebackups", "virtualmachinebackuptrackers"],
            &["get", "list", "watch"],
        ),
        rule(&["export.kubevirt.io"], &["virtualmachineexports"], &["get", "list", "watch"]),
        rule(&["clone.kubevirt.io"], &["virtualmachineclones"], &["get", "list", "watch"]),
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
        rule(&["pool.kubevirt.io"], &["virtualmachinepools"], &["get", "list", "watch"]),
        rule(&["migrations.kubevirt.io"], &["migrationpolicies"], &["get", "list", "watch"]),
    ]
}

pub(super) fn view_instancetypes() -> Vec<PolicyRule> {
    vec![rule(
        &["instancetype.kubevirt.io"],
        &["virtualmachineclusterinstancetypes", "virtualmachineclusterpreferences"],
        &["get", "list", "watch"],
    )]
}

pub(super) fn migrate() -> Vec<PolicyRule> {
    vec![
        rule(&["subresources.kubevirt.io"], &["virtualmachines/migrate"], &["update"]),
        rule(
            &["kubevirt.io"],
            &["virtualmachineinstancemigrations"],
            &["get", "delete", "create", "update", "patch", "list", "watch", "deletecollection"],
        ),
    ]
}
