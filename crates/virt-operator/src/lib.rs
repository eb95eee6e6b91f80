//! The program `virt-operator`: its arguments, its wiring and, with the KubeVirt controller, its observe step.
//! What an installation is made of is decided in the crate `install`, every effect is in `runtime`.

mod arguments;
mod commands;
mod run;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Some(Command::Run(options)) => run::run(options),
        Some(Command::Crds) => commands::crds::run(),
        Some(Command::Render(options)) => commands::render::run(&options),
        None => run::run(arguments.run),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
