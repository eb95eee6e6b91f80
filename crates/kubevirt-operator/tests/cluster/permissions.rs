//! What each account and role can do, and that it can do nothing else: the API server's own answers, compared with a
//! reviewed list.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use k8s_openapi::api::{
    authorization::v1::{NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
    rbac::v1::PolicyRule,
};
use kube::{Api, api::PostParams};
use kubevirt_operator::rbac;
use serde_json::{Value, json};
use vitivirt_lab::{
    Lab, UsedPermission,
    harness::{SharedLabs, Suite},
    manifests,
};

use crate::{
    machine_test::{MACHINE_PATIENCE, run_concurrently},
    packages::repository_path,
    poll::poll_until,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; each_account_and_role_can_do_what_the_list_says_and_nothing_else);
}

const VERBS: [&str; 8] = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"];
const USER_ROLES: [&str; 4] = ["view", "edit", "admin", rbac::NETWORK_ROLE];
const TENANT: &str = "permissions-of-a-tenant";
const ELSEWHERE: &str = "permissions-elsewhere";
const METRICS_READER: &str = "metrics-reader";
const NAMESPACED_ACCOUNT: &str = "namespaced-operator";

/// A resource or subresource of an API group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ApiKind {
    group: String,
    resource: String,
    subresource: String,
}

impl ApiKind {
    fn new(group: &str, resource: &str) -> Self {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        ApiKind { group: group.to_owned(), resource: resource.to_owned(), subresource: subresource.to_owned() }
    }

    /// As in the reviewed list: `machines.vitistack.io/status`.
    fn name(&self) -> String {
        let mut name = self.resource.clone();
        if !self.group.is_empty() {
            name.push_str(&format!(".{}", self.group));
        }
        if !self.subresource.is_empty() {
            name.push_str(&format!("/{}", self.subresource));
        }
        name
    }
}

/// The permitted verbs of each kind.
type Permissions = BTreeMap<String, BTreeSet<String>>;

async fn each_account_and_role_can_do_what_the_list_says_and_nothing_else(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    for folder in ["config/crd", "config/rbac"] {
        lab.kubectl(&["apply", "-f", &repository_path(folder)]).await?;
    }
    create_subjects(&lab).await?;
    let kinds = kinds(&lab).await?;
    let own_kinds: BTreeSet<ApiKind> = kinds.iter().filter(|kind| kind.group == "vitistack.io").cloned().collect();
    // The controller manager aggregates the user roles after a while.
    let admin = user("admin");
    let is_aggregated = || async {
        let machines = ApiKind::new("vitistack.io", "machines");
        is_allowed(&lab, &admin, TENANT, &machines, "create").await
    };
    poll_until(MACHINE_PATIENCE, is_aggregated, || "the user roles are aggregated".to_owned()).await?;

    // What every service account can do, for example ask for its own permissions.
    let every_account = permissions(&lab, &account(ELSEWHERE, "without-roles"), ELSEWHERE, &kinds).await?;
    let operator = account(rbac::NAMESPACE, rbac::ACCOUNT);
    let namespaced = account(rbac::NAMESPACE, NAMESPACED_ACCOUNT);
    let mut found = BTreeMap::new();
    let reader = account(ELSEWHERE, METRICS_READER);
    ensure!(!can_read_metrics(&lab, &reader).await?, "an account without a role can read the metrics");
    for (name, subject, namespace) in [
        ("operator", &operator, TENANT),
        ("operator-in-its-own-namespace", &operator, rbac::NAMESPACE),
        ("namespaced-operator", &namespaced, TENANT),
        ("namespaced-operator-elsewhere", &namespaced, ELSEWHERE),
    ] {
        let mut permitted = permissions(&lab, subject, namespace, &kinds).await?;
        permitted.retain(|kind, verbs| every_account.get(kind) != Some(verbs));
        found.insert(name.to_owned(), permitted);
    }
    let mut elsewhere = Permissions::new();
    for role in USER_ROLES {
        let permitted = permissions(&lab, &user(role), TENANT, &own_kinds).await?;
        found.insert(format!("user-with-{role}"), permitted);
        elsewhere.extend(permissions(&lab, &user(role), ELSEWHERE, &own_kinds).await?);
    }
    found.insert("users-elsewhere".to_owned(), elsewhere);

    // The metrics of the operator, and the account that asks the API server about their readers.
    lab.kubectl(&["apply", "-f", &repository_path("config/secure-metrics/rbac.yaml")]).await?;
    bind_metrics_reader(&lab).await?;
    let before = found.get("operator").cloned().unwrap_or_default();
    let mut with_reviews = permissions(&lab, &operator, TENANT, &kinds).await?;
    with_reviews.retain(|kind, verbs| every_account.get(kind) != Some(verbs) && before.get(kind) != Some(verbs));
    found.insert("operator-with-secure-metrics".to_owned(), with_reviews);
    let mut of_reader = permissions(&lab, &reader, ELSEWHERE, &kinds).await?;
    of_reader.retain(|kind, verbs| every_account.get(kind) != Some(verbs));
    if can_read_metrics(&lab, &reader).await? {
        of_reader.insert("/metrics".to_owned(), BTreeSet::from(["get".to_owned()]));
    }
    found.insert("metrics-reader".to_owned(), of_reader);

    let reviewed = include_str!("permissions.yaml");
    let reviewed = manifests::parse(reviewed)?.into_iter().next().context("the reviewed list is empty")?;
    let reviewed: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_value(reviewed)?;
    let words = |verbs: String| verbs.split_whitespace().map(str::to_owned).collect();
    let permissions = |kinds: BTreeMap<String, String>| kinds.into_iter().map(|(kind, verbs)| (kind, words(verbs)));
    let reviewed: BTreeMap<String, Permissions> =
        reviewed.into_iter().map(|(subject, kinds)| (subject, permissions(kinds).collect())).collect();
    for subject in found.keys().chain(reviewed.keys()).collect::<BTreeSet<_>>() {
        let (found, reviewed) = (found.get(subject), reviewed.get(subject));
        ensure!(found == reviewed, "{subject}: the API server permits {found:#?}, the reviewed list has {reviewed:#?}");
    }
    Ok(())
}

/// The admission plugin OwnerReferencesPermissionEnforcement asks for these when the operator sets an owner reference. The
/// lab enables it. They are not part of a request, so the audit log does not contain them.
const USED_BY_ADMISSION: [(&str, &str); 2] = [("machines", "finalizers"), ("networkconfigurations", "finalizers")];

/// The operator has used every permission that its rules grant, in some lab of the suite.
pub(crate) fn every_permission_is_used(used: &BTreeSet<UsedPermission>) -> Result<()> {
    let rules = rbac::manager_rules().into_iter().chain(rbac::lease_rules()).chain(rbac::metrics_auth_rules());
    let granted: BTreeSet<UsedPermission> = rules.flat_map(|rule| permissions_of(&rule)).collect();
    let is_explained = |permission: &&UsedPermission| {
        USED_BY_ADMISSION.contains(&(permission.resource.as_str(), permission.subresource.as_str()))
    };
    let unused: Vec<_> = granted.difference(used).filter(|permission| !is_explained(permission)).collect();
    ensure!(unused.is_empty(), "permissions that the operator never used: {unused:#?}");
    Ok(())
}

fn permissions_of(rule: &PolicyRule) -> Vec<UsedPermission> {
    let mut permissions = Vec::new();
    for group in rule.api_groups.iter().flatten() {
        for resource in rule.resources.iter().flatten() {
            let ApiKind { group, resource, subresource } = ApiKind::new(group, resource);
            permissions.extend(rule.verbs.iter().map(|verb| UsedPermission {
                verb: verb.clone(),
                group: group.clone(),
                resource: resource.clone(),
                subresource: subresource.clone(),
            }));
        }
    }
    permissions
}

/// Two namespaces, an operator with permissions in one of them, and a user for each role in the same one.
async fn create_subjects(lab: &Lab) -> Result<()> {
    let group = "rbac.authorization.k8s.io";
    let mut objects: Vec<Value> = [TENANT, ELSEWHERE]
        .map(|name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}))
        .to_vec();
    let (role, binding, cluster_role, cluster_binding) = rbac::namespaced_roles();
    for object in [json!(role), json!(binding), json!(cluster_role), json!(cluster_binding)] {
        let mut object = object;
        if let Some(subject) = object.pointer_mut("/subjects/0/name") {
            *subject = NAMESPACED_ACCOUNT.into();
        }
        let is_namespaced = object.get("kind").is_some_and(|kind| kind == "Role" || kind == "RoleBinding");
        if let (true, Some(Value::Object(metadata))) = (is_namespaced, object.get_mut("metadata")) {
            metadata.insert("namespace".to_owned(), TENANT.into());
        }
        objects.push(object);
    }
    objects.extend(USER_ROLES.map(|role| {
        json!({
            "apiVersion": format!("{group}/v1"), "kind": "RoleBinding",
            "metadata": {"name": format!("user-with-{role}"), "namespace": TENANT},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user_name(role)}],
        })
    }));
    manifests::create(&lab.client(), &objects).await
}

/// Binds the role that docs/monitoring.md names to an account.
async fn bind_metrics_reader(lab: &Lab) -> Result<()> {
    let (role, account) = (rbac::METRICS_READER_ROLE, format!("{ELSEWHERE}:{METRICS_READER}"));
    let binding = ["create", "clusterrolebinding", "permissions-of-a-metrics-reader"];
    let options = ["--clusterrole", role, "--serviceaccount", &account];
    lab.kubectl(&[binding.as_slice(), &options].concat()).await?;
    let reader = self::account(ELSEWHERE, METRICS_READER);
    // The API server's cache of roles follows a write after a moment.
    let is_bound = || can_read_metrics(lab, &reader);
    poll_until(MACHINE_PATIENCE, is_bound, || "the role of the metrics reader has an effect".to_owned()).await
}

async fn can_read_metrics(lab: &Lab, subject: &SubjectAccessReviewSpec) -> Result<bool> {
    let attributes = NonResourceAttributes { path: Some("/metrics".to_owned()), verb: Some("get".to_owned()) };
    let spec = SubjectAccessReviewSpec { non_resource_attributes: Some(attributes), ..subject.clone() };
    review(lab, spec).await
}

fn user_name(role: &str) -> String {
    format!("permissions-of-{role}")
}

fn user(role: &str) -> SubjectAccessReviewSpec {
    let groups = Some(vec!["system:authenticated".to_owned()]);
    SubjectAccessReviewSpec { user: Some(user_name(role)), groups, ..SubjectAccessReviewSpec::default() }
}

fn account(namespace: &str, name: &str) -> SubjectAccessReviewSpec {
    let groups = [
        "system:serviceaccounts".to_owned(),
        format!("system:serviceaccounts:{namespace}"),
        "system:authenticated".to_owned(),
    ];
    SubjectAccessReviewSpec {
        user: Some(format!("system:serviceaccount:{namespace}:{name}")),
        groups: Some(groups.to_vec()),
        ..SubjectAccessReviewSpec::default()
    }
}

/// Every resource and subresource that the API server has, and those in the operator's rules that other projects serve.
async fn kinds(lab: &Lab) -> Result<BTreeSet<ApiKind>> {
    let client = lab.client();
    let mut kinds = BTreeSet::new();
    for resource in client.list_core_api_resources("v1").await?.resources {
        kinds.insert(ApiKind::new("", &resource.name));
    }
    for group in client.list_api_groups().await?.groups {
        let version = group.preferred_version.context("a group without a preferred version")?;
        for resource in client.list_api_group_resources(&version.group_version).await?.resources {
            kinds.insert(ApiKind::new(&group.name, &resource.name));
        }
    }
    for rule in rbac::manager_rules() {
        for group in rule.api_groups.iter().flatten() {
            kinds.extend(rule.resources.iter().flatten().map(|resource| ApiKind::new(group, resource)));
        }
    }
    ensure!(kinds.len() > 60, "{kinds:?}");
    Ok(kinds)
}

async fn permissions(
    lab: &Lab,
    subject: &SubjectAccessReviewSpec,
    namespace: &str,
    kinds: &BTreeSet<ApiKind>,
) -> Result<Permissions> {
    let questions = kinds.iter().flat_map(|kind| VERBS.map(|verb| (kind.clone(), verb)));
    let answers = questions.map(|(kind, verb)| {
        async move {
            let allowed = is_allowed(lab, subject, namespace, &kind, verb).await?;
            anyhow::Ok((kind, verb, allowed))
        }
        .boxed()
    });
    let answers = run_concurrently(answers.collect()).await?;
    let mut permitted = Permissions::new();
    for (kind, verb, _) in answers.into_iter().filter(|(_, _, allowed)| *allowed) {
        permitted.entry(kind.name()).or_default().insert(verb.to_owned());
    }
    Ok(permitted)
}

async fn is_allowed(
    lab: &Lab,
    subject: &SubjectAccessReviewSpec,
    namespace: &str,
    kind: &ApiKind,
    verb: &str,
) -> Result<bool> {
    let attributes = ResourceAttributes {
        namespace: Some(namespace.to_owned()),
        group: Some(kind.group.clone()),
        resource: Some(kind.resource.clone()),
        subresource: Some(kind.subresource.clone()),
        verb: Some(verb.to_owned()),
        ..ResourceAttributes::default()
    };
    review(lab, SubjectAccessReviewSpec { resource_attributes: Some(attributes), ..subject.clone() }).await
}

async fn review(lab: &Lab, spec: SubjectAccessReviewSpec) -> Result<bool> {
    let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
    let reviews: Api<SubjectAccessReview> = Api::all(lab.client());
    let answer = reviews.create(&PostParams::default(), &review).await.context("asking for a permission")?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}
