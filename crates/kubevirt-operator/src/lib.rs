//! The program `kubevirt-operator`: its arguments, its wiring and, with the Machine controller, its observe step.
//! What a Machine becomes is decided in the crate `machine`, every effect is in `runtime`.

mod arguments;
mod run;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Some(Command::Run(options)) => run::run(options),
        None => run::run(arguments.run),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
