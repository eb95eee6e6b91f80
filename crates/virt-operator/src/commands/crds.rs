//! `virt-operator crds`: the definition of the KubeVirt resource, which must exist before the operator runs.

use std::io;
use std::process::ExitCode;

use anyhow::Result;
use vitivirt_cli::{write_yaml, written};

pub(crate) fn run() -> Result<ExitCode> {
    let crd = vitivirt_install::crds::KUBEVIRT.object()?;
    written(write_yaml(&mut io::stdout().lock(), &crd))?;
    Ok(ExitCode::SUCCESS)
}
