//! Asks the API server whether an account has permissions, for commands that check a cluster.

use std::{collections::BTreeSet, fmt, path::Path};

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::{
    authorization::v1::{
        NonResourceAttributes, ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
        SubjectAccessReview, SubjectAccessReviewSpec,
    },
    rbac::v1::PolicyRule,
};
use kube::{
    Api, Client,
    api::{ApiResource, PostParams},
};

use crate::program::SERVICE_ACCOUNT_NAMESPACE;

/// Reviews that are sent at the same time.
const CONCURRENCY: usize = 16;

/// Whose permissions are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Account {
    /// The account of the client.
    Own,
    ServiceAccount {
        namespace: String,
        name: String,
    },
}

impl Account {
    /// The account of an operator. In the operator's pod it is the own account.
    pub fn of_operator(namespace: &str, name: &str) -> Self {
        if Path::new(SERVICE_ACCOUNT_NAMESPACE).exists() {
            return Self::Own;
        }
        Self::ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => formatter.write_str("this account"),
            Self::ServiceAccount { namespace, name } => write!(formatter, "ServiceAccount {namespace}/{name}"),
        }
    }
}

/// A verb on a resource, or on a URL of the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permission {
    pub verb: String,
    pub group: String,
    /// With the subresource, such as `machines/status`. Empty for a URL.
    pub resource: String,
    /// `None`: in every namespace, or of a kind without namespaces.
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub url: Option<String>,
}

impl Permission {
    pub fn to_create(kind: &ApiResource) -> Self {
        Self { verb: "create".to_owned(), group: kind.group.clone(), resource: kind.plural.clone(), ..Self::default() }
    }

    /// Every permission that the rules grant, once.
    pub fn of_rules<'a>(
        rules: impl IntoIterator<Item = &'a PolicyRule>,
        namespace: Option<&str>,
    ) -> BTreeSet<Permission> {
        let mut permissions = BTreeSet::new();
        for rule in rules {
            for verb in &rule.verbs {
                let base = Permission { verb: verb.clone(), ..Permission::default() };
                for url in rule.non_resource_urls.iter().flatten() {
                    permissions.insert(Permission { url: Some(url.clone()), ..base.clone() });
                }
                let names: Vec<Option<String>> = match &rule.resource_names {
                    Some(names) if !names.is_empty() => names.iter().cloned().map(Some).collect(),
                    _ => vec![None],
                };
                for group in rule.api_groups.iter().flatten() {
                    for resource in rule.resources.iter().flatten() {
                        permissions.extend(names.iter().map(|name| Permission {
                            group: group.clone(),
                            resource: resource.clone(),
                            namespace: namespace.map(ToOwned::to_owned),
                            name: name.clone(),
                            ..base.clone()
                        }));
                    }
                }
            }
        }
        permissions
    }

    fn resource_attributes(&self) -> Option<ResourceAttributes> {
        if self.url.is_some() {
            return None;
        }
        let (resource, subresource) = match self.resource.split_once('/') {
            Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
            None => (self.resource.as_str(), None),
        };
        Some(ResourceAttributes {
            verb: Some(self.verb.clone()),
            group: Some(self.group.clone()),
            resource: Some(resource.to_owned()),
            subresource,
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            ..ResourceAttributes::default()
        })
    }

    fn url_attributes(&self) -> Option<NonResourceAttributes> {
        let path = self.url.clone()?;
        Some(NonResourceAttributes { path: Some(path), verb: Some(self.verb.clone()) })
    }
}

/// `patch machines.vitistack.io/status in namespace a`, as `kubectl auth can-i` writes it.
impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(url) = &self.url {
            return write!(f, "{} {url}", self.verb);
        }
        let (resource, subresource) = self.resource.split_once('/').unwrap_or((&self.resource, ""));
        write!(f, "{} {resource}", self.verb)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        if !subresource.is_empty() {
            write!(f, "/{subresource}")?;
        }
        if let Some(name) = &self.name {
            write!(f, " {name}")?;
        }
        match &self.namespace {
            Some(namespace) => write!(f, " in namespace {namespace}"),
            None => Ok(()),
        }
    }
}

/// The permissions that the account does not have, in the given order.
pub async fn missing_permissions(
    client: &Client,
    account: &Account,
    permissions: impl IntoIterator<Item = Permission>,
) -> Result<Vec<Permission>, kube::Error> {
    let checked = stream::iter(permissions).map(|permission| async move {
        let allowed = is_allowed(client, account, &permission).await?;
        Ok::<_, kube::Error>((!allowed).then_some(permission))
    });
    checked.buffered(CONCURRENCY).try_filter_map(|missing| async move { Ok(missing) }).try_collect().await
}

async fn is_allowed(client: &Client, account: &Account, permission: &Permission) -> Result<bool, kube::Error> {
    let (resource_attributes, non_resource_attributes) =
        (permission.resource_attributes(), permission.url_attributes());
    let parameters = PostParams::default();
    let status = match account {
        Account::Own => {
            let spec = SelfSubjectAccessReviewSpec { resource_attributes, non_resource_attributes };
            let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
            Api::all(client.clone()).create(&parameters, &review).await?.status
        }
        Account::ServiceAccount { namespace, name } => {
            let groups =
                ["system:serviceaccounts", &format!("system:serviceaccounts:{namespace}"), "system:authenticated"];
            let spec = SubjectAccessReviewSpec {
                resource_attributes,
                non_resource_attributes,
                user: Some(format!("system:serviceaccount:{namespace}:{name}")),
                groups: Some(groups.map(ToOwned::to_owned).to_vec()),
                ..SubjectAccessReviewSpec::default()
            };
            let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
            Api::all(client.clone()).create(&parameters, &review).await?.status
        }
    };
    Ok(status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Option<Vec<String>> {
        Some(texts.iter().map(|text| (*text).to_owned()).collect())
    }

    #[test]
    fn a_rule_is_one_permission_for_each_verb_resource_and_name() {
        let rules = [
            PolicyRule {
                api_groups: strings(&["a.io"]),
                resources: strings(&["things", "things/status"]),
                verbs: vec!["get".to_owned(), "patch".to_owned()],
                ..PolicyRule::default()
            },
            PolicyRule {
                api_groups: strings(&[""]),
                resources: strings(&["secrets"]),
                resource_names: strings(&["one", "two"]),
                verbs: vec!["get".to_owned()],
                ..PolicyRule::default()
            },
            PolicyRule {
                non_resource_urls: strings(&["/metrics"]),
                verbs: vec!["get".to_owned()],
                ..PolicyRule::default()
            },
        ];
        let texts: Vec<String> = Permission::of_rules(&rules, Some("ns")).iter().map(ToString::to_string).collect();
        let expected = [
            "get /metrics",
            "get secrets one in namespace ns",
            "get secrets two in namespace ns",
            "get things.a.io in namespace ns",
            "get things.a.io/status in namespace ns",
            "patch things.a.io in namespace ns",
            "patch things.a.io/status in namespace ns",
        ];
        assert_eq!(texts, expected);
        let twice = [rules.clone(), rules.clone()].concat();
        assert_eq!(Permission::of_rules(&twice, None).len(), 7);
    }
}
