//! What the server makes of a patch: apply, merge patch and JSON patch, with the refusals of the real one.

use serde_json::{Value, json};

use super::{Answer, refusal, status};

/// What a patch makes of an object, or why it is refused.
#[expect(clippy::result_large_err, reason = "a refusal is an answer too, and this is a test")]
pub(super) fn patched(live: Option<&Value>, kind: &str, sent: &Value, is_status: bool) -> Result<Value, Answer> {
    let applied = kind.starts_with("application/apply-patch");
    let current = match live {
        Some(live) => live.clone(),
        None if !applied => return Err(status(404, "NotFound", "not found")),
        None if !sent["metadata"]["uid"].is_null() => {
            return Err(status(
                409,
                "Conflict",
                "uid mismatch: the provided object specified uid u, and no existing object was found",
            ));
        }
        None => Value::Null,
    };
    let mut merged = current.clone();
    if kind.starts_with("application/json-patch") {
        let patch: json_patch::Patch = serde_json::from_value(sent.clone()).unwrap();
        if json_patch::patch(&mut merged, &patch).is_err() {
            return Err(status(422, "Invalid", "the server rejected our request due to an error in our request"));
        }
    } else {
        merge(&mut merged, sent);
    }
    let field = |object: &Value, name: &str| object["metadata"][name].clone();
    if live.is_some() && field(&merged, "resourceVersion") != field(&current, "resourceVersion") {
        return Err(status(
            409,
            "Conflict",
            "the object has been modified; please apply your changes to the latest version",
        ));
    }
    if is_status {
        // As of a custom resource: metadata is put back before anybody looks at it.
        let mut whole = current;
        whole["status"] = merged["status"].clone();
        return Ok(whole);
    }
    if live.is_some() && field(&merged, "uid") != field(&current, "uid") {
        return Err(invalid("metadata.uid", "field is immutable"));
    }
    if merged["data"].as_object().is_some_and(|data| data.keys().any(|key| key.contains(' '))) {
        return Err(invalid("data", "a valid config key must consist of alphanumeric characters"));
    }
    Ok(merged)
}

/// A refusal by validation, which names the field.
fn invalid(field: &str, message: &str) -> Answer {
    let causes = json!([{ "reason": "FieldValueInvalid", "field": field, "message": message }]);
    refusal(422, "Invalid", json!({ "name": "x", "kind": "things", "causes": causes }))
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from.clone(),
    }
}
