//! The program `virt-operator`: its arguments and commands, its caches and event router, the observe step of the
//! KubeVirt controller, the certificates that it issues, and its admission webhooks.
//!
//! The crate `vitivirt-install` decides what an installation consists of and validates KubeVirt resources. The crate
//! `vitivirt-runtime` has what both operators share: watches, the executor, the lease, the reconcile loop. Start
//! reading at `run`.

mod arguments;
mod cache;
mod certificate_controller;
mod certificates;
mod commands;
mod controller;
mod crd_reader;
mod desired;
mod lanes;
mod last_reports;
mod lazy_watch;
mod metrics;
mod migration_addresses;
mod monitoring;
mod node_checks;
mod node_count;
mod observe;
mod probe;
mod removal;
mod revisions;
mod router;
mod run;
mod settings;
mod status_page;
mod storage_pages;
mod stored_objects;
mod webhook;
mod workloads;

use std::{
    collections::BTreeMap,
    os::unix::process::CommandExt,
    process::{self, ExitCode},
};

use anyhow::{Context, Result};
use clap::Parser;
use vitivirt_cli::{CommandResult, OrInvalid, exit_code};
use vitivirt_install::Environment;

use arguments::{Arguments, Command, RunArguments};
pub use metrics::metric_samples;

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    exit_code(match arguments.command {
        Some(Command::Run(options)) => run_or_dump(options),
        Some(Command::Crds) => commands::crds::run(),
        Some(Command::Manifests(options)) => commands::manifests::run(options),
        Some(Command::Render(options)) => commands::render::run(&options),
        Some(Command::Plan(options)) => commands::plan::run(&options),
        Some(Command::Check(options)) => commands::check::run(&options),
        Some(Command::Images(options)) => commands::images::run(&options),
        Some(Command::Uninstall(options)) => commands::uninstall::run(&options),
        Some(Command::Completions(options)) => options.run::<Arguments>(),
        None => run_or_dump(arguments.run),
    })
}

/// Every error of the operator exits with status 1, as upstream's do.
fn run_or_dump(options: RunArguments) -> CommandResult<ExitCode> {
    apply_passed_on_variables().or_invalid()?;
    if options.dump_install_strategy {
        commands::dump::run(options).or_invalid()
    } else {
        run::run(options).or_invalid()
    }
}

/// Sets the variables that `KV_IO_EXTRA_ENV_*` passes on to every component for this process too, as upstream does. A
/// process cannot change its environment safely once it has threads, so it executes itself again.
fn apply_passed_on_variables() -> Result<()> {
    let environment = Environment::from_variables(std::env::vars());
    let missing = missing_variables(environment.passed_on, |name| std::env::var(name).ok());
    if missing.is_empty() {
        return Ok(());
    }
    let program = std::env::current_exe().context("cannot apply KV_IO_EXTRA_ENV_*")?;
    let mut arguments = std::env::args_os();
    let mut command = process::Command::new(program);
    command.arg0(arguments.next().unwrap_or_default()).args(arguments).envs(missing);
    // It returns only if it fails.
    Err(command.exec()).context("cannot apply KV_IO_EXTRA_ENV_*")
}

fn missing_variables(
    mut passed_on: BTreeMap<String, String>,
    variable: impl Fn(&str) -> Option<String>,
) -> BTreeMap<String, String> {
    passed_on.retain(|name, value| !name.is_empty() && variable(name).as_ref() != Some(value));
    passed_on
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the program would execute itself forever.
    #[test]
    fn variables_that_are_set_and_names_that_cannot_be_set_are_not_missing() {
        let variables = [("", "x"), ("SET", "1"), ("OTHER", "new"), ("UNSET", "")];
        let passed_on = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let missing = missing_variables(BTreeMap::from(passed_on), |name| match name {
            "SET" => Some("1".to_owned()),
            "OTHER" => Some("old".to_owned()),
            _ => None,
        });
        assert_eq!(missing.into_keys().collect::<Vec<_>>(), ["OTHER", "UNSET"]);
    }
}
