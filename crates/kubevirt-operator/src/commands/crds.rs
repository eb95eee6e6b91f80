//! `kubevirt-operator crds`: the CRDs that a cluster needs before it can have Machines.

use std::process::ExitCode;

use vitivirt_cli::{CommandResult, ObjectFormat, print_objects};

use crate::manifests::to_json;

pub(crate) fn run() -> CommandResult<ExitCode> {
    print_objects(vitivirt_api::machine::crds().iter().map(to_json), ObjectFormat::Yaml)?;
    Ok(ExitCode::SUCCESS)
}
