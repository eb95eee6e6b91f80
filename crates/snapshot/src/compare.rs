//! Compares two snapshots object by object and field by field. `normalise` removes the fields that are not compared
//! before a snapshot is taken.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::Serialize;
use serde_json::Value;

use crate::Snapshot;

/// One field in which two objects differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    pub path: String,
    /// None if the object has no such field.
    pub reference: Option<Value>,
    pub actual: Option<Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// The number of expected objects.
    pub expected: usize,
    pub missing: Vec<String>,
    pub extra: Vec<String>,
    pub differing: BTreeMap<String, Vec<Difference>>,
}

impl Comparison {
    pub fn is_equal(&self) -> bool {
        self.missing.is_empty() && self.extra.is_empty() && self.differing.is_empty()
    }

    /// Every object that differs, with at most this number of fields for each.
    pub fn details(&self, fields: usize) -> String {
        let mut lines: Vec<String> = self.missing.iter().map(|key| format!("missing  {key}")).collect();
        lines.extend(self.extra.iter().map(|key| format!("extra    {key}")));
        for (key, differences) in &self.differing {
            lines.push(format!("differs  {key} in {}", count(differences.len(), "field")));
            lines.extend(differences.iter().take(fields).map(|difference| format!("           {difference}")));
            if let more @ 1.. = differences.len().saturating_sub(fields) {
                lines.push(format!("           and {more} more"));
            }
        }
        lines.join("\n")
    }
}

/// A summary in one line.
impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let same = self.expected - self.missing.len() - self.differing.len();
        let fields = self.differing.values().map(Vec::len).sum();
        write!(
            f,
            "{same} of {} objects identical, {} missing, {} extra, {} differ in {}",
            self.expected,
            self.missing.len(),
            self.extra.len(),
            self.differing.len(),
            count(fields, "field"),
        )
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = |value: &Option<Value>| {
            value.as_ref().map_or("absent".to_owned(), |value| value.to_string().chars().take(160).collect())
        };
        write!(f, "{}: reference {} | actual {}", self.path, short(&self.reference), short(&self.actual))
    }
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

pub fn compare(reference: &Snapshot, actual: &Snapshot) -> Comparison {
    let mut result = Comparison { expected: reference.len(), ..Comparison::default() };
    for key in reference.keys().chain(actual.keys()).collect::<BTreeSet<_>>() {
        match (reference.get(key), actual.get(key)) {
            (Some(expected), Some(actual)) => {
                let differences = differences(expected, actual);
                if !differences.is_empty() {
                    result.differing.insert(key.clone(), differences);
                }
            }
            (Some(_), None) => result.missing.push(key.clone()),
            _ => result.extra.push(key.clone()),
        }
    }
    result
}

/// Every field in which two objects differ. Lists of different lengths are one difference.
fn differences(reference: &Value, actual: &Value) -> Vec<Difference> {
    let mut differences = Vec::new();
    collect_differences("", Some(reference), Some(actual), &mut differences);
    differences
}

fn collect_differences(
    path: &str,
    reference: Option<&Value>,
    actual: Option<&Value>,
    differences: &mut Vec<Difference>,
) {
    match (reference, actual) {
        (Some(Value::Object(expected)), Some(Value::Object(actual))) => {
            for key in expected.keys().chain(actual.keys()).collect::<BTreeSet<_>>() {
                collect_differences(&format!("{path}.{key}"), expected.get(key), actual.get(key), differences);
            }
        }
        (Some(Value::Array(expected)), Some(Value::Array(actual))) if expected.len() == actual.len() => {
            for (index, (expected, actual)) in expected.iter().zip(actual).enumerate() {
                collect_differences(&format!("{path}[{index}]"), Some(expected), Some(actual), differences);
            }
        }
        (expected, actual) if expected != actual => {
            differences.push(Difference {
                path: path.to_owned(),
                reference: expected.cloned(),
                actual: actual.cloned(),
            });
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn differences_are_found_in_objects_and_lists() {
        let expected = json!({"a": [{"b": 1}], "c": 1});
        for (actual, path) in [
            (json!({"a": [{"b": 2}], "c": 1}), ".a[0].b"),
            (json!({"a": [], "c": 1}), ".a"),
            (json!({"a": [{"b": 1}]}), ".c"),
            (json!({"a": [{"b": 1, "d": 0}], "c": 1}), ".a[0].d"),
        ] {
            let differences = differences(&expected, &actual);
            assert_eq!(
                differences.iter().map(|difference| difference.path.as_str()).collect::<Vec<_>>(),
                [path],
                "{actual}"
            );
        }
        assert!(differences(&expected, &expected).is_empty());
    }

    #[test]
    fn the_summary_counts_objects_and_fields() {
        let snapshot = |pairs: &[(&str, Value)]| -> Snapshot {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
        };
        let expected = snapshot(&[("a", json!(1)), ("b", json!({"x": 1, "y": 1})), ("c", json!(1))]);
        let actual = snapshot(&[("a", json!(1)), ("b", json!({"x": 2})), ("d", json!(1))]);
        let result = compare(&expected, &actual);
        assert!(!result.is_equal() && compare(&expected, &expected).is_equal());
        assert_eq!(result.to_string(), "1 of 3 objects identical, 1 missing, 1 extra, 1 differ in 2 fields");
        assert_eq!(
            result.details(1),
            "missing  c\nextra    d\ndiffers  b in 2 fields\n           .x: reference 1 | actual 2\n           and 1 more"
        );
    }
}
