//! `virt-operator crds`: the definition of the KubeVirt resource, which must exist before the operator runs.

use std::io;
use std::process::ExitCode;

use anyhow::Result;

use super::{document, finish};

pub(crate) fn run() -> Result<ExitCode> {
    let definition = install::crds::KUBEVIRT.object()?;
    finish(document(&mut io::stdout().lock(), &definition))?;
    Ok(ExitCode::SUCCESS)
}
