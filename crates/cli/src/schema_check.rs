//! Checks an object against the schema of its CRD: unknown fields, types, required fields and ranges of integers.
//!
//! Lengths, patterns and enums are not checked. Both programs check values themselves, with better messages than a
//! pattern allows.

use serde_json::{Value, json};

/// How similar a name must be to an unknown one, so that a message suggests it. The same as in clap.
const SIMILAR: f64 = 0.7;

const TOP_LEVEL: [&str; 5] = ["apiVersion", "kind", "metadata", "spec", "status"];

#[derive(Default)]
struct SchemaCheck {
    errors: Vec<String>,
}

/// Messages about fields that are unknown, missing, of another type or out of range. The API server refuses such an object
/// of kubectl, Argo CD and Flux. `schema` is the schema of the whole object, as in a CRD, which need not describe the
/// metadata.
pub fn check_schema(schema: &Value, object: &Value) -> Vec<String> {
    let mut result = SchemaCheck::default();
    let metadata = json!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "properties": {
            "name": {"type": "string"},
            "namespace": {"type": "string"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    });
    result.check_value(&metadata, &object["metadata"], "metadata");
    let properties = &schema["properties"];
    result.check_value(&properties["spec"], &object["spec"], "spec");
    result.check_value(&properties["status"], &object["status"], "status");
    for name in object.as_object().into_iter().flat_map(|fields| fields.keys()) {
        if !TOP_LEVEL.contains(&name.as_str()) {
            result.errors.push(unknown_field(name, name, TOP_LEVEL));
        }
    }
    result.errors
}

fn unknown_field<'a>(path: &str, name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let similar = known.into_iter().map(|known| (strsim::jaro(name, known), known));
    match similar.filter(|(similarity, _)| *similarity > SIMILAR).max_by(|first, second| first.0.total_cmp(&second.0)) {
        Some((_, known)) => format!("{path}: unknown field; did you mean {known}?"),
        None => format!("{path}: unknown field"),
    }
}

impl SchemaCheck {
    fn check_value(&mut self, schema: &Value, value: &Value, path: &str) {
        // A field without a value, and one of several types, always match.
        if value.is_null() || schema["x-kubernetes-int-or-string"] == true {
            return;
        }
        let Some(expected) = schema["type"].as_str() else { return };
        match (expected, value) {
            ("object", Value::Object(fields)) => {
                let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
                for name in required.filter(|name| fields.get(*name).is_none_or(Value::is_null)) {
                    self.errors.push(format!("{path}.{name}: required value"));
                }
                for (name, value) in fields {
                    self.check_field(schema, name, value, &format!("{path}.{name}"));
                }
            }
            ("array", Value::Array(items)) => {
                for (index, item) in items.iter().enumerate() {
                    self.check_value(&schema["items"], item, &format!("{path}[{index}]"));
                }
            }
            ("string", Value::String(_)) | ("boolean", Value::Bool(_)) | ("number", Value::Number(_)) => {}
            ("integer", Value::Number(number)) if number.is_i64() || number.is_u64() => {
                self.check_range(schema, value, path);
            }
            (expected, value) => self.errors.push(mismatch(path, expected, value)),
        }
    }

    /// Only of integers: one out of range can fail to deserialize, with a worse message.
    fn check_range(&mut self, schema: &Value, value: &Value, path: &str) {
        let Some(number) = value.as_f64() else { return };
        if let Some(least) = schema["minimum"].as_f64().filter(|least| number < *least) {
            self.errors.push(format!("{path}: invalid value {value}: must be at least {least}"));
        }
        if let Some(most) = schema["maximum"].as_f64().filter(|most| number > *most) {
            self.errors.push(format!("{path}: invalid value {value}: must be at most {most}"));
        }
    }

    fn check_field(&mut self, schema: &Value, name: &str, value: &Value, path: &str) {
        match (schema["properties"].get(name), &schema["additionalProperties"]) {
            (Some(known), _) => self.check_value(known, value, path),
            (None, every @ Value::Object(_)) => self.check_value(every, value, path),
            (None, Value::Bool(true)) => {}
            // An object without properties is a map with any values.
            (None, _) if schema["x-kubernetes-preserve-unknown-fields"] == true || schema["properties"].is_null() => {}
            (None, _) => {
                let known = schema["properties"].as_object().into_iter().flat_map(|known| known.keys());
                self.errors.push(unknown_field(path, name, known.map(String::as_str)));
            }
        }
    }
}

const LONGEST_QUOTE: usize = 40;

fn mismatch(path: &str, expected: &str, value: &Value) -> String {
    let expected_type = match expected {
        "object" => "an object",
        "array" => "a list",
        "string" => "a string",
        "boolean" => "true or false",
        "integer" => "an integer",
        _ => "a number",
    };
    let hint = match value {
        Value::Bool(_) if expected == "string" => {
            "; YAML reads unquoted words such as yes, no, on and off as booleans: quote it"
        }
        Value::Number(_) if expected == "string" && path.ends_with("size") => "; add a unit, such as 10Gi",
        Value::Number(_) if expected == "string" => "; quote it",
        _ => "",
    };
    let given = match value {
        Value::Bool(value) => format!("{value}"),
        Value::Number(value) => format!("{value}"),
        // A string in the place of an object or a list can be a whole script, with passwords in it.
        Value::String(text) if matches!(expected, "boolean" | "integer" | "number") && text.len() <= LONGEST_QUOTE => {
            format!("{text:?}")
        }
        Value::String(_) => return format!("{path}: must be {expected_type}, not a string"),
        Value::Array(_) => return format!("{path}: must be {expected_type}, not a list"),
        Value::Object(_) => return format!("{path}: must be {expected_type}, not an object"),
        Value::Null => return format!("{path}: must be {expected_type}, not null"),
    };
    format!("{path}: invalid value {given}: must be {expected_type}{hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> Value {
        json!({"type": "object", "properties": {"spec": {
            "type": "object",
            "required": ["template"],
            "properties": {
                "template": {"type": "string"},
                "cpu": {"type": "object", "properties": {"cores": {"type": "integer", "minimum": 1, "maximum": 64}}},
                "disks": {"type": "array", "items": {"type": "object", "properties": {
                    "size": {"type": "string"}, "boot": {"type": "boolean"}}}},
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                "port": {"x-kubernetes-int-or-string": true},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        }}})
    }

    #[test]
    fn an_object_that_matches_has_no_errors() {
        let object = json!({
            "apiVersion": "x/v1", "kind": "A", "metadata": {"name": "a", "uid": "u", "labels": {"a": "b"}},
            "spec": {"template": "t", "cpu": {"cores": 4}, "disks": [{"size": "5Gi", "boot": true}, {"size": null}],
                "free": {"of": ["any"]}, "port": 5, "labels": {"x": "y"}},
        });
        assert_eq!(check_schema(&schema(), &object), Vec::<String>::new());
    }

    #[test]
    fn every_invalid_field_is_reported_with_what_it_must_be() {
        let object = json!({
            "metadata": {"name": false, "labels": {"on": true}},
            "spec": {"cpu": {"cores": 1.5}, "disks": [{"size": 5}, {"boot": "yes"}], "labels": ["a"]},
        });
        let expected = [
            "metadata.labels.on: invalid value true: must be a string; YAML reads unquoted words such as yes, no, on and off as booleans: quote it",
            "metadata.name: invalid value false: must be a string; YAML reads unquoted words such as yes, no, on and off as booleans: quote it",
            "spec.template: required value",
            "spec.cpu.cores: invalid value 1.5: must be an integer",
            "spec.disks[0].size: invalid value 5: must be a string; add a unit, such as 10Gi",
            "spec.disks[1].boot: invalid value \"yes\": must be true or false",
            "spec.labels: must be an object, not a list",
        ];
        assert_eq!(check_schema(&schema(), &object), expected);
        let cores = |cores: u64| check_schema(&schema(), &json!({"spec": {"template": "t", "cpu": {"cores": cores}}}));
        assert_eq!(cores(0), ["spec.cpu.cores: invalid value 0: must be at least 1"]);
        assert_eq!(cores(u64::MAX), ["spec.cpu.cores: invalid value 18446744073709551615: must be at most 64"]);
        assert_eq!(check_schema(&schema(), &json!({"spec": ["small"]})), ["spec: must be an object, not a list"]);
    }

    #[test]
    fn strings_that_can_be_scripts_are_not_quoted() {
        let cpu = |text: &str| check_schema(&schema(), &json!({"spec": {"template": "t", "cpu": text}}));
        assert_eq!(cpu("password: hunter2"), ["spec.cpu: must be an object, not a string"]);
        let long = json!({"spec": {"template": "t", "cpu": {"cores": "x".repeat(100)}}});
        assert_eq!(check_schema(&schema(), &long), ["spec.cpu.cores: must be an integer, not a string"]);
    }

    #[test]
    fn unknown_fields_are_reported() {
        let spec = json!({"template": "t", "cpu": {"coers": 4}, "free": {"x": 1}, "dsks": [], "zone": "a"});
        let expected = [
            "spec.cpu.coers: unknown field; did you mean cores?",
            "spec.dsks: unknown field; did you mean disks?",
            "spec.zone: unknown field",
            "spce: unknown field; did you mean spec?",
        ];
        assert_eq!(check_schema(&schema(), &json!({"spce": {}, "spec": spec})), expected);
    }
}
