//! Fields of a status that an earlier program wrote with the same field manager.

use serde_json::Value;

/// The fields of the status that only updates of `manager` own, and that `applied` does not contain.
pub(super) fn replaced_status_fields(object: &Value, manager: &str, applied: &Value) -> Vec<String> {
    let entries = object.pointer("/metadata/managedFields").and_then(Value::as_array);
    let entries: Vec<&Value> = entries.into_iter().flatten().collect();
    let is_own_update =
        |entry: &Value| entry.get("manager").is_some_and(|name| name == manager) && entry["operation"] == "Update";
    let owns = |entry: &Value, field: &str| {
        entry.pointer("/fieldsV1/f:status").is_some_and(|owned| owned.get(field).is_some())
    };
    let status = object.get("status").and_then(Value::as_object);
    let fields = status.into_iter().flatten().map(|(name, _)| name);
    let is_replaced = |name: &&String| {
        let field = format!("f:{name}");
        let mut owners = entries.iter().filter(|entry| owns(entry, &field)).peekable();
        applied.get("status").is_none_or(|applied| applied.get(name.as_str()).is_none())
            && owners.peek().is_some()
            && owners.all(|entry| is_own_update(entry))
    };
    fields.filter(is_replaced).cloned().collect()
}
