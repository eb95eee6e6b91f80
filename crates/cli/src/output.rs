//! What a command prints. A reader that stops reading, as in `render | head`, is not an error; a full disk is one.

use std::io::{self, ErrorKind, Write};

use anstream::{AutoStream, ColorChoice};
use anyhow::{Context, Result};
use clap::ValueEnum;
use serde_json::Value;

/// How a command prints Kubernetes objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ObjectFormat {
    /// One document per object
    #[default]
    Yaml,
    /// One v1 List
    Json,
}

const LIST_BEGIN: &str = "{\n  \"apiVersion\": \"v1\",\n  \"kind\": \"List\",\n  \"items\": [";
const LIST_END: &str = "]\n}\n";

/// Prints text to standard output as it is.
pub fn print(text: &str) -> Result<()> {
    print_styled(text, ColorChoice::AlwaysAnsi)
}

/// Prints text with ANSI escape codes, which the choice keeps or removes.
pub(crate) fn print_styled(text: &str, choice: ColorChoice) -> Result<()> {
    let mut out = AutoStream::new(io::stdout().lock(), choice);
    ignore_broken_pipe(out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("writing to standard output"))
}

/// Prints warnings to standard error. They do not change what is printed to standard output.
pub fn print_warnings(warnings: &[String]) {
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
}

/// The result of writing, without the error of a reader that closed the pipe.
pub fn ignore_broken_pipe(result: Result<()>) -> Result<()> {
    match result {
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe) => {
            Ok(())
        }
        other => other,
    }
}

/// Prints objects to standard output.
pub fn print_objects(objects: impl IntoIterator<Item = Result<Value>>, format: ObjectFormat) -> Result<()> {
    ignore_broken_pipe(write_objects(&mut io::stdout().lock(), objects, format))
}

/// Writes objects one at a time: hundreds of them need much memory together.
pub fn write_objects(
    out: &mut impl Write,
    objects: impl IntoIterator<Item = Result<Value>>,
    format: ObjectFormat,
) -> Result<()> {
    let mut write = |text: &str| out.write_all(text.as_bytes()).context("writing to standard output");
    if format == ObjectFormat::Json {
        write(LIST_BEGIN)?;
    }
    let mut is_empty = true;
    for object in objects {
        let object = object?;
        match format {
            ObjectFormat::Yaml => {
                write(if is_empty { "" } else { "---\n" })?;
                write(&yaml(&object)?)?;
                write("\n")?;
            }
            ObjectFormat::Json => {
                write(if is_empty { "\n    " } else { ",\n    " })?;
                // A JSON string has no raw newline, so only the layout is indented.
                write(&serde_json::to_string_pretty(&object)?.replace('\n', "\n    "))?;
            }
        }
        is_empty = false;
    }
    if format == ObjectFormat::Json {
        write(if is_empty { "" } else { "\n  " })?;
        write(LIST_END)?;
    }
    out.flush().context("writing to standard output")
}

/// Documents, separated by lines of dashes.
pub fn to_yaml(documents: &[Value]) -> Result<String> {
    let mut text = Vec::new();
    write_objects(&mut text, documents.iter().cloned().map(Ok), ObjectFormat::Yaml)?;
    Ok(String::from_utf8(text)?)
}

pub(crate) fn yaml(value: &impl serde::Serialize) -> Result<String> {
    let text = serde_saphyr::to_string(value).map_err(|error| anyhow::anyhow!("writing YAML: {error}"))?;
    Ok(text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A writer whose every write fails.
    struct FailingWriter(ErrorKind);

    impl Write for FailingWriter {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(objects: &[Value], format: ObjectFormat) -> String {
        let mut out = Vec::new();
        write_objects(&mut out, objects.iter().cloned().map(Ok), format).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_closed_pipe_is_not_an_error_and_a_full_disk_is() {
        for format in [ObjectFormat::Yaml, ObjectFormat::Json] {
            let to = |kind| ignore_broken_pipe(write_objects(&mut FailingWriter(kind), [Ok(json!({"a": 1}))], format));
            assert!(to(ErrorKind::BrokenPipe).is_ok());
            assert!(to(ErrorKind::StorageFull).unwrap_err().to_string().contains("standard output"));
        }
    }

    #[test]
    fn yaml_documents_are_separated_by_dashes() {
        let objects = [json!({"a": 1}), json!({"b": 2})];
        assert_eq!(written(&objects, ObjectFormat::Yaml), "a: 1\n---\nb: 2\n");
        assert_eq!(to_yaml(&objects).unwrap(), "a: 1\n---\nb: 2\n");
        assert_eq!(written(&[], ObjectFormat::Yaml), "");
    }

    #[test]
    fn json_objects_are_the_items_of_a_list() {
        for objects in [vec![], vec![json!({"a": "x\ny"})], vec![json!({"a": {"b": 1}}), json!({"c": []})]] {
            let text = written(&objects, ObjectFormat::Json);
            let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), list, "{text}");
            // Indented as serde_json indents the whole list; only the order of the keys differs.
            assert_eq!(text.lines().count(), serde_json::to_string_pretty(&list).unwrap().lines().count(), "{text}");
        }
    }
}
