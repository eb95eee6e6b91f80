//! The program `kubevirt-operator`: its arguments, its wiring and the observe steps of its controllers.
//! What a Machine becomes is decided in the crate `machine`, every effect that both operators share is in `runtime`.

mod arguments;
mod cache;
mod commands;
mod controller;
mod index;
mod live_check;
pub mod manifests;
mod metrics;
mod network_controller;
mod observe;
pub mod rbac;
mod router;
mod run;
mod source_secrets;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Some(Command::Run(options)) => run::run(options),
        Some(Command::Crds) => commands::crds::run(),
        Some(Command::Render(options)) => commands::render::run(&options),
        Some(Command::Plan(options)) => commands::plan::run(&options),
        None => run::run(arguments.run),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
