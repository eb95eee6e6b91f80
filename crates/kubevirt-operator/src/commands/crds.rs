//! `kubevirt-operator crds`: what must be in a cluster before a Machine can be.

use std::process::ExitCode;

use anyhow::Result;
use vitivirt_cli::{print, to_yaml};

use crate::manifests::json;

pub(crate) fn run() -> Result<ExitCode> {
    print(&to_yaml(&vitivirt_api::machine::crds().iter().map(json).collect::<Result<Vec<_>>>()?)?)?;
    Ok(ExitCode::SUCCESS)
}
