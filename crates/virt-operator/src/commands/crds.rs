//! `virt-operator crds`: the CRD of the KubeVirt resource, which must exist before the operator runs.

use std::process::ExitCode;

use vitivirt_cli::{CommandResult, ObjectFormat, print_objects};

pub(crate) fn run() -> CommandResult<ExitCode> {
    let crd = vitivirt_install::crds::KUBEVIRT.object().map_err(anyhow::Error::from);
    print_objects([crd], ObjectFormat::Yaml)?;
    Ok(ExitCode::SUCCESS)
}
