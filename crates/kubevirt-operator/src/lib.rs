//! The program `kubevirt-operator`: its arguments and commands, its caches and event router, the observe step of its
//! controllers, its metrics and its permissions.
//!
//! The crate `vitivirt-machine` decides what objects a Machine needs. The crate `vitivirt-runtime` has what both
//! operators share: watches, the executor, the lease, the reconcile loop. Start reading at `run`.

mod arguments;
mod cache;
mod commands;
mod controller;
mod crd_guard;
mod index;
mod launcher;
mod live_check;
mod mac_addresses;
pub mod manifests;
mod metrics;
mod network_controller;
mod observe;
pub mod policies;
pub mod rbac;
mod router;
mod run;
mod source_secrets;

use std::process::ExitCode;

use clap::Parser;
use vitivirt_cli::{OrInvalid, exit_code};

use arguments::{Arguments, Command};

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    exit_code(match arguments.command {
        Some(Command::Run(options)) => run::run(options).or_invalid(),
        Some(Command::Crds) => commands::crds::run(),
        Some(Command::Render(options)) => commands::render::run(&options),
        Some(Command::Plan(options)) => commands::plan::run(&options),
        Some(Command::Completions(options)) => options.run::<Arguments>(),
        None => run::run(arguments.run).or_invalid(),
    })
}
