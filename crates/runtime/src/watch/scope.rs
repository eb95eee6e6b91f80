//! The objects that a cache watches. The cache accepts a write of the operator only if its watch will deliver that
//! object too.

use std::collections::BTreeMap;

use kube::core::{Selector, SelectorExt};
use serde_json::Value;
use vitivirt_api::ObjectKey;

#[derive(Debug)]
pub(super) struct Scope {
    namespace: Option<String>,
    name: Option<String>,
    labels: Selector,
}

impl Scope {
    pub(super) fn new(namespace: Option<&str>, labels: Selector, fields: Option<&str>) -> Self {
        // Every kind supports these two field selectors. Others depend on fields that the cache does not compare.
        let field = |name: &str| {
            let mut pairs = fields?.split(',').filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim_start_matches('=').trim().to_owned())
        };
        Self {
            namespace: namespace.map(ToOwned::to_owned).or_else(|| field("metadata.namespace")),
            name: field("metadata.name"),
            labels,
        }
    }

    /// Whether the namespace and the name match. Both are immutable.
    pub(super) fn contains_key(&self, key: &ObjectKey) -> bool {
        let namespace = self.namespace.as_deref().is_none_or(|namespace| key.namespace() == Some(namespace));
        namespace && self.name.as_deref().is_none_or(|name| key.name() == name)
    }

    /// Whether the labels match.
    pub(super) fn matches_labels(&self, object: &Value) -> bool {
        if self.labels.selects_all() {
            return true;
        }
        let labels = object.pointer("/metadata/labels").and_then(Value::as_object).into_iter().flatten();
        let labels: BTreeMap<String, String> =
            labels.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect();
        self.labels.matches(&labels)
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Expression;
    use serde_json::json;

    use super::*;

    #[test]
    fn labels_match_as_on_the_server() {
        let object = json!({"metadata": {"labels": {"app": "shop", "tier": "db"}}});
        let (equal, exists) =
            (|key: &str, value: &str| Expression::Equal(key.into(), value.into()), Expression::Exists);
        let values = |values: &[&str]| values.iter().map(ToString::to_string).collect();
        for (expressions, matches) in [
            (vec![], true),
            (vec![equal("app", "shop")], true),
            (vec![equal("app", "shop"), exists("tier".into())], true),
            (vec![equal("app", "shop"), Expression::DoesNotExist("tier".into())], false),
            (vec![Expression::NotEqual("app".into(), "shop".into())], false),
            (vec![Expression::NotEqual("other".into(), "x".into())], true),
            (vec![Expression::In("tier".into(), values(&["web", "db"])), exists("app".into())], true),
            (vec![Expression::NotIn("tier".into(), values(&["web", "db"]))], false),
            (vec![Expression::NotIn("other".into(), values(&["x"]))], true),
            (vec![Expression::In("other".into(), values(&["x"]))], false),
        ] {
            let selector: Selector = expressions.into_iter().collect();
            let text = selector.to_string();
            assert_eq!(Scope::new(None, selector, None).matches_labels(&object), matches, "{text}");
        }
        assert!(!Scope::new(None, exists("app".into()).into(), None).matches_labels(&json!({"metadata": {}})));
    }

    #[test]
    fn keys_match_by_namespace_and_name() {
        let key = ObjectKey::namespaced("shop", "db");
        let scope = |namespace, fields| Scope::new(namespace, Selector::default(), fields);
        assert!(scope(None, None).contains_key(&key));
        assert!(scope(Some("shop"), Some("metadata.name=db")).contains_key(&key));
        assert!(!scope(Some("other"), None).contains_key(&key));
        assert!(!scope(None, Some("status.phase=Running,metadata.name=web")).contains_key(&key));
        assert!(!scope(None, Some("metadata.namespace=other")).contains_key(&key));
    }
}
