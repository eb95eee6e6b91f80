//! `kubectl vmachine`: Machines from the command line, with the permissions of the user. The tree of `describe` is that of
//! the operator's status page, and `plan` is the one of kubevirt-operator.

mod adopt;
mod arguments;
mod cluster;
mod complete;
mod debug_info;
mod machines;
mod power;
mod redact;
mod virtctl;

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use vitivirt_cli::{CommandResult, exit_code};

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    if let Some(words) = complete::requested(std::env::args_os()) {
        return exit_code(block_on(complete::run(&words)));
    }
    exit_code(run(Arguments::parse().command))
}

fn run(command: Command) -> CommandResult<ExitCode> {
    match command {
        Command::List(options) => block_on(machines::list(&options)),
        Command::Describe(options) => block_on(machines::describe(&options)),
        Command::Start(options) => block_on(power::set(&options, "Running")),
        Command::Stop(options) => block_on(power::set(&options, "Stopped")),
        Command::Restart(options) => block_on(power::restart(&options)),
        Command::Console(given) => virtctl::run("console", &given.name, &given.options),
        Command::Ssh(given) => virtctl::run("ssh", &virtctl::ssh_target(&given.target), &given.options),
        Command::Vnc(given) => virtctl::run("vnc", &given.name, &given.options),
        Command::Plan(options) => kubevirt_operator::plugin::plan(&options),
        Command::Adopt(options) => block_on(adopt::run(&options)),
        Command::CollectDebugInfo(options) => block_on(debug_info::run(&options)),
        Command::Completions(options) => options.run::<Arguments>(),
    }
}

fn block_on(command: impl Future<Output = CommandResult<ExitCode>>) -> CommandResult<ExitCode> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    tokio.block_on(command)
}
