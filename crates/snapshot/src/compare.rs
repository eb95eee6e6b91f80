//! Compares two snapshots object by object and field by field.

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
    pub here: Option<Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// The number of objects in the reference.
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
        write!(f, "{}: reference {} | here {}", self.path, short(&self.reference), short(&self.here))
    }
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

pub fn compare(reference: &Snapshot, here: &Snapshot) -> Comparison {
    let mut result = Comparison { expected: reference.len(), ..Comparison::default() };
    for key in reference.keys().chain(here.keys()).collect::<BTreeSet<_>>() {
        match (reference.get(key), here.get(key)) {
            (Some(theirs), Some(ours)) => {
                let found = differences(theirs, ours);
                if !found.is_empty() {
                    result.differing.insert(key.clone(), found);
                }
            }
            (Some(_), None) => result.missing.push(key.clone()),
            _ => result.extra.push(key.clone()),
        }
    }
    result
}

/// Every field in which two objects differ. Lists of different lengths are one difference.
fn differences(reference: &Value, here: &Value) -> Vec<Difference> {
    let mut found = Vec::new();
    walk("", Some(reference), Some(here), &mut found);
    found
}

fn walk(at: &str, reference: Option<&Value>, here: Option<&Value>, found: &mut Vec<Difference>) {
    match (reference, here) {
        (Some(Value::Object(theirs)), Some(Value::Object(ours))) => {
            for key in theirs.keys().chain(ours.keys()).collect::<BTreeSet<_>>() {
                walk(&format!("{at}.{key}"), theirs.get(key), ours.get(key), found);
            }
        }
        (Some(Value::Array(theirs)), Some(Value::Array(ours))) if theirs.len() == ours.len() => {
            for (index, (theirs, ours)) in theirs.iter().zip(ours).enumerate() {
                walk(&format!("{at}[{index}]"), Some(theirs), Some(ours), found);
            }
        }
        (theirs, ours) if theirs != ours => {
            found.push(Difference { path: at.to_owned(), reference: theirs.cloned(), here: ours.cloned() });
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
        let theirs = json!({"a": [{"b": 1}], "c": 1});
        for (ours, path) in [
            (json!({"a": [{"b": 2}], "c": 1}), ".a[0].b"),
            (json!({"a": [], "c": 1}), ".a"),
            (json!({"a": [{"b": 1}]}), ".c"),
            (json!({"a": [{"b": 1, "d": 0}], "c": 1}), ".a[0].d"),
        ] {
            let found = differences(&theirs, &ours);
            assert_eq!(found.iter().map(|difference| difference.path.as_str()).collect::<Vec<_>>(), [path], "{ours}");
        }
        assert!(differences(&theirs, &theirs).is_empty());
    }

    #[test]
    fn the_summary_counts_objects_and_fields() {
        let snapshot = |pairs: &[(&str, Value)]| -> Snapshot {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
        };
        let theirs = snapshot(&[("a", json!(1)), ("b", json!({"x": 1, "y": 1})), ("c", json!(1))]);
        let ours = snapshot(&[("a", json!(1)), ("b", json!({"x": 2})), ("d", json!(1))]);
        let result = compare(&theirs, &ours);
        assert!(!result.is_equal() && compare(&theirs, &theirs).is_equal());
        assert_eq!(result.to_string(), "1 of 3 objects identical, 1 missing, 1 extra, 1 differ in 2 fields");
        assert_eq!(
            result.details(1),
            "missing  c\nextra    d\ndiffers  b in 2 fields\n           .x: reference 1 | here 2\n           and 1 more"
        );
    }
}
