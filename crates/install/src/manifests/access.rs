//! The ServiceAccount of the operator with its roles, and the role of administrators for the KubeVirt resource.

use k8s_openapi::api::{
    core::v1::ServiceAccount,
    rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
};

use crate::{
    metadata::{cluster_scoped, namespaced},
    names::OPERATOR_SERVICE_ACCOUNT,
    rbac::{self, AGGREGATE, APP_LABEL, operator, role_ref, rule},
};

/// An administrator of a namespace may administer the KubeVirt resource in it.
pub(super) fn administrator_role() -> ClusterRole {
    let verbs = ["get", "delete", "create", "update", "patch", "list", "watch", "deletecollection"];
    let mut metadata = cluster_scoped("kubevirt.io:operator", &[("operator.kubevirt.io", "")]);
    metadata.labels.get_or_insert_default().insert(format!("{AGGREGATE}admin"), "true".to_owned());
    ClusterRole {
        metadata,
        rules: Some(vec![rule(&["kubevirt.io"], &["kubevirts"], &verbs)]),
        ..ClusterRole::default()
    }
}

pub(super) fn service_account(namespace: &str) -> ServiceAccount {
    ServiceAccount {
        metadata: namespaced(namespace, OPERATOR_SERVICE_ACCOUNT, &APP_LABEL),
        ..ServiceAccount::default()
    }
}

pub(super) fn role(namespace: &str) -> Role {
    Role {
        metadata: namespaced(namespace, OPERATOR_SERVICE_ACCOUNT, &APP_LABEL),
        rules: Some(operator::namespace_rules()),
    }
}

pub(super) fn role_binding(namespace: &str) -> RoleBinding {
    RoleBinding {
        metadata: namespaced(namespace, "kubevirt-operator-rolebinding", &APP_LABEL),
        role_ref: role_ref("Role", OPERATOR_SERVICE_ACCOUNT),
        subjects: Some(vec![rbac::service_account(namespace, OPERATOR_SERVICE_ACCOUNT)]),
    }
}

pub(super) fn cluster_role() -> ClusterRole {
    ClusterRole {
        metadata: cluster_scoped(OPERATOR_SERVICE_ACCOUNT, &APP_LABEL),
        rules: Some(operator::cluster_rules()),
        ..ClusterRole::default()
    }
}

pub(super) fn cluster_role_binding(namespace: &str) -> ClusterRoleBinding {
    ClusterRoleBinding {
        metadata: cluster_scoped(OPERATOR_SERVICE_ACCOUNT, &APP_LABEL),
        role_ref: role_ref("ClusterRole", OPERATOR_SERVICE_ACCOUNT),
        subjects: Some(vec![rbac::service_account(namespace, OPERATOR_SERVICE_ACCOUNT)]),
    }
}
