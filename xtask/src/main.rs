//! The project's own commands. `cargo xtask --help` lists them.

mod bench;
mod chaos;
mod demo;
mod generate;
mod generate_release;
mod kubevirt_operator;
mod lab_commands;
mod parity;
mod programs;
mod terminal;
mod test;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// The project's own commands: see it work, test it, measure it, and run a cluster to play with.
///
/// Everything that needs a cluster runs in "the lab": a real Kubernetes and KubeVirt control plane on this machine, in a
/// network of its own, built from Go modules on first use (about 8 minutes, once). Needs Linux, Rust and Go.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct XtaskArguments {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
    /// Show it working: a cluster, KubeVirt and kubevirt-operator in it, and one Machine that reaches Running.
    Demo,
    /// Run every check: format, lints, generated files, unit tests, and the tests on the lab.
    Test(test::TestOptions),
    /// Run a cluster to play with, and use it.
    #[command(subcommand)]
    Lab(lab_commands::LabCommand),
    /// Install KubeVirt with our virt-operator and with KubeVirt's own, and compare every object of both clusters.
    Parity(parity::ParityOptions),
    /// Measure. Raw results are kept under target/bench.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Long campaigns that break things at random and check that nothing is lost.
    #[command(subcommand)]
    Chaos(chaos::ChaosCommand),
    /// Write the files that are made from code, or check that they are up to date.
    Generate(generate::GenerateOptions),
}

fn main() -> ExitCode {
    if let Err(error) = vitivirt_lab::isolate::begin() {
        return fail(&error);
    }
    match XtaskArguments::parse().command {
        XtaskCommand::Demo => demo::run(),
        XtaskCommand::Test(options) => finish(test::run(&options)),
        XtaskCommand::Lab(command) => lab_commands::run(command),
        XtaskCommand::Parity(options) => parity::run(&options),
        XtaskCommand::Bench(bench) => bench::run(&bench),
        XtaskCommand::Chaos(chaos) => chaos::run(&chaos),
        XtaskCommand::Generate(options) => finish(generate::run(&options)),
    }
}

fn finish(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}
