//! Strategic merge patches: like merge patches, but lists whose elements have a key are merged by that key.
//!
//! Directives: `$patch: replace | delete` in a map or an element of a list, `$retainKeys`, `$setElementOrder/<list>`,
//! `$deleteFromPrimitiveList/<list>`. The tests compare with the result of the KubeVirt release.

use serde_json::{Map, Value};

use super::shape::{Lists, MergeShape};

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const ELEMENT_ORDER: &str = "$setElementOrder/";
const DELETE_VALUES: &str = "$deleteFromPrimitiveList/";

type JsonObject = Map<String, Value>;

pub(super) fn merge(mut original: JsonObject, mut patch: JsonObject, shape: MergeShape) -> Result<JsonObject, String> {
    if let Some(directive) = patch.remove(PATCH) {
        return match directive.as_str() {
            Some("replace") => Ok(patch),
            Some("delete") => Ok(JsonObject::new()),
            _ => Err(format!("{PATCH}: unsupported value {directive}; supported values: replace, delete")),
        };
    }
    retain_keys(&mut original, &mut patch)?;
    let orders: Vec<String> = patch.keys().filter(|key| key.starts_with(ELEMENT_ORDER)).cloned().collect();
    for directive in orders {
        let field = directive.trim_start_matches(ELEMENT_ORDER).to_owned();
        let order = patch.remove(&directive);
        reorder(&mut original, &mut patch, &field, order.as_ref(), shape)?;
    }
    for (key, value) in patch {
        if let Some(field) = key.strip_prefix(DELETE_VALUES) {
            let deleted = value.as_array().ok_or_else(|| format!("{key} must be a list"))?;
            if let Some(values) = original.get_mut(field).and_then(Value::as_array_mut) {
                values.retain(|value| !deleted.contains(value));
            }
            continue;
        }
        let merged = match (original.remove(&key), value) {
            (_, Value::Null) => None,
            (Some(Value::Object(original)), Value::Object(patch)) => {
                Some(Value::Object(merge(original, patch, shape.field(&key).0)?))
            }
            (Some(Value::Array(original_list)), Value::Array(patch_list)) => {
                let (element, lists) = shape.field(&key);
                Some(Value::Array(merge_lists(original_list, patch_list, element, lists)?))
            }
            (_, value) => without_directives(value),
        };
        if let Some(merged) = merged {
            original.insert(key, merged);
        }
    }
    Ok(original)
}

/// Removes the fields that are not named, so that a union can change its member.
fn retain_keys(original: &mut JsonObject, patch: &mut JsonObject) -> Result<(), String> {
    let Some(keys) = patch.remove(RETAIN_KEYS) else { return Ok(()) };
    let keys = keys.as_array().ok_or_else(|| format!("{RETAIN_KEYS} must be a list"))?;
    let named = |key: &str| keys.iter().any(|name| name.as_str() == Some(key));
    let unnamed = patch.iter().find(|(key, value)| !value.is_null() && !key.starts_with('$') && !named(key));
    if let Some((key, _)) = unnamed {
        return Err(format!("{RETAIN_KEYS} does not contain {key}, which the patch sets"));
    }
    original.retain(|key, _| named(key));
    Ok(())
}

/// Merges a list and sorts its elements as the directive says. Elements that only the original has keep their position.
fn reorder(
    original: &mut JsonObject,
    patch: &mut JsonObject,
    field: &str,
    order: Option<&Value>,
    shape: MergeShape,
) -> Result<(), String> {
    let order = order.and_then(Value::as_array).ok_or_else(|| format!("{ELEMENT_ORDER}{field} must be a list"))?;
    let (element, lists) = shape.field(field);
    let list = |value: Option<Value>| match value {
        None => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list)),
        Some(_) => Err(format!("{field} is not a list")),
    };
    let (original_list, patch_list) = (list(original.remove(field))?, list(patch.remove(field))?);
    check_order(patch_list.as_deref().unwrap_or_default(), order, lists, field)?;
    let before = original_list.clone().unwrap_or_default();
    let merged = match (original_list, patch_list) {
        (None, None) => return Ok(()),
        (Some(original_list), None) => original_list,
        (None, Some(patch_list)) => patch_list.into_iter().filter_map(without_directives).collect(),
        (Some(original_list), Some(patch_list)) => merge_lists(original_list, patch_list, element, lists)?,
    };
    original.insert(field.to_owned(), Value::Array(sort_elements(merged, order, &before, lists)));
    Ok(())
}

/// The directive must contain every element of the patch, in the same order.
fn check_order(patch: &[Value], order: &[Value], lists: Lists, field: &str) -> Result<(), String> {
    let mut rest = order.iter();
    let kept = patch.iter().filter(|element| element.get(PATCH).is_none());
    for element in kept {
        if !rest.any(|named| same_element(named, element, lists)) {
            return Err(format!("{ELEMENT_ORDER}{field} and {field} disagree"));
        }
    }
    Ok(())
}

fn merge_lists(
    mut original_list: Vec<Value>,
    patch_list: Vec<Value>,
    element: MergeShape,
    lists: Lists,
) -> Result<Vec<Value>, String> {
    let key = match lists {
        Lists::Replaced => return Ok(patch_list),
        Lists::Values => {
            let before = original_list.clone();
            let order = patch_list.clone();
            for value in patch_list {
                if !original_list.contains(&value) {
                    original_list.push(value);
                }
            }
            return Ok(sort_elements(original_list, &order, &before, lists));
        }
        Lists::Keyed(key) => key,
    };
    let mut additions = Vec::new();
    let mut replace = false;
    for element in patch_list {
        match element.get(PATCH).and_then(Value::as_str) {
            None if element.get(PATCH).is_some() => return Err(format!("{PATCH} must be replace or delete")),
            None => additions.push(element),
            Some("delete") => {
                let deleted = element.get(key).ok_or_else(|| format!("an element to delete has no {key}"))?;
                original_list.retain(|original| original.get(key) != Some(deleted));
            }
            Some("replace") => replace = true,
            Some(other) => {
                return Err(format!("{PATCH}: unsupported value {other}; supported values: replace, delete"));
            }
        }
    }
    if replace {
        return Ok(additions);
    }
    let before = original_list.clone();
    let order = additions.clone();
    for addition in additions {
        let Value::Object(addition) = addition else {
            return Err("an element of a list is not an object".to_owned());
        };
        let Some(value) = addition.get(key).cloned() else {
            return Err(format!("an element of a list has no {key}"));
        };
        match original_list.iter_mut().find(|element| element.get(key) == Some(&value)) {
            Some(Value::Object(original)) => *original = merge(std::mem::take(original), addition, element)?,
            Some(_) => return Err("an element of a list is not an object".to_owned()),
            None => original_list.push(Value::Object(addition)),
        }
    }
    Ok(sort_elements(original_list, &order, &before, lists))
}

/// Elements in `order` get that order. The others keep theirs, and precede an ordered element only if they did before.
fn sort_elements(merged: Vec<Value>, order: &[Value], before: &[Value], lists: Lists) -> Vec<Value> {
    let position = |list: &[Value], element: &Value| list.iter().position(|other| same_element(other, element, lists));
    let (mut named, others): (Vec<Value>, Vec<Value>) =
        merged.into_iter().partition(|element| position(order, element).is_some());
    named.sort_by_key(|element| position(order, element));
    let mut out = Vec::with_capacity(named.len() + others.len());
    let mut named = named.into_iter().peekable();
    let mut others = others.into_iter().peekable();
    while let (Some(other), Some(ordered)) = (others.peek(), named.peek()) {
        let other_is_first = match (position(before, other), position(before, ordered)) {
            (Some(other), Some(ordered)) => other < ordered,
            _ => false,
        };
        out.extend(if other_is_first { others.next() } else { named.next() });
    }
    out.extend(named);
    out.extend(others);
    out
}

fn same_element(a: &Value, b: &Value, lists: Lists) -> bool {
    match lists {
        Lists::Keyed(key) => a.get(key).is_some() && a.get(key) == b.get(key),
        Lists::Values | Lists::Replaced => a == b,
    }
}

/// A value of the patch without nulls and directives.
fn without_directives(value: Value) -> Option<Value> {
    match value {
        Value::Object(object) => {
            if object.contains_key(PATCH) {
                return None;
            }
            let kept = object.into_iter().filter(|(key, value)| !value.is_null() && !is_directive(key));
            let kept = kept.filter_map(|(key, value)| Some((key, without_directives(value)?)));
            Some(Value::Object(kept.collect()))
        }
        Value::Array(list) => Some(Value::Array(list.into_iter().filter_map(without_directives).collect())),
        other => Some(other),
    }
}

fn is_directive(key: &str) -> bool {
    key == RETAIN_KEYS || key.starts_with(ELEMENT_ORDER) || key.starts_with(DELETE_VALUES)
}
