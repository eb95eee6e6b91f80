//! Files to objects.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::shape::{Shape, check};

/// One object of a file.
#[derive(Clone, Debug)]
pub struct Document {
    /// Where it stands, for people.
    origin: String,
    pub object: Value,
}

/// The objects of all files in their order, those of a `List` one by one; `-` is standard input.
pub fn read(files: &[PathBuf]) -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    for file in files {
        let (origin, text) = match file.as_path() == Path::new("-") {
            true => ("standard input".to_owned(), std::io::read_to_string(std::io::stdin())),
            false => (file.display().to_string(), std::fs::read_to_string(file)),
        };
        let text = text.with_context(|| format!("reading {origin}"))?;
        documents.extend(parse(&origin, &text)?);
    }
    Ok(documents)
}

/// The objects of a text that came from somewhere.
pub fn parse(origin: &str, text: &str) -> Result<Vec<Document>> {
    let values: Vec<Value> = match serde_saphyr::from_multiple(text) {
        Ok(values) => values,
        // The rest of that sentence is for programmers.
        Err(error) => bail!(
            "{origin} is not YAML: {}",
            error.to_string().replace(", set DuplicateKeyPolicy in Options if acceptable", "")
        ),
    };
    let mut documents = Vec::new();
    for (index, value) in values.into_iter().filter(|value| !value.is_null()).enumerate() {
        flatten(format!("{origin}, document {}", index + 1), value, &mut documents)?;
    }
    Ok(documents)
}

fn flatten(origin: String, mut object: Value, into: &mut Vec<Document>) -> Result<()> {
    if !object.is_object() {
        bail!("{origin} is not a Kubernetes object: it has no fields");
    }
    let is_list = object.get("kind").and_then(Value::as_str).is_some_and(|kind| kind.ends_with("List"));
    match object.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) if is_list => {
            for (index, item) in items.into_iter().enumerate() {
                flatten(format!("{origin}, items[{index}]"), item, into)?;
            }
        }
        taken => {
            if let (Some(place), Some(items)) = (object.get_mut("items"), taken) {
                *place = items;
            }
            into.push(Document { origin, object });
        }
    }
    Ok(())
}

impl Document {
    fn text(&self, pointer: &str) -> &str {
        self.object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn kind(&self) -> &str {
        self.text("/kind")
    }

    pub fn api_version(&self) -> &str {
        self.text("/apiVersion")
    }

    /// Typed, if it is what it says: of this version, in the shape of the schema. What the schema does not know is
    /// returned as sentences: a cluster would drop it without a word.
    pub fn typed<T: DeserializeOwned>(&self, api_version: &str, schema: &Value) -> Result<(T, Vec<String>)> {
        if self.api_version() != api_version {
            bail!("{self} is of apiVersion {:?}; {api_version} is understood", self.api_version());
        }
        let Shape { wrong, unknown } = check(schema, &self.object);
        if !wrong.is_empty() {
            bail!("{self}: {}", wrong.join("; "));
        }
        let typed = T::deserialize(&self.object).with_context(|| format!("{self} cannot be read"))?;
        let warn = |path: &String| format!("{self}: there is no field {path}; a cluster would drop it");
        Ok((typed, unknown.iter().map(warn).collect()))
    }

    /// Typed, without a word of what is in it: an error could quote a Secret.
    pub fn secret<T: DeserializeOwned>(&self) -> Result<T> {
        let Ok(typed) = T::deserialize(&self.object) else {
            bail!("{self} cannot be read: it is not in the form of a {}", self.kind())
        };
        Ok(typed)
    }
}

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { origin, .. } = self;
        match (self.kind(), self.text("/metadata/namespace"), self.text("/metadata/name")) {
            ("", ..) => f.write_str(origin),
            (kind, _, "") => write!(f, "{kind} ({origin})"),
            (kind, "", name) => write!(f, "{kind} {name} ({origin})"),
            (kind, namespace, name) => write!(f, "{kind} {namespace}/{name} ({origin})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn names(text: &str) -> Vec<String> {
        parse("file", text).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn lists_are_read_one_by_one_and_empty_documents_left_out() {
        let text = "
---
kind: A
metadata: {name: a}
---
---
kind: List
items:
- {kind: B, metadata: {name: b, namespace: ns}}
- {kind: CList, items: [{kind: C}]}
---
kind: Menu
items: [1]
";
        let expected = [
            "A a (file, document 1)",
            "B ns/b (file, document 2, items[0])",
            "C (file, document 2, items[1], items[0])",
            "Menu (file, document 3)",
        ];
        assert_eq!(names(text), expected);
        assert_eq!(parse("file", text).unwrap().last().unwrap().object["items"], json!([1]));
    }

    #[test]
    fn what_is_no_object_is_told_with_its_place() {
        for (text, expected) in [
            ("{", "file is not YAML"),
            ("just words", "file, document 1 is not a Kubernetes object"),
            ("{kind: List, items: [5]}", "file, document 1, items[0] is not"),
            ("{a: 1, a: 2}", "duplicate mapping key: a\n"),
        ] {
            let error = format!("{:#}", parse("file", text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        assert!(format!("{:#}", read(&["/no/such/file".into()]).unwrap_err()).contains("/no/such/file"));
    }

    #[test]
    fn an_object_of_another_version_is_not_taken() {
        let schema = json!({"type": "object", "properties": {"spec": {"type": "object"}}});
        let document = Document { origin: "file".to_owned(), object: json!({"apiVersion": "x/v2", "kind": "A"}) };
        let error = document.typed::<Value>("x/v1", &schema).unwrap_err().to_string();
        assert_eq!(error, "A (file) is of apiVersion \"x/v2\"; x/v1 is understood");
        assert!(document.typed::<Value>("x/v2", &schema).is_ok());
    }
}
