//! Patches of the test server: apply, merge patch and JSON patch, with the rejections of the real server.

use serde_json::{Value, json};

use super::{TestResponse, rejection, status_response};

/// The patched object, or the rejection.
#[expect(clippy::result_large_err, reason = "a rejection is a response too, and this is a test")]
pub(super) fn patched(live: Option<&Value>, kind: &str, sent: &Value, is_status: bool) -> Result<Value, TestResponse> {
    let applied = kind.starts_with("application/apply-patch");
    let current = match live {
        Some(live) => live.clone(),
        None if !applied => return Err(status_response(404, "NotFound", "not found")),
        None if !sent["metadata"]["uid"].is_null() => {
            return Err(status_response(
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
            return Err(status_response(
                422,
                "Invalid",
                "the server rejected our request due to an error in our request",
            ));
        }
    } else {
        merge(&mut merged, sent);
    }
    let field = |object: &Value, name: &str| object["metadata"][name].clone();
    if live.is_some() && field(&merged, "resourceVersion") != field(&current, "resourceVersion") {
        return Err(status_response(
            409,
            "Conflict",
            "the object has been modified; please apply your changes to the latest version",
        ));
    }
    if is_status {
        // As for a custom resource: the server restores the metadata before it validates.
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

/// A rejection by validation, which names the field.
fn invalid(field: &str, message: &str) -> TestResponse {
    let causes = json!([{ "reason": "FieldValueInvalid", "field": field, "message": message }]);
    rejection(422, "Invalid", json!({ "name": "x", "kind": "things", "causes": causes }))
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
