//! Reads files of Kubernetes objects.

use std::{
    ffi::OsStr,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    command_error::{CommandError, CommandResult, OrInvalid},
    schema_check::check_schema,
};

/// One object of a file.
#[derive(Clone, Debug)]
pub struct Document {
    /// The file, and the object's place in it.
    origin: String,
    pub object: Value,
}

/// The extensions of the files that are read from a folder, as by kubectl.
const EXTENSIONS: [&str; 3] = ["json", "yaml", "yml"];

/// The objects of all files in their order, those of a `List` one by one; `-` is standard input. A folder stands for the
/// files directly in it, by name.
pub fn read_manifests(files: &[PathBuf]) -> CommandResult<Vec<Document>> {
    let mut documents = Vec::new();
    for path in files {
        for file in if path.is_dir() { files_of(path)? } else { vec![path.clone()] } {
            documents.extend(read_file(&file)?);
        }
    }
    Ok(documents)
}

fn files_of(folder: &Path) -> CommandResult<Vec<PathBuf>> {
    let shown = folder.display();
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let paths = entries.with_context(|| format!("cannot read {shown}"))?.into_iter().map(|entry| entry.path());
    let is_manifest = |path: &PathBuf| {
        let extension = path.extension().and_then(OsStr::to_str);
        extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) && path.is_file()
    };
    let mut files: Vec<PathBuf> = paths.filter(is_manifest).collect();
    files.sort();
    if files.is_empty() {
        return Err(CommandError::Invalid(anyhow!("{shown}: no file with the extension {}", EXTENSIONS.join(", "))));
    }
    Ok(files)
}

fn read_file(file: &Path) -> CommandResult<Vec<Document>> {
    let (origin, text) = if file == Path::new("-") {
        ("standard input".to_owned(), io::read_to_string(io::stdin()))
    } else {
        (file.display().to_string(), fs::read_to_string(file))
    };
    let text = text.with_context(|| format!("cannot read {origin}"))?;
    parse_manifests(&origin, &text).or_invalid()
}

/// The objects of a text. `origin` names it in errors.
pub fn parse_manifests(origin: &str, text: &str) -> Result<Vec<Document>> {
    let values: Vec<Value> = match serde_saphyr::from_multiple(text) {
        Ok(values) => values,
        Err(error) => bail!("{origin}: invalid YAML: {}", yaml_error(&error.to_string())),
    };
    let values: Vec<Value> = values.into_iter().filter(|value| !value.is_null()).collect();
    let is_only = values.len() == 1;
    let mut documents = Vec::new();
    for (index, value) in values.into_iter().enumerate() {
        let origin = if is_only { origin.to_owned() } else { format!("{origin}, document {}", index + 1) };
        flatten(origin, value, &mut documents)?;
    }
    Ok(documents)
}

/// The cause and its position. The parser's message continues with an excerpt of the file, and may name an option of the
/// parser, which a user cannot set.
fn yaml_error(message: &str) -> String {
    let first = message.lines().next().unwrap_or_default();
    first.trim_start_matches("error: ").replace(", set DuplicateKeyPolicy in Options if acceptable", "")
}

fn flatten(origin: String, mut object: Value, into: &mut Vec<Document>) -> Result<()> {
    if !object.is_object() {
        bail!("{origin}: not a Kubernetes object: must be a mapping with apiVersion, kind and metadata");
    }
    let is_list = object.get("kind").and_then(Value::as_str).is_some_and(|kind| kind.ends_with("List"));
    match object.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) if is_list => {
            for (index, item) in items.into_iter().enumerate() {
                flatten(format!("{origin}, items[{index}]"), item, into)?;
            }
        }
        other => {
            if let (Some(field), Some(items)) = (object.get_mut("items"), other) {
                *field = items;
            }
            into.push(Document { origin, object });
        }
    }
    Ok(())
}

impl Document {
    fn string_at(&self, pointer: &str) -> &str {
        self.object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn kind(&self) -> &str {
        self.string_at("/kind")
    }

    pub fn api_version(&self) -> &str {
        self.string_at("/apiVersion")
    }

    /// The object as a type, if it has this apiVersion and matches the schema.
    pub fn typed<T: DeserializeOwned>(&self, api_version: &str, schema: &Value) -> Result<T> {
        if self.api_version() != api_version {
            bail!("{self}: apiVersion: unsupported value {:?}; supported values: {api_version}", self.api_version());
        }
        let errors = check_schema(schema, &self.object);
        if !errors.is_empty() {
            bail!("{self}: {}", errors.join("; "));
        }
        T::deserialize(&self.object).with_context(|| format!("{self}: invalid object"))
    }

    /// The object as a type. The error never quotes its content, which can be a Secret's.
    pub fn typed_secret<T: DeserializeOwned>(&self) -> Result<T> {
        let Ok(typed) = T::deserialize(&self.object) else { bail!("{self}: invalid {}", self.kind()) };
        Ok(typed)
    }
}

/// `file.yaml, document 2: Machine ns/web`, the beginning of every message about the object.
impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { origin, .. } = self;
        match (self.kind(), self.string_at("/metadata/namespace"), self.string_at("/metadata/name")) {
            ("", ..) => f.write_str(origin),
            (kind, _, "") => write!(f, "{origin}: {kind}"),
            (kind, "", name) => write!(f, "{origin}: {kind} {name}"),
            (kind, namespace, name) => write!(f, "{origin}: {kind} {namespace}/{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn names(text: &str) -> Vec<String> {
        parse_manifests("file", text).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn lists_are_read_item_by_item_and_empty_documents_are_ignored() {
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
            "file, document 1: A a",
            "file, document 2, items[0]: B ns/b",
            "file, document 2, items[1], items[0]: C",
            "file, document 3: Menu",
        ];
        assert_eq!(names(text), expected);
        assert_eq!(parse_manifests("file", text).unwrap().last().unwrap().object["items"], json!([1]));
    }

    #[test]
    fn an_error_names_the_file_and_the_place_in_it() {
        for (text, expected) in [
            ("{", "file: invalid YAML: line 1 column 1: "),
            ("just words", "file: not a Kubernetes object"),
            ("{kind: List, items: [5]}", "file, items[0]: not a Kubernetes object"),
            ("{a: 1}\n---\n5", "file, document 2: not a Kubernetes object"),
            ("{a: 1, a: 2}", "file: invalid YAML: line 1 column 8: duplicate mapping key: a"),
        ] {
            let error = format!("{:#}", parse_manifests("file", text).unwrap_err());
            assert!(error.starts_with(expected), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
            assert!(!error.contains("DuplicateKeyPolicy"), "{error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_exits_with_2_and_one_that_is_invalid_with_1() {
        let error = read_manifests(&["/no/such/file".into()]).unwrap_err();
        assert_eq!(error.exit_status(), 2);
        assert!(format!("{:#}", error.error()).contains("cannot read /no/such/file"), "{error:?}");
        let error = read_manifests(&[concat!(env!("CARGO_MANIFEST_DIR"), "/src/lib.rs").into()]).unwrap_err();
        assert_eq!(error.exit_status(), 1);
    }

    #[test]
    fn a_folder_stands_for_the_manifests_in_it() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples"));
        let documents = read_manifests(&[folder.to_owned()]).unwrap();
        let origins: Vec<&str> = documents.iter().map(|document| document.origin.as_str()).collect();
        assert!(origins.len() > 5 && origins.is_sorted(), "{origins:?}");
        let error = read_manifests(&[concat!(env!("CARGO_MANIFEST_DIR"), "/src").into()]).unwrap_err();
        assert_eq!(error.exit_status(), 1);
        assert!(error.error().to_string().ends_with("/src: no file with the extension json, yaml, yml"), "{error:?}");
    }

    #[test]
    fn another_api_version_is_an_error() {
        let schema = json!({"type": "object", "properties": {"spec": {"type": "object"}}});
        let document = Document { origin: "file".to_owned(), object: json!({"apiVersion": "x/v2", "kind": "A"}) };
        let error = document.typed::<Value>("x/v1", &schema).unwrap_err().to_string();
        assert_eq!(error, "file: A: apiVersion: unsupported value \"x/v2\"; supported values: x/v1");
        assert!(document.typed::<Value>("x/v2", &schema).is_ok());
    }
}
