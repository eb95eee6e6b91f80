//! The program `virt-operator`: its arguments, its wiring and, with the KubeVirt controller, its observe step.
//! What an installation is made of is decided in the crate `install`, every effect is in `runtime`.

mod arguments;
mod cache;
mod certificates;
mod commands;
mod controller;
mod desired;
mod metrics;
mod monitoring;
mod observe;
mod on_demand;
mod router;
mod run;
mod stored_objects;
mod synchronization;
mod webhook;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Some(Command::Run(options)) => operate(options),
        Some(Command::Crds) => commands::crds::run(),
        Some(Command::Manifests(options)) => commands::manifests::run(options),
        Some(Command::Render(options)) => commands::render::run(&options),
        Some(Command::Plan(options)) => commands::plan::run(&options),
        None => operate(arguments.run),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn operate(options: arguments::RunArguments) -> anyhow::Result<ExitCode> {
    if options.dump_install_strategy { commands::dump::run(&options) } else { run::run(options) }
}
