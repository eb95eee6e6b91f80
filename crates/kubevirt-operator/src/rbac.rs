//! The permissions of the operator and of users. `config/rbac` is generated from this file, and the operator runs with
//! these permissions in every lab test.
//!
//! The rules grant only the verbs that the operator uses. It writes by patch, so it has `update` only for its Lease and
//! for the finalizers subresources, which the API server requires. It reads all kinds with a watch, and has `get` for
//! those that it writes: if the API server refuses a create or a patch, the live object shows why. It has no permission on ConfigMaps. It can delete VMs, VMIs,
//! PVCs, Secrets and import sources, and no other kind.

use k8s_openapi::{
    api::{
        core::v1::{Namespace, ServiceAccount},
        rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use vitivirt_api::machine::installation_labels;

pub const NAMESPACE: &str = "kubevirt-operator-system";
pub const ACCOUNT: &str = "kubevirt-operator-controller-manager";
/// Not `kubevirt-operator`: that ClusterRole belongs to the upstream virt-operator.
pub const MANAGER_ROLE: &str = "kubevirt-operator-manager-role";
pub const MANAGER_BINDING: &str = "kubevirt-operator-manager-rolebinding";
/// Grants the choice of bridges and VLANs of the nodes. It is aggregated to no other role.
pub const NETWORK_ROLE: &str = "networkconfiguration-admin";
/// What the operator needs of the cluster if it has all other permissions in single namespaces only.
pub const CLUSTER_ROLE: &str = "kubevirt-operator-cluster-role";
pub const LEASE_ROLE: &str = "kubevirt-operator-leader-election-role";
pub const LEASE_BINDING: &str = "kubevirt-operator-leader-election-rolebinding";
/// What the operator needs in addition if it asks the API server who can read its metrics.
pub const METRICS_AUTH_ROLE: &str = "kubevirt-operator-metrics-auth-role";
pub const METRICS_AUTH_BINDING: &str = "kubevirt-operator-metrics-auth-rolebinding";
/// Grants access to the metrics if they require a permission. It is bound to no account.
pub const METRICS_READER_ROLE: &str = "kubevirt-operator-metrics-reader";

const RBAC: &str = "rbac.authorization.k8s.io";
const READ: &[&str] = &["get", "list", "watch"];
const WRITE: &[&str] = &["create", "update", "patch", "delete", "deletecollection"];

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> PolicyRule {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
        ..PolicyRule::default()
    }
}

/// The operator's permissions in every namespace whose Machines it reconciles.
pub fn manager_rules() -> Vec<PolicyRule> {
    vec![
        rule("vitistack.io", &["machines", "networkconfigurations"], &["get", "list", "watch", "patch"]),
        rule("vitistack.io", &["machines/status"], &["patch"]),
        // Required to set an owner reference with blockOwnerDeletion where OwnerReferencesPermissionEnforcement is
        // enabled.
        rule("vitistack.io", &["machines/finalizers", "networkconfigurations/finalizers"], &["update"]),
        rule("kubevirt.io", &["virtualmachines"], &["get", "list", "watch", "create", "patch", "delete"]),
        rule("kubevirt.io", &["virtualmachineinstances"], &["get", "list", "watch", "delete"]),
        rule("", &["persistentvolumeclaims"], &["get", "list", "watch", "create", "patch", "delete"]),
        rule("", &["secrets"], &["get", "list", "watch", "create", "patch", "delete"]),
        // Read only to report why a guest does not start.
        rule("", &["pods", "events"], &["list"]),
        rule("k8s.cni.cncf.io", &["network-attachment-definitions"], &["get", "list", "watch", "create", "patch"]),
        rule("cdi.kubevirt.io", &["volumeimportsources"], &["get", "list", "watch", "create", "delete"]),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
        rule("storage.k8s.io", &["storageclasses"], &["list", "watch"]),
        // The operator watches CRDs to notice the installation of KubeVirt, Multus or CDI.
        rule("apiextensions.k8s.io", &["customresourcedefinitions"], &["list", "watch"]),
    ]
}

/// Whether a Role can grant the rule. The others are about kinds without a namespace.
pub fn is_namespaced(rule: &PolicyRule) -> bool {
    let cluster_scoped = ["storage.k8s.io", "apiextensions.k8s.io"];
    !rule.api_groups.iter().flatten().any(|group| cluster_scoped.contains(&group.as_str()))
}

/// The operator's permissions in its own namespace.
pub fn lease_rules() -> Vec<PolicyRule> {
    vec![rule("coordination.k8s.io", &["leases"], &["get", "list", "watch", "create", "update"])]
}

/// The operator's additional permissions with METRICS_AUTHORIZATION.
pub fn metrics_auth_rules() -> Vec<PolicyRule> {
    vec![
        rule("authentication.k8s.io", &["tokenreviews"], &["create"]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
    ]
}

/// The permission of a client that reads the metrics.
pub fn metrics_reader_rules() -> Vec<PolicyRule> {
    vec![PolicyRule {
        non_resource_urls: Some(vec!["/metrics".to_owned()]),
        verbs: vec!["get".to_owned()],
        ..PolicyRule::default()
    }]
}

pub fn namespace() -> Namespace {
    let mut metadata = metadata_named(NAMESPACE);
    let level = ("pod-security.kubernetes.io/enforce".to_owned(), "restricted".to_owned());
    metadata.labels.get_or_insert_default().extend([level]);
    Namespace { metadata, ..Namespace::default() }
}

pub fn service_account() -> ServiceAccount {
    ServiceAccount { metadata: in_own_namespace(ACCOUNT), ..ServiceAccount::default() }
}

pub fn manager_role() -> ClusterRole {
    ClusterRole { metadata: metadata_named(MANAGER_ROLE), rules: Some(manager_rules()), ..ClusterRole::default() }
}

pub fn manager_binding() -> ClusterRoleBinding {
    ClusterRoleBinding {
        metadata: metadata_named(MANAGER_BINDING),
        role_ref: role_ref("ClusterRole", MANAGER_ROLE),
        subjects: Some(vec![subject()]),
    }
}

pub fn lease_role() -> Role {
    Role { metadata: in_own_namespace(LEASE_ROLE), rules: Some(lease_rules()) }
}

pub fn lease_binding() -> RoleBinding {
    RoleBinding {
        metadata: in_own_namespace(LEASE_BINDING),
        role_ref: role_ref("Role", LEASE_ROLE),
        subjects: Some(vec![subject()]),
    }
}

/// The roles of metrics that require a permission: those of the operator, and the role for Prometheus.
pub fn metrics_roles() -> (ClusterRole, ClusterRoleBinding, ClusterRole) {
    let role = ClusterRole {
        metadata: metadata_named(METRICS_AUTH_ROLE),
        rules: Some(metrics_auth_rules()),
        ..ClusterRole::default()
    };
    let binding = ClusterRoleBinding {
        metadata: metadata_named(METRICS_AUTH_BINDING),
        role_ref: role_ref("ClusterRole", METRICS_AUTH_ROLE),
        subjects: Some(vec![subject()]),
    };
    let reader = ClusterRole {
        metadata: metadata_named(METRICS_READER_ROLE),
        rules: Some(metrics_reader_rules()),
        ..ClusterRole::default()
    };
    (role, binding, reader)
}

/// The permissions of an operator with WATCH_NAMESPACE: a Role and its binding, which belong into that namespace, and the
/// kinds of the cluster that a Role cannot grant.
pub fn namespaced_roles() -> (Role, RoleBinding, ClusterRole, ClusterRoleBinding) {
    let (of_namespace, of_cluster) = manager_rules().into_iter().partition(is_namespaced);
    let role = Role { metadata: metadata_named(MANAGER_ROLE), rules: Some(of_namespace) };
    let binding = RoleBinding {
        metadata: metadata_named(MANAGER_BINDING),
        role_ref: role_ref("Role", MANAGER_ROLE),
        subjects: Some(vec![subject()]),
    };
    let cluster_role =
        ClusterRole { metadata: metadata_named(CLUSTER_ROLE), rules: Some(of_cluster), ..ClusterRole::default() };
    let cluster_binding = ClusterRoleBinding {
        metadata: metadata_named(CLUSTER_ROLE),
        role_ref: role_ref("ClusterRole", CLUSTER_ROLE),
        subjects: Some(vec![subject()]),
    };
    (role, binding, cluster_role, cluster_binding)
}

/// Roles for users. Two of them are aggregated to the cluster's roles view and edit, and so to admin, which tenants have
/// in their own namespaces. The third is not: a NetworkConfiguration selects a bridge and a VLAN of the nodes.
pub fn user_roles() -> Vec<ClusterRole> {
    let read = rule("vitistack.io", &["machines", "networkconfigurations"], READ);
    let machines = rule("vitistack.io", &["machines"], WRITE);
    let networks = rule("vitistack.io", &["networkconfigurations"], &[READ, WRITE].concat());
    vec![
        user_role("view", vec![read.clone()]),
        user_role("edit", vec![read, machines]),
        ClusterRole { metadata: metadata_named(NETWORK_ROLE), rules: Some(vec![networks]), ..ClusterRole::default() },
    ]
}

fn user_role(role: &str, rules: Vec<PolicyRule>) -> ClusterRole {
    let mut metadata = metadata_named(&format!("machine-{role}"));
    metadata.labels.get_or_insert_default().extend([(aggregation_label(role), "true".to_owned())]);
    ClusterRole { metadata, rules: Some(rules), ..ClusterRole::default() }
}

/// With this label Kubernetes adds the rules of a ClusterRole to its own role `view`, `edit` or `admin`.
fn aggregation_label(role: &str) -> String {
    format!("{RBAC}/aggregate-to-{role}")
}

/// The metadata of an object that installs the operator.
pub(crate) fn metadata_named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), labels: Some(installation_labels()), ..ObjectMeta::default() }
}

fn in_own_namespace(name: &str) -> ObjectMeta {
    ObjectMeta { namespace: Some(NAMESPACE.to_owned()), ..metadata_named(name) }
}

fn role_ref(kind: &str, name: &str) -> RoleRef {
    RoleRef { api_group: RBAC.to_owned(), kind: kind.to_owned(), name: name.to_owned() }
}

fn subject() -> Subject {
    Subject {
        kind: "ServiceAccount".to_owned(),
        name: ACCOUNT.to_owned(),
        namespace: Some(NAMESPACE.to_owned()),
        ..Subject::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manager_rules_have_known_verbs_no_wildcards_and_no_configmaps() {
        for rule in manager_rules() {
            let group = rule.api_groups.unwrap().remove(0);
            for verb in &rule.verbs {
                assert!(READ.contains(&verb.as_str()) || WRITE.contains(&verb.as_str()), "{group}: {verb}");
                assert_ne!(verb, "deletecollection");
            }
            for resource in rule.resources.unwrap() {
                assert!(!resource.contains('*') && resource != "configmaps", "{group}/{resource}");
                if group == "storage.k8s.io" || group == "apiextensions.k8s.io" {
                    assert!(rule.verbs.iter().all(|verb| READ.contains(&verb.as_str())));
                }
            }
        }
    }

    /// The groups of a cluster role that covers Machines and their objects, and what other features need in addition.
    #[test]
    fn the_operator_has_no_other_permissions_than_these() {
        const ALL: &[&str] = &["get", "list", "watch", "create", "update", "patch", "delete"];
        let permitted: [(&str, &[&str], &[&str]); 13] = [
            ("vitistack.io", &["machines", "networkconfigurations"], ALL),
            ("kubevirt.io", &["virtualmachines", "virtualmachineinstances"], ALL),
            ("", &["persistentvolumeclaims", "secrets", "configmaps"], ALL),
            ("", &["events"], &["create", "patch"]),
            // Status and owner references.
            ("vitistack.io", &["machines/status"], &["patch"]),
            ("vitistack.io", &["machines/finalizers", "networkconfigurations/finalizers"], &["update"]),
            // The reasons why a guest does not start.
            ("", &["pods", "events"], &["list"]),
            ("events.k8s.io", &["events"], &["create", "patch"]),
            // Networks, storage classes, imported disks, and whether their kinds are served.
            ("k8s.cni.cncf.io", &["network-attachment-definitions"], ALL),
            ("storage.k8s.io", &["storageclasses"], READ),
            ("cdi.kubevirt.io", &["volumeimportsources"], ALL),
            ("apiextensions.k8s.io", &["customresourcedefinitions"], READ),
            // Leader election, in the operator's own namespace.
            ("coordination.k8s.io", &["leases"], ALL),
        ];
        for rule in manager_rules().into_iter().chain(lease_rules()) {
            assert!(rule.resource_names.is_none() && rule.non_resource_urls.is_none());
            let (groups, resources) = (rule.api_groups.unwrap(), rule.resources.unwrap());
            for (group, resource) in groups.iter().flat_map(|group| resources.iter().map(move |kind| (group, kind))) {
                for verb in &rule.verbs {
                    let is_permitted = permitted.iter().any(|(in_group, kinds, verbs)| {
                        in_group == group && kinds.contains(&resource.as_str()) && verbs.contains(&verb.as_str())
                    });
                    assert!(is_permitted, "{verb} {resource}.{group}");
                }
            }
        }
    }

    #[test]
    fn reviews_are_permitted_by_their_own_role_only() {
        let usual = manager_rules().into_iter().chain(lease_rules());
        let groups: Vec<String> = usual.flat_map(|rule| rule.api_groups.unwrap()).collect();
        for rule in metrics_auth_rules() {
            assert_eq!(rule.verbs, ["create"]);
            assert!(rule.api_groups.unwrap().iter().all(|group| !groups.contains(group)));
        }
    }

    #[test]
    fn only_a_role_that_is_not_aggregated_can_write_network_configurations() {
        for role in user_roles() {
            let name = role.metadata.name.unwrap();
            let labels = role.metadata.labels.unwrap();
            let is_aggregated = ["view", "edit", "admin"].iter().any(|to| labels.contains_key(&aggregation_label(to)));
            assert_eq!(is_aggregated, name != NETWORK_ROLE, "{name}");
            let writes = role.rules.unwrap().iter().any(|rule| {
                rule.resources.as_ref().unwrap().iter().any(|kind| kind == "networkconfigurations")
                    && rule.verbs.iter().any(|verb| WRITE.contains(&verb.as_str()))
            });
            assert_eq!(writes, name == NETWORK_ROLE, "{name}");
        }
    }
}
