//! Which objects a cache is about, as the server would judge it: what was written by ourselves is laid over a cache
//! only if its watch would show it too.

use std::collections::BTreeMap;

use kube::core::{Expression, Selector, SelectorExt};
use serde_json::Value;
use vitivirt_api::ObjectKey;

#[derive(Debug)]
pub(super) struct Scope {
    namespace: Option<String>,
    name: Option<String>,
    labels: Selector,
}

impl Scope {
    pub(super) fn new(namespace: Option<&str>, labels: Option<&str>, fields: Option<&str>) -> Self {
        // Of field selectors every kind knows these two; what others ask for is not in what we are told.
        let field = |name: &str| {
            let mut pairs = fields?.split(',').filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim_start_matches('=').trim().to_owned())
        };
        Self {
            namespace: namespace.map(ToOwned::to_owned).or_else(|| field("metadata.namespace")),
            name: field("metadata.name"),
            // The server refuses to list with what cannot be understood.
            labels: labels.and_then(parse).unwrap_or_default(),
        }
    }

    /// By its place. This does not change while an object lives.
    pub(super) fn covers(&self, key: &ObjectKey) -> bool {
        let namespace = self.namespace.as_deref().is_none_or(|namespace| key.namespace() == Some(namespace));
        namespace && self.name.as_deref().is_none_or(|name| key.name() == name)
    }

    /// By its labels.
    pub(super) fn selects(&self, object: &Value) -> bool {
        if self.labels.selects_all() {
            return true;
        }
        let labels = object.pointer("/metadata/labels").and_then(Value::as_object).into_iter().flatten();
        let labels: BTreeMap<String, String> =
            labels.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect();
        self.labels.matches(&labels)
    }
}

/// `a=b, c==d, e!=f, g, !h, i in (j, k), l notin (m)`.
fn parse(text: &str) -> Option<Selector> {
    let mut depth = 0_u32;
    let parts = text.split(|character| {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        character == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).map(expression).collect()
}

fn expression(text: &str) -> Option<Expression> {
    let owned = |text: &str| text.trim().to_owned();
    if let Some(list) = text.strip_suffix(')') {
        let (left, values) = list.split_once('(')?;
        let values = values.split(',').map(owned).collect();
        let mut words = left.split_whitespace();
        let (key, operator) = (words.next()?.to_owned(), words.next()?);
        return match operator {
            "in" => Some(Expression::In(key, values)),
            "notin" => Some(Expression::NotIn(key, values)),
            _ => None,
        };
    }
    if let Some((key, value)) = text.split_once("!=") {
        return Some(Expression::NotEqual(owned(key), owned(value)));
    }
    if let Some((key, value)) = text.split_once('=') {
        return Some(Expression::Equal(owned(key), owned(value.strip_prefix('=').unwrap_or(value))));
    }
    Some(match text.strip_prefix('!') {
        Some(key) => Expression::DoesNotExist(owned(key)),
        None => Expression::Exists(owned(text)),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn labels_are_judged_as_the_server_does() {
        let object = json!({"metadata": {"labels": {"app": "shop", "tier": "db"}}});
        for (selector, selected) in [
            ("", true),
            ("app=shop", true),
            ("app==shop,tier", true),
            ("app=shop,!tier", false),
            ("app != shop", false),
            ("other!=x", true),
            ("tier in (web, db), app", true),
            ("tier notin (web,db)", false),
            ("other notin (x)", true),
            ("other in (x)", false),
        ] {
            assert_eq!(Scope::new(None, Some(selector), None).selects(&object), selected, "{selector}");
        }
        assert!(!Scope::new(None, Some("app"), None).selects(&json!({"metadata": {}})));
    }

    #[test]
    fn places_are_judged_by_namespace_and_name() {
        let key = ObjectKey::namespaced("shop", "db");
        assert!(Scope::new(None, None, None).covers(&key));
        assert!(Scope::new(Some("shop"), None, Some("metadata.name=db")).covers(&key));
        assert!(!Scope::new(Some("other"), None, None).covers(&key));
        assert!(!Scope::new(None, None, Some("status.phase=Running,metadata.name=web")).covers(&key));
        assert!(!Scope::new(None, None, Some("metadata.namespace=other")).covers(&key));
    }
}
