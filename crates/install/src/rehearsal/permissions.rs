//! Whether the ServiceAccount of the operator may send the writes of a plan, according to RBAC. A role must also not grant
//! more than the operator holds, because the API server rejects such a role.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject};
use vitivirt_api::{ObjectKey, Plan, Target, Write};

use crate::{
    certificates::NoCertificates,
    installation::Installation,
    kind::Kind,
    plan::OPTIONAL_STEP,
    rbac::{previous::grants, rule, with_names},
};

/// So many missing permissions are named.
const NAMED: usize = 5;

/// The RBAC objects of the cluster: all bindings, and at least the roles that they name.
#[derive(Debug, Default)]
pub struct RbacObjects {
    pub cluster_roles: Vec<ClusterRole>,
    pub cluster_role_bindings: Vec<ClusterRoleBinding>,
    pub roles: Vec<Role>,
    pub role_bindings: Vec<RoleBinding>,
}

/// What a ServiceAccount may do.
#[derive(Debug, Default)]
pub struct Access {
    account: String,
    cluster: Vec<PolicyRule>,
    namespaces: BTreeMap<String, Vec<PolicyRule>>,
}

impl Access {
    pub fn new(namespace: &str, name: &str, objects: &RbacObjects) -> Self {
        let is_bound = |subjects: &Option<Vec<Subject>>, of_binding: Option<&str>| {
            subjects.iter().flatten().any(|subject| is_account(subject, namespace, name, of_binding))
        };
        let cluster_rules = |reference: &RoleRef| -> Vec<PolicyRule> {
            let mut roles = objects.cluster_roles.iter();
            let role = roles.find(|role| role.metadata.name.as_ref() == Some(&reference.name));
            role.and_then(|role| role.rules.clone()).unwrap_or_default()
        };
        let bindings = objects.cluster_role_bindings.iter().filter(|binding| is_bound(&binding.subjects, None));
        let cluster = bindings.flat_map(|binding| cluster_rules(&binding.role_ref)).collect();
        let mut namespaces: BTreeMap<String, Vec<PolicyRule>> = BTreeMap::new();
        for binding in &objects.role_bindings {
            let of = binding.metadata.namespace.clone().unwrap_or_default();
            if !is_bound(&binding.subjects, Some(&of)) {
                continue;
            }
            let rules = if binding.role_ref.kind == "ClusterRole" {
                cluster_rules(&binding.role_ref)
            } else {
                let mut roles = objects.roles.iter().filter(|role| role.metadata.namespace.as_ref() == Some(&of));
                let role = roles.find(|role| role.metadata.name.as_ref() == Some(&binding.role_ref.name));
                role.and_then(|role| role.rules.clone()).unwrap_or_default()
            };
            namespaces.entry(of).or_default().extend(rules);
        }
        Self { account: format!("{namespace}/{name}"), cluster, namespaces }
    }

    fn allows(&self, rule: &PolicyRule, namespace: Option<&str>) -> bool {
        let of_namespace = namespace.and_then(|namespace| self.namespaces.get(namespace)).map(Vec::as_slice);
        let mut rules = self.cluster.clone();
        rules.extend_from_slice(of_namespace.unwrap_or_default());
        grants(&rules, rule)
    }
}

fn is_account(subject: &Subject, namespace: &str, name: &str, of_binding: Option<&str>) -> bool {
    match subject.kind.as_str() {
        "ServiceAccount" => subject.name == name && subject.namespace.as_deref().or(of_binding) == Some(namespace),
        "User" => subject.name == format!("system:serviceaccount:{namespace}:{name}"),
        "Group" => {
            let of_namespace = format!("system:serviceaccounts:{namespace}");
            ["system:authenticated", "system:serviceaccounts", &of_namespace].contains(&subject.name.as_str())
        }
        _ => false,
    }
}

/// The permissions that the operator lacks for a plan, as one sentence. The step whose failure blocks nothing does not count.
pub fn missing_permissions(access: &Access, installation: &Installation, plan: &Plan) -> Option<String> {
    let mut missing: BTreeSet<String> = BTreeSet::new();
    let steps = plan.steps.iter().filter(|step| step.name != OPTIONAL_STEP);
    for write in steps.flat_map(|step| &step.writes) {
        let Target { resource, key } = write.target();
        let verb = write.verb();
        let needed = rule(&[&resource.group], &[&resource.plural], &[verb]);
        // The name of a new object is not part of the request.
        let needed = if verb == "create" { needed } else { with_names(needed, &[key.name()]) };
        if !access.allows(&needed, key.namespace()) {
            missing.insert(format!("{verb} {}{}", plural(&resource.plural, &resource.group), place(key)));
        }
        if verb != "delete" {
            missing.extend(escalation(access, installation, write));
        }
    }
    for object in &installation.objects {
        let resource = object.kind.resource();
        let needed = rule(&[&resource.group], &[&resource.plural], &["list", "watch"]);
        if !access.allows(&needed, object.key.namespace()) {
            missing.insert(format!(
                "list and watch {}{}",
                plural(&resource.plural, &resource.group),
                place(&object.key)
            ));
        }
    }
    if missing.is_empty() {
        return None;
    }
    let named: Vec<&str> = missing.iter().take(NAMED).map(String::as_str).collect();
    let more = match missing.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    Some(format!(
        "ServiceAccount {} lacks permissions: {}{more}; apply those of this version: `virt-operator manifests --image IMAGE \
         | kubectl apply --server-side --force-conflicts -f -`",
        access.account,
        named.join("; "),
    ))
}

/// What a role of the installation grants and the operator does not hold.
fn escalation(access: &Access, installation: &Installation, write: &Write) -> Vec<String> {
    let target = write.target();
    let mut objects =
        installation.objects.iter().filter(|object| matches!(object.kind, Kind::ClusterRole | Kind::Role));
    let Some(object) = objects.find(|object| object.target() == *target) else { return Vec::new() };
    let namespace = object.key.namespace();
    let escalate = rule(&["rbac.authorization.k8s.io"], &[&target.resource.plural], &["escalate"]);
    if access.allows(&with_names(escalate, &[object.key.name()]), namespace) {
        return Vec::new();
    }
    let body = object.body(&NoCertificates).map(vitivirt_api::Body::into_json).unwrap_or_default();
    let rules = body.get("rules").cloned().unwrap_or_default();
    let rules: Vec<PolicyRule> = serde_json::from_value(rules).unwrap_or_default();
    let lacking = rules.into_iter().filter(|rule| !access.allows(rule, namespace));
    lacking.map(|rule| format!("{}, which {target} grants", describe(&rule))).collect()
}

fn describe(rule: &PolicyRule) -> String {
    let verbs = rule.verbs.join(", ");
    if let Some(urls) = rule.non_resource_urls.as_ref().filter(|urls| !urls.is_empty()) {
        return format!("{verbs} {}", urls.join(", "));
    }
    let groups = rule.api_groups.as_deref().unwrap_or_default();
    let resources = rule.resources.iter().flatten();
    let group = groups.first().map(String::as_str).unwrap_or_default();
    format!("{verbs} {}", resources.map(|resource| plural(resource, group)).collect::<Vec<_>>().join(", "))
}

fn plural(resource: &str, group: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

fn place(key: &ObjectKey) -> String {
    key.namespace().map(|namespace| format!(" in namespace {namespace}")).unwrap_or_default()
}
