//! The permissions that pods of the previous version keep until they are gone.
//!
//! Roles are written before the workloads, so that new pods have their permissions when they start. Old pods run until
//! they are replaced, and their version may need a permission that the new version does not have.

use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::Value;

use super::operator;
use crate::kind::Kind;

/// Adds the rules of the live role that the desired role does not grant. A client can grant only permissions that it
/// holds, so a rule that the operator does not hold is left out: the API server would reject the whole role.
pub(crate) fn keep_rules(kind: Kind, desired: &mut Value, live: &Value) {
    let rules = |role: &Value| -> Option<Vec<PolicyRule>> { serde_json::from_value(role.get("rules")?.clone()).ok() };
    let (Some(wanted), Some(previous)) = (rules(desired), rules(live)) else { return };
    let mut held = operator::cluster_rules();
    if kind == Kind::Role {
        held.extend(operator::namespace_rules());
    }
    let kept = previous.into_iter().filter(|rule| !grants(&wanted, rule) && grants(&held, rule));
    let kept = kept.filter_map(|rule| serde_json::to_value(rule).ok());
    if let Some(rules) = desired.get_mut("rules").and_then(Value::as_array_mut) {
        rules.extend(kept);
    }
}

/// Whether these rules grant everything that one rule grants.
pub(crate) fn grants(rules: &[PolicyRule], rule: &PolicyRule) -> bool {
    let names = rule.resource_names.as_deref().unwrap_or_default();
    let parts = |list: &Option<Vec<String>>| list.clone().unwrap_or_default();
    let mut verbs = rule.verbs.iter();
    verbs.all(|verb| {
        let of_resources = parts(&rule.api_groups).iter().all(|group| {
            parts(&rule.resources).iter().all(|resource| {
                let has_names = |granted: &PolicyRule| match granted.resource_names.as_deref().unwrap_or_default() {
                    [] => true,
                    granted => !names.is_empty() && names.iter().all(|name| granted.contains(name)),
                };
                rules.iter().any(|granted| {
                    contains(&granted.verbs, verb)
                        && contains(&parts(&granted.api_groups), group)
                        && contains(&parts(&granted.resources), resource)
                        && has_names(granted)
                })
            })
        });
        let of_urls = parts(&rule.non_resource_urls).iter().all(|url| {
            rules
                .iter()
                .any(|granted| contains(&granted.verbs, verb) && contains(&parts(&granted.non_resource_urls), url))
        });
        of_resources && of_urls
    })
}

fn contains(granted: &[String], value: &str) -> bool {
    granted.iter().any(|granted| granted == "*" || granted == value)
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use serde_json::json;

    use super::*;
    use crate::rbac::{rule, urls, with_names};

    fn role(rules: &[PolicyRule]) -> Value {
        json!({ "rules": rules })
    }

    #[test]
    fn a_role_keeps_what_only_the_previous_version_grants() {
        let wanted = [rule(&["kubevirt.io"], &["*"], &["*"]), rule(&[""], &["pods"], &["get", "list"])];
        let networks = rule(&["k8s.cni.cncf.io"], &["network-attachment-definitions"], &["get"]);
        let previous = [
            rule(&["kubevirt.io"], &["virtualmachines"], &["get"]),
            rule(&[""], &["pods"], &["list", "get"]),
            networks.clone(),
            rule(&["example.org"], &["not-held-by-the-operator"], &["get"]),
            urls(&["/metrics"], &["get"]),
        ];
        let mut desired = role(&wanted);
        keep_rules(Kind::ClusterRole, &mut desired, &role(&previous));
        let [a, b] = wanted;
        assert_eq!(desired, role(&[a, b, networks, urls(&["/metrics"], &["get"])]));
    }

    #[test]
    fn names_restrict_what_a_rule_grants() {
        let all = rule(&[""], &["secrets"], &["get"]);
        let (one, two) = (with_names(all.clone(), &["a"]), with_names(all.clone(), &["a", "b"]));
        assert!(grants(from_ref(&all), &one) && grants(from_ref(&two), &one));
        assert!(!grants(from_ref(&one), &two) && !grants(from_ref(&one), &all));
    }
}
