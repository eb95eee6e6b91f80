//! `console`, `ssh` and `vnc`: virtctl does the work, because its protocol belongs to the KubeVirt release.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::anyhow;
use vitivirt_api::KUBEVIRT_RELEASE;
use vitivirt_cli::{CommandError, CommandResult};

use crate::arguments::VirtctlOptions;

/// virtctl itself, and virtctl as krew installs it.
const PROGRAMS: [&str; 2] = ["virtctl", "kubectl-virt"];

/// Replaces this process by virtctl. Returns only after an error.
pub(crate) fn run(command: &str, target: &str, options: &VirtctlOptions) -> CommandResult<ExitCode> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let Some(virtctl) = find(&path) else {
        return Err(CommandError::Failed(anyhow!(
            "virtctl not found in PATH; install it with `kubectl krew install virt`, or from \
             https://github.com/kubevirt/kubevirt/releases/tag/{KUBEVIRT_RELEASE}"
        )));
    };
    let error = Command::new(&virtctl).args(virtctl_arguments(command, target, options)).exec();
    Err(CommandError::Failed(anyhow!("cannot run {}: {error}", virtctl.display())))
}

fn find(path: &std::ffi::OsStr) -> Option<PathBuf> {
    let candidates = PROGRAMS.iter().flat_map(|name| std::env::split_paths(path).map(move |folder| folder.join(name)));
    candidates.into_iter().find(|file: &PathBuf| Path::is_file(file))
}

/// The target of `virtctl ssh` for NAME or USER@NAME. A VirtualMachine has the name of its Machine.
pub(crate) fn ssh_target(given: &str) -> String {
    match given.rsplit_once('@') {
        Some((user, name)) => format!("{user}@vm/{name}"),
        None => format!("vm/{given}"),
    }
}

fn virtctl_arguments(command: &str, target: &str, options: &VirtctlOptions) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec![command.into(), target.into()];
    let namespace = &options.namespace;
    arguments.extend(namespace.namespace.iter().map(|name| format!("--namespace={name}").into()));
    arguments.extend(namespace.cluster.context.iter().map(|name| format!("--context={name}").into()));
    if let Some(file) = &namespace.cluster.kubeconfig {
        arguments.extend([OsString::from("--kubeconfig"), file.into()]);
    }
    arguments.extend(options.arguments.iter().map(OsString::from));
    arguments
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::{Arguments, Command};

    #[test]
    fn virtctl_gets_the_target_the_cluster_and_further_arguments() {
        let arguments = |words: &[&str]| {
            let parsed = Arguments::try_parse_from([&["kubectl-vmachine"], words].concat()).unwrap();
            let (command, target, options) = match parsed.command {
                Command::Console(given) => ("console", given.name, given.options),
                Command::Ssh(given) => ("ssh", ssh_target(&given.target), given.options),
                other => panic!("{other:?}"),
            };
            let words = virtctl_arguments(command, &target, &options).into_iter();
            words.map(|word| word.into_string().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(arguments(&["console", "web"]), ["console", "web"]);
        assert_eq!(arguments(&["ssh", "root@web", "-n", "shop"]), ["ssh", "root@vm/web", "--namespace=shop"]);
        let words = ["ssh", "web", "--context", "c", "--kubeconfig", "f", "--", "-i", "key"];
        assert_eq!(arguments(&words), ["ssh", "vm/web", "--context=c", "--kubeconfig", "f", "-i", "key"]);
    }
}
