//! What a command prints. Whoever reads may stop reading: `render | head` is no error, and a full disk is one.

use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result};
use serde_json::Value;

pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("writing to standard output"))
}

/// Sentences that change nothing of what is printed.
pub fn warn(warnings: &[String]) {
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
}

/// The result of writing, without the complaint that nobody reads any more.
pub fn written(result: Result<()>) -> Result<()> {
    match result {
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe) => {
            Ok(())
        }
        other => other,
    }
}

/// One document after a line of dashes. Many big ones are written one by one: together they take much memory.
pub fn write_yaml(out: &mut impl Write, object: &Value) -> Result<()> {
    writeln!(out, "---\n{}", yaml(object)?).context("writing to standard output")
}

/// Documents, each after a line of dashes but the first.
pub fn to_yaml(documents: &[Value]) -> Result<String> {
    let texts: Vec<String> = documents.iter().map(yaml).collect::<Result<_>>()?;
    Ok(texts.iter().map(|text| format!("{text}\n")).collect::<Vec<_>>().join("---\n"))
}

fn yaml(object: &Value) -> Result<String> {
    let text = serde_saphyr::to_string(object).map_err(|error| anyhow::anyhow!("writing YAML: {error}"))?;
    Ok(text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Takes nothing, for this reason.
    struct Refuses(ErrorKind);

    impl Write for Refuses {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_a_reader_who_left_is_no_error() {
        let to = |kind| written(write_yaml(&mut Refuses(kind), &json!({"a": 1})));
        assert!(to(ErrorKind::BrokenPipe).is_ok());
        assert!(to(ErrorKind::StorageFull).unwrap_err().to_string().contains("standard output"));
    }

    #[test]
    fn documents_stand_after_dashes() {
        assert_eq!(to_yaml(&[json!({"a": 1}), json!({"b": 2})]).unwrap(), "a: 1\n---\nb: 2\n");
        let mut out = Vec::new();
        write_yaml(&mut out, &json!({"a": 1})).unwrap();
        assert_eq!(out, b"---\na: 1\n");
    }
}
