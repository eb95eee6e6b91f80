//! Selectors of labels, as Kubernetes evaluates them.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};

type LabelMap = BTreeMap<String, String>;

/// An empty selector selects everything.
pub(crate) fn selects(selector: &LabelSelector, labels: &LabelMap) -> bool {
    let has_labels = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let mut expressions = selector.match_expressions.iter().flatten();
    has_labels
        && expressions.all(|expression| {
            let values = expression.values.as_deref().unwrap_or_default();
            holds(&expression.operator, values, labels.get(&expression.key))
        })
}

/// A term without expressions selects no node.
pub(crate) fn selects_node(term: &NodeSelectorTerm, name: &str, labels: &LabelMap) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let name = name.to_owned();
    let matches = |requirement: &NodeSelectorRequirement, value: Option<&String>| {
        holds(&requirement.operator, requirement.values.as_deref().unwrap_or_default(), value)
    };
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(|expression| matches(expression, labels.get(&expression.key)))
        && fields.iter().all(|field| matches(field, (field.key == "metadata.name").then_some(&name)))
}

fn holds(operator: &str, values: &[String], value: Option<&String>) -> bool {
    let number = |text: &String| text.parse::<i64>().ok();
    let compare = |is_ordered: fn(&i64, &i64) -> bool| {
        let limit = values.first().and_then(number);
        value.and_then(number).zip(limit).is_some_and(|(value, limit)| is_ordered(&value, &limit))
    };
    match operator {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compare(i64::gt),
        "Lt" => compare(i64::lt),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_operator_is_evaluated() {
        let labels: LabelMap = [("a", "x"), ("n", "5")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        for (key, operator, values, expected) in [
            ("a", "In", vec!["x", "y"], true),
            ("a", "In", vec!["y"], false),
            ("b", "In", vec!["x"], false),
            ("a", "NotIn", vec!["x"], false),
            ("b", "NotIn", vec!["x"], true),
            ("a", "Exists", vec![], true),
            ("b", "Exists", vec![], false),
            ("b", "DoesNotExist", vec![], true),
            ("n", "Gt", vec!["4"], true),
            ("n", "Gt", vec!["5"], false),
            ("n", "Lt", vec!["6"], true),
            ("a", "Lt", vec!["6"], false),
        ] {
            let expression = json!({"key": key, "operator": operator, "values": values});
            let term: NodeSelectorTerm = serde_json::from_value(json!({"matchExpressions": [expression]})).unwrap();
            assert_eq!(selects_node(&term, "node", &labels), expected, "{expression}");
            if !["Gt", "Lt"].contains(&operator) {
                let selector = serde_json::from_value(json!({"matchExpressions": [expression]})).unwrap();
                assert_eq!(selects(&selector, &labels), expected, "{expression}");
            }
        }
        assert!(!selects_node(&NodeSelectorTerm::default(), "node", &labels));
        assert!(selects(&LabelSelector::default(), &labels));
        let by_name = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node"]}]});
        let by_name: NodeSelectorTerm = serde_json::from_value(by_name).unwrap();
        assert!(selects_node(&by_name, "node", &labels) && !selects_node(&by_name, "other", &labels));
        let selector = |value: &str| serde_json::from_value(json!({"matchLabels": {"a": value}})).unwrap();
        assert!(selects(&selector("x"), &labels) && !selects(&selector("y"), &labels));
    }
}
