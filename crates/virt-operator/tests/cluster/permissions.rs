//! What the accounts of virt-operator and of KubeVirt's components can do, and that they can do nothing else: the API
//! server's own answers, compared with a reviewed list.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::authorization::v1::{
    ResourceRule, SelfSubjectRulesReview, SelfSubjectRulesReviewSpec, SubjectRulesReviewStatus,
};
use tokio::time::{Instant, sleep};
use vitivirt_lab::{
    Lab,
    harness::{SharedLabs, Suite},
    manifests,
};

use crate::support::{NAMESPACE, TIMEOUT, program};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; each_account_of_kubevirt_can_do_what_the_list_says_and_nothing_else);
}

const ELSEWHERE: &str = "default";
/// Kubernetes creates it in every namespace, and no role is bound to it.
const WITHOUT_ROLES: &str = "default";

/// The roles that an installation of KubeVirt has for users.
const USER_ROLES: [&str; 3] = ["kubevirt.io:view", "kubevirt.io:edit", "kubevirt.io:admin"];

/// The permitted verbs of each resource or URL.
type Permissions = BTreeMap<String, BTreeSet<String>>;

async fn each_account_of_kubevirt_can_do_what_the_list_says_and_nothing_else(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.ours(&program()).await?;
    let arguments = ["get", "serviceaccounts", "--namespace", NAMESPACE, "--output=jsonpath={.items[*].metadata.name}"];
    let accounts = lab.kubectl(&arguments).await?;
    let every_account = permissions(&lab, WITHOUT_ROLES, ELSEWHERE).await?;
    let mut found = BTreeMap::new();
    for account in accounts.split_whitespace() {
        let elsewhere = permissions(&lab, account, ELSEWHERE).await?;
        let own = permissions(&lab, account, NAMESPACE).await?;
        found.insert(format!("{account} in its own namespace"), without(own, &elsewhere));
        found.insert(account.to_owned(), without(elsewhere, &every_account));
    }
    for role in USER_ROLES {
        let user = format!("permissions-of-{}", role.replace(':', "-"));
        let of_user = |namespace| permissions_of(&lab, &user, namespace);
        let before = of_user(ELSEWHERE).await?;
        let name = format!("--clusterrole={role}");
        let binding = ["create", "rolebinding", &user, &name, "--user", &user, "--namespace", ELSEWHERE];
        lab.kubectl(&binding).await?;
        let deadline = Instant::now() + TIMEOUT;
        let mut after = of_user(ELSEWHERE).await?;
        // The API server's cache of roles follows a write after a moment.
        while after == before && Instant::now() < deadline {
            sleep(Duration::from_millis(50)).await;
            after = of_user(ELSEWHERE).await?;
        }
        found.insert(format!("user with {role}"), without(after, &before));
        let in_other = without(of_user(NAMESPACE).await?, &before);
        ensure!(in_other.is_empty(), "a user with {role} in one namespace can do in another one: {in_other:?}");
    }
    found.retain(|_, permissions| !permissions.is_empty());
    let (found, reviewed) = (lines(found), lines(reviewed()?));
    let added: Vec<_> = found.difference(&reviewed).collect();
    let missing: Vec<_> = reviewed.difference(&found).collect();
    ensure!(
        added.is_empty() && missing.is_empty(),
        "the API server permits what the reviewed list does not have: {added:#?}\nit does not permit: {missing:#?}"
    );
    Ok(())
}

/// The API server's answer to the question that `kubectl auth can-i --list` asks, as this account.
async fn permissions(lab: &Lab, account: &str, namespace: &str) -> Result<Permissions> {
    permissions_of(lab, &format!("system:serviceaccount:{NAMESPACE}:{account}"), namespace).await
}

async fn permissions_of(lab: &Lab, user: &str, namespace: &str) -> Result<Permissions> {
    let question = SelfSubjectRulesReview {
        spec: SelfSubjectRulesReviewSpec { namespace: Some(namespace.to_owned()) },
        ..SelfSubjectRulesReview::default()
    };
    let file = lab.folder().join(format!("rules-review-of-{}-in-{namespace}.json", user.replace(':', "-")));
    std::fs::write(&file, serde_json::to_string(&question)?)?;
    let user = format!("--as={user}");
    let answer =
        lab.kubectl(&["create", "--validate=false", "-f", &file.display().to_string(), "--output=json", &user]).await?;
    let answer: SelfSubjectRulesReview = serde_json::from_str(&answer)?;
    let status = answer.status.context("the API server does not answer")?;
    ensure!(!status.incomplete, "the answer is incomplete: {:?}", status.evaluation_error);
    Ok(by_resource(&status))
}

fn by_resource(status: &SubjectRulesReviewStatus) -> Permissions {
    let mut permissions = Permissions::new();
    for rule in &status.resource_rules {
        for name in names(rule) {
            permissions.entry(name).or_default().extend(rule.verbs.iter().cloned());
        }
    }
    for rule in &status.non_resource_rules {
        for url in rule.non_resource_urls.iter().flatten() {
            permissions.entry(url.clone()).or_default().extend(rule.verbs.iter().cloned());
        }
    }
    permissions
}

/// As in the reviewed list: `pods`, `virtualmachines.kubevirt.io/status`, or `secrets kubevirt-ca` for one object.
fn names(rule: &ResourceRule) -> Vec<String> {
    let mut names = Vec::new();
    for group in rule.api_groups.iter().flatten() {
        for resource in rule.resources.iter().flatten() {
            let kind = match (group.as_str(), resource.split_once('/')) {
                ("", _) => resource.clone(),
                (group, Some((resource, subresource))) => format!("{resource}.{group}/{subresource}"),
                (group, None) => format!("{resource}.{group}"),
            };
            match rule.resource_names.as_deref().unwrap_or_default() {
                [] => names.push(kind),
                objects => names.extend(objects.iter().map(|object| format!("{kind} {object}"))),
            }
        }
    }
    names
}

/// The permissions that are not among the others.
fn without(mut permissions: Permissions, others: &Permissions) -> Permissions {
    for (name, verbs) in &mut permissions {
        verbs.retain(|verb| !others.get(name).is_some_and(|permitted| permitted.contains(verb)));
    }
    permissions.retain(|_, verbs| !verbs.is_empty());
    permissions
}

fn reviewed() -> Result<BTreeMap<String, Permissions>> {
    let list = manifests::parse(include_str!("permissions.yaml"))?.into_iter().next().context("the list is empty")?;
    let list: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_value(list)?;
    let words = |verbs: String| verbs.split_whitespace().map(str::to_owned).collect();
    let permissions = |kinds: BTreeMap<String, String>| {
        kinds.into_iter().map(|(name, verbs)| (name, words(verbs))).collect::<Permissions>()
    };
    Ok(list.into_iter().map(|(account, kinds)| (account, permissions(kinds))).collect())
}

/// A line for each resource of each account.
fn lines(accounts: BTreeMap<String, Permissions>) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for (account, permissions) in accounts {
        let verbs = |verbs: BTreeSet<String>| verbs.into_iter().collect::<Vec<_>>().join(" ");
        lines.extend(
            permissions.into_iter().map(|(name, permitted)| format!("{account}: {name}: {}", verbs(permitted))),
        );
    }
    lines
}
