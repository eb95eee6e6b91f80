//! What the operator may do, and what users may: the one place that says so. `config/rbac` is generated from it, and
//! every test runs under it.
//!
//! The rules are the fewest verbs that the operator uses. There is no `update` (it writes by patch), no right on
//! ConfigMaps, and nothing is deleted but virtual machines, their instances and PVCs.

use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

pub const NAMESPACE: &str = "kubevirt-operator-system";
pub const ACCOUNT: &str = "kubevirt-operator-controller-manager";
/// Not `kubevirt-operator`, as in the seed: that ClusterRole belongs to KubeVirt's own operator.
pub const MANAGER_ROLE: &str = "kubevirt-operator-manager-role";
pub const MANAGER_BINDING: &str = "kubevirt-operator-manager-rolebinding";
pub const LEASE_ROLE: &str = "kubevirt-operator-leader-election-role";
pub const LEASE_BINDING: &str = "kubevirt-operator-leader-election-rolebinding";

const RBAC: &str = "rbac.authorization.k8s.io";
const READ: &[&str] = &["get", "list", "watch"];
const WRITE: &[&str] = &["create", "update", "patch", "delete", "deletecollection"];

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> PolicyRule {
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
        ..PolicyRule::default()
    }
}

/// In every namespace whose Machines it looks after.
pub fn manager_rules() -> Vec<PolicyRule> {
    vec![
        rule("vitistack.io", &["machines", "networkconfigurations"], &["get", "list", "watch", "patch"]),
        rule("vitistack.io", &["machines/status"], &["patch"]),
        // What owns others and blocks its deletion until they are gone.
        rule("vitistack.io", &["machines/finalizers", "networkconfigurations/finalizers"], &["update"]),
        rule("kubevirt.io", &["virtualmachines"], &["get", "list", "watch", "create", "patch", "delete"]),
        rule("kubevirt.io", &["virtualmachineinstances"], &["get", "list", "watch", "delete"]),
        rule("", &["persistentvolumeclaims"], &["get", "list", "watch", "create", "patch", "delete"]),
        rule("", &["secrets"], &["get", "list", "watch", "create", "patch", "delete"]),
        rule("k8s.cni.cncf.io", &["network-attachment-definitions"], &["get", "list", "watch", "create", "patch"]),
        rule("cdi.kubevirt.io", &["volumeimportsources"], &["get", "list", "watch", "create"]),
        rule("storage.k8s.io", &["storageclasses"], READ),
        // To notice that KubeVirt, Multus or CDI has been installed.
        rule("apiextensions.k8s.io", &["customresourcedefinitions"], &["list", "watch"]),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
    ]
}

/// In its own namespace only.
pub fn lease_rules() -> Vec<PolicyRule> {
    vec![rule("coordination.k8s.io", &["leases"], &["get", "list", "watch", "create", "update"])]
}

pub fn namespace() -> Namespace {
    Namespace { metadata: named(NAMESPACE), ..Namespace::default() }
}

pub fn service_account() -> ServiceAccount {
    ServiceAccount { metadata: inside(ACCOUNT), ..ServiceAccount::default() }
}

pub fn manager_role() -> ClusterRole {
    ClusterRole { metadata: named(MANAGER_ROLE), rules: Some(manager_rules()), ..ClusterRole::default() }
}

pub fn manager_binding() -> ClusterRoleBinding {
    ClusterRoleBinding {
        metadata: named(MANAGER_BINDING),
        role_ref: reference("ClusterRole", MANAGER_ROLE),
        subjects: Some(vec![subject()]),
    }
}

pub fn lease_role() -> Role {
    Role { metadata: inside(LEASE_ROLE), rules: Some(lease_rules()) }
}

pub fn lease_binding() -> RoleBinding {
    RoleBinding {
        metadata: inside(LEASE_BINDING),
        role_ref: reference("Role", LEASE_ROLE),
        subjects: Some(vec![subject()]),
    }
}

/// Roles for people, which the cluster's own view, edit and admin take in. Whoever writes a NetworkConfiguration chooses
/// a bridge and a VLAN of the nodes: that is for admins.
pub fn user_roles() -> Vec<ClusterRole> {
    let kinds = ["machines", "networkconfigurations"];
    let read = rule("vitistack.io", &kinds, READ);
    let machines = rule("vitistack.io", &["machines"], WRITE);
    let networks = rule("vitistack.io", &["networkconfigurations"], WRITE);
    vec![
        user_role("view", vec![read.clone()]),
        user_role("edit", vec![read.clone(), machines.clone()]),
        user_role("admin", vec![read, machines, networks]),
    ]
}

fn user_role(who: &str, rules: Vec<PolicyRule>) -> ClusterRole {
    let mut metadata = named(&format!("machine-{who}"));
    metadata.labels = Some([(format!("{RBAC}/aggregate-to-{who}"), "true".to_owned())].into());
    ClusterRole { metadata, rules: Some(rules), ..ClusterRole::default() }
}

fn named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }
}

fn inside(name: &str) -> ObjectMeta {
    ObjectMeta { namespace: Some(NAMESPACE.to_owned()), ..named(name) }
}

fn reference(kind: &str, name: &str) -> RoleRef {
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

    /// Nothing beyond the seed's rules and what the design adds to them.
    #[test]
    fn the_seeds_rules_are_the_upper_bound() {
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

    #[test]
    fn only_admins_choose_bridges() {
        for role in user_roles() {
            let name = role.metadata.name.unwrap();
            let writes = role.rules.unwrap().iter().any(|rule| {
                rule.resources.as_ref().unwrap().iter().any(|kind| kind == "networkconfigurations")
                    && rule.verbs.iter().any(|verb| WRITE.contains(&verb.as_str()))
            });
            assert_eq!(writes, name == "machine-admin", "{name}");
        }
    }
}
