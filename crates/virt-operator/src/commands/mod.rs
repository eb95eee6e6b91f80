//! Commands that look, print and end; all but `plan` and the dump without a cluster.

pub(crate) mod cluster;
pub(crate) mod crds;
pub(crate) mod dump;
pub(crate) mod manifests;
pub(crate) mod plan;
pub(crate) mod render;

use std::io::{self, Write};

use anyhow::{Context, Result};
use serde_json::Value;

/// One YAML document. They are written one by one, because all definitions together are big.
fn document(out: &mut impl Write, object: &Value) -> Result<()> {
    let text = serde_saphyr::to_string(object).map_err(|error| anyhow::anyhow!("writing YAML: {error}"))?;
    writeln!(out, "---\n{}", text.trim_end()).context("writing to standard output")
}

/// Whoever reads may stop reading: `render | head` is no error.
fn finish(result: Result<()>) -> Result<()> {
    match result {
        Err(error)
            if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) =>
        {
            Ok(())
        }
        other => other,
    }
}
