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
mod repairs;
mod router;
mod run;
mod source_secrets;
mod status_page;
#[cfg(test)]
mod test_server;

/// What `kubectl vmachine` shares with this program.
pub mod plugin {
    pub use crate::commands::{
        describe::{Description, describe},
        plan::{PlanArguments, run as plan},
    };
}

use std::process::ExitCode;

use clap::Parser;
use vitivirt_cli::{OrInvalid, exit_code};

use arguments::{Arguments, Command};
pub use metrics::metric_samples;

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    exit_code(match arguments.command {
        Some(Command::Run(options)) => run::run(*options).or_invalid(),
        Some(Command::Crds) => commands::crds::run(),
        Some(Command::Render(options)) => commands::render::run(&options),
        Some(Command::Plan(options)) => commands::plan::run(&options),
        Some(Command::Check(options)) => commands::check::run(&options),
        Some(Command::Completions(options)) => options.run::<Arguments>(),
        None => run::run(arguments.run).or_invalid(),
    })
}
