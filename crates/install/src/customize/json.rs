//! JSON patches, as leniently as KubeVirt applies them, and merge patches.
//!
//! This deviates from RFC 6902: an index may count from the end, `replace` may set a missing field, a missing `value`
//! is null, and null equals a missing value. Patches that work with upstream virt-operator must work here, and the
//! crate `json-patch` rejects these.

use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Clone, Debug, Deserialize)]
pub(super) struct JsonPatchOperation {
    op: JsonPatchVerb,
    path: String,
    #[serde(default)]
    from: Option<String>,
    #[serde(default)]
    value: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum JsonPatchVerb {
    Add,
    Remove,
    Replace,
    Move,
    Copy,
    Test,
}

/// A merge patch, RFC 7386: objects are merged, null removes, anything else replaces.
pub(super) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(target) = target.as_object_mut() else { return };
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key).or_insert(Value::Null), value);
        }
    }
}

pub(super) fn apply(document: &mut Value, patch: &[JsonPatchOperation]) -> Result<(), String> {
    for operation in patch {
        let JsonPatchOperation { op, path, from, value } = operation;
        match (op, from) {
            (JsonPatchVerb::Add, _) => add(document, path, value.clone())?,
            (JsonPatchVerb::Remove, _) => remove(document, path).map(drop)?,
            (JsonPatchVerb::Replace, _) => replace(document, path, value.clone())?,
            (JsonPatchVerb::Test, _) => {
                let actual = value_at(document, path)?;
                if actual != *value {
                    return Err(format!("{path} is {actual}, not {value}"));
                }
            }
            (JsonPatchVerb::Move, Some(from)) => {
                let value = remove(document, from)?;
                add(document, path, value)?;
            }
            (JsonPatchVerb::Copy, Some(from)) => {
                let value = value_at(document, from)?;
                add(document, path, value)?;
            }
            (JsonPatchVerb::Move | JsonPatchVerb::Copy, None) => {
                return Err(format!("the operation on {path} has no from"));
            }
        }
    }
    Ok(())
}

/// The parent of the value at a path, and the last part of the path.
fn parent_of<'a>(document: &'a mut Value, path: &str) -> Result<(&'a mut Value, String), String> {
    let missing = || format!("{path} not found");
    let mut parts = path.split('/').map(|part| part.replace("~1", "/").replace("~0", "~"));
    let (first, last) = (parts.next(), parts.next_back());
    let (Some(_), Some(last)) = (first, last) else { return Err(missing()) };
    let mut at = document;
    for part in parts {
        at = match at {
            Value::Object(map) => map.get_mut(&part),
            Value::Array(list) => parse_index(&part, list.len()).and_then(|index| list.get_mut(index)),
            _ => None,
        }
        .ok_or_else(missing)?;
    }
    Ok((at, last))
}

/// A negative index counts from the end.
fn parse_index(text: &str, length: usize) -> Option<usize> {
    let number: isize = text.parse().ok()?;
    if number < 0 { length.checked_sub(number.unsigned_abs()) } else { usize::try_from(number).ok() }
}

fn value_at(document: &mut Value, path: &str) -> Result<Value, String> {
    match parent_of(document, path)? {
        (Value::Object(map), key) => Ok(map.get(&key).cloned().unwrap_or_default()),
        (Value::Array(list), key) => {
            let actual = parse_index(&key, list.len()).and_then(|index| list.get(index));
            actual.cloned().ok_or_else(|| format!("{path} not found"))
        }
        _ => Err(format!("{path} not found")),
    }
}

fn add(document: &mut Value, path: &str, value: Value) -> Result<(), String> {
    match parent_of(document, path)? {
        (Value::Object(map), key) => {
            map.insert(key, value);
            Ok(())
        }
        (Value::Array(list), key) if key == "-" => {
            list.push(value);
            Ok(())
        }
        (Value::Array(list), key) => {
            let at = parse_index(&key, list.len() + 1).filter(|at| *at <= list.len());
            list.insert(at.ok_or_else(|| format!("{path} is beyond the end of its list"))?, value);
            Ok(())
        }
        _ => Err(format!("{path} not found")),
    }
}

fn replace(document: &mut Value, path: &str, value: Value) -> Result<(), String> {
    match parent_of(document, path)? {
        (Value::Object(map), key) => {
            map.insert(key, value);
            Ok(())
        }
        (Value::Array(list), key) => {
            let at = parse_index(&key, list.len()).and_then(|index| list.get_mut(index));
            *at.ok_or_else(|| format!("{path} not found"))? = value;
            Ok(())
        }
        _ => Err(format!("{path} not found")),
    }
}

fn remove(document: &mut Value, path: &str) -> Result<Value, String> {
    let missing = || format!("{path} not found");
    match parent_of(document, path)? {
        (Value::Object(map), key) => map.remove(&key).ok_or_else(missing),
        (Value::Array(list), key) => {
            let at = parse_index(&key, list.len()).filter(|at| *at < list.len());
            Ok(list.remove(at.ok_or_else(missing)?))
        }
        _ => Err(missing()),
    }
}
