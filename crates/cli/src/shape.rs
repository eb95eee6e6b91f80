//! Whether an object has the shape of its schema: fields that exist, in the types and ranges that they have.
//!
//! Lengths and patterns are not looked at. Both programs judge values themselves, in better words than a pattern has.

use serde_json::{Value, json};

/// What is said of an object's shape.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Sentences about fields that are missing or of another type.
    pub wrong: Vec<String>,
    /// The paths of fields that the schema does not have.
    pub unknown: Vec<String>,
}

/// `schema` is that of the whole object, as a definition has it: its metadata need not be described.
pub fn check(schema: &Value, object: &Value) -> Shape {
    let mut shape = Shape::default();
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
    shape.look(&metadata, &object["metadata"], "metadata");
    let described = &schema["properties"];
    shape.look(&described["spec"], &object["spec"], "spec");
    shape.look(&described["status"], &object["status"], "status");
    for name in object.as_object().into_iter().flat_map(|fields| fields.keys()) {
        if !["apiVersion", "kind", "metadata", "spec", "status"].contains(&name.as_str()) {
            shape.unknown.push(name.clone());
        }
    }
    shape
}

impl Shape {
    fn look(&mut self, schema: &Value, value: &Value, path: &str) {
        // Nothing is said of what is left out, or of what the schema leaves open.
        if value.is_null() || schema["x-kubernetes-int-or-string"] == true {
            return;
        }
        let Some(wanted) = schema["type"].as_str() else { return };
        match (wanted, value) {
            ("object", Value::Object(fields)) => {
                let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
                for name in required.filter(|name| fields.get(*name).is_none_or(Value::is_null)) {
                    self.wrong.push(format!("{path}.{name} is missing"));
                }
                for (name, value) in fields {
                    self.field(schema, name, value, &format!("{path}.{name}"));
                }
            }
            ("array", Value::Array(items)) => {
                for (index, item) in items.iter().enumerate() {
                    self.look(&schema["items"], item, &format!("{path}[{index}]"));
                }
            }
            ("string", Value::String(_)) | ("boolean", Value::Bool(_)) | ("number", Value::Number(_)) => {}
            ("integer", Value::Number(number)) if number.is_i64() || number.is_u64() => self.range(schema, value, path),
            (wanted, value) => self.wrong.push(mismatch(path, wanted, value)),
        }
    }

    /// Of whole numbers, because one beyond its range cannot even be read.
    fn range(&mut self, schema: &Value, value: &Value, path: &str) {
        let Some(number) = value.as_f64() else { return };
        if let Some(least) = schema["minimum"].as_f64().filter(|least| number < *least) {
            self.wrong.push(format!("{path} must be at least {least}, and it is {value}"));
        }
        if let Some(most) = schema["maximum"].as_f64().filter(|most| number > *most) {
            self.wrong.push(format!("{path} must be at most {most}, and it is {value}"));
        }
    }

    fn field(&mut self, schema: &Value, name: &str, value: &Value, path: &str) {
        match (schema["properties"].get(name), &schema["additionalProperties"]) {
            (Some(known), _) => self.look(known, value, path),
            (None, every @ Value::Object(_)) => self.look(every, value, path),
            (None, Value::Bool(true)) => {}
            // An object without described fields is a map of anything.
            (None, _) if schema["x-kubernetes-preserve-unknown-fields"] == true || schema["properties"].is_null() => {}
            (None, _) => self.unknown.push(path.to_owned()),
        }
    }
}

const MOST_QUOTED: usize = 40;

fn mismatch(path: &str, wanted: &str, value: &Value) -> String {
    let wanted_words = match wanted {
        "object" => "fields",
        "array" => "a list",
        "string" => "text",
        "boolean" => "true or false",
        "integer" => "a whole number",
        _ => "a number",
    };
    let (given, hint) = match value {
        Value::Bool(value) => (format!("{value}"), "; put it in quotes if that is not what you wrote"),
        Value::Number(value) => (format!("the number {value}"), "; put it in quotes"),
        // What stands where fields or a list should may be a whole script, with passwords in it.
        Value::String(value) if matches!(wanted, "boolean" | "integer" | "number") && value.len() <= MOST_QUOTED => {
            (format!("the text {value:?}"), "")
        }
        Value::String(_) => ("text".to_owned(), ""),
        Value::Array(_) => ("a list".to_owned(), ""),
        Value::Object(_) => ("an object with fields".to_owned(), ""),
        Value::Null => ("nothing".to_owned(), ""),
    };
    format!("{path} must be {wanted_words}, and it is {given}{}", if wanted == "string" { hint } else { "" })
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
    fn what_fits_is_left_alone() {
        let object = json!({
            "apiVersion": "x/v1", "kind": "A", "metadata": {"name": "a", "uid": "u", "labels": {"a": "b"}},
            "spec": {"template": "t", "cpu": {"cores": 4}, "disks": [{"size": "5Gi", "boot": true}, {"size": null}],
                "free": {"of": ["any"]}, "port": 5, "labels": {"x": "y"}},
        });
        assert_eq!(check(&schema(), &object), Shape::default());
    }

    #[test]
    fn every_wrong_field_is_named_with_what_to_write() {
        let object = json!({
            "metadata": {"name": false, "labels": {"on": true}},
            "spec": {"cpu": {"cores": 1.5}, "disks": [{"size": 5}, {"boot": "yes"}], "labels": ["a"]},
        });
        let expected = [
            "metadata.labels.on must be text, and it is true; put it in quotes if that is not what you wrote",
            "metadata.name must be text, and it is false; put it in quotes if that is not what you wrote",
            "spec.template is missing",
            "spec.cpu.cores must be a whole number, and it is the number 1.5",
            "spec.disks[0].size must be text, and it is the number 5; put it in quotes",
            "spec.disks[1].boot must be true or false, and it is the text \"yes\"",
            "spec.labels must be fields, and it is a list",
        ];
        assert_eq!(check(&schema(), &object).wrong, expected);
        let cores = |cores: u64| check(&schema(), &json!({"spec": {"template": "t", "cpu": {"cores": cores}}})).wrong;
        assert_eq!(cores(0), ["spec.cpu.cores must be at least 1, and it is 0"]);
        assert_eq!(cores(u64::MAX), ["spec.cpu.cores must be at most 64, and it is 18446744073709551615"]);
        assert_eq!(check(&schema(), &json!({"spec": ["small"]})).wrong, ["spec must be fields, and it is a list"]);
    }

    #[test]
    fn long_text_is_not_quoted() {
        let cpu = |text: &str| check(&schema(), &json!({"spec": {"template": "t", "cpu": text}})).wrong;
        assert_eq!(cpu("password: hunter2"), ["spec.cpu must be fields, and it is text"]);
        let long = json!({"spec": {"template": "t", "cpu": {"cores": "x".repeat(100)}}});
        assert_eq!(check(&schema(), &long).wrong, ["spec.cpu.cores must be a whole number, and it is text"]);
    }

    #[test]
    fn fields_that_nobody_knows_are_named() {
        let object =
            json!({"spce": {}, "spec": {"template": "t", "cpu": {"coers": 4}, "free": {"x": 1}, "netwroks": []}});
        let Shape { wrong, unknown } = check(&schema(), &object);
        assert_eq!(
            (wrong, unknown),
            (vec![], vec!["spec.cpu.coers".to_owned(), "spec.netwroks".to_owned(), "spce".to_owned()])
        );
    }
}
