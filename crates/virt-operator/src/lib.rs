//! The program `virt-operator`: its arguments and commands, its caches and event router, the observe step of the
//! KubeVirt controller, the certificates that it issues, and its admission webhooks.
//!
//! The crate `vitivirt-install` decides what an installation consists of and validates KubeVirt resources. The crate
//! `vitivirt-runtime` has what both operators share: watches, the executor, the lease, the reconcile loop. Start
//! reading at `run`.

mod arguments;
mod cache;
mod certificates;
mod commands;
mod controller;
mod desired;
mod lazy_watch;
mod metrics;
mod migration_addresses;
mod monitoring;
mod node_checks;
mod observe;
mod probe;
mod router;
mod run;
mod settings;
mod stored_objects;
mod webhook;

use std::process::ExitCode;

use clap::Parser;
use vitivirt_cli::{CommandResult, OrInvalid, exit_code};

use arguments::{Arguments, Command, RunArguments};

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    exit_code(match arguments.command {
        Some(Command::Run(options)) => run_or_dump(options),
        Some(Command::Crds) => commands::crds::run(),
        Some(Command::Manifests(options)) => commands::manifests::run(options),
        Some(Command::Render(options)) => commands::render::run(&options),
        Some(Command::Plan(options)) => commands::plan::run(&options),
        Some(Command::Completions(options)) => options.run::<Arguments>(),
        None => run_or_dump(arguments.run),
    })
}

/// Every error of the operator exits with status 1, as upstream's do.
fn run_or_dump(options: RunArguments) -> CommandResult<ExitCode> {
    if options.dump_install_strategy {
        commands::dump::run(options).or_invalid()
    } else {
        run::run(options).or_invalid()
    }
}
