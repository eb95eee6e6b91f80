//! The project's own commands. `cargo xtask --help` lists them.

#![expect(clippy::disallowed_methods, reason = "these commands measure and drive real programs in real time")]

mod bench;
mod chaos;
mod demo;
mod generate;
mod generate_release;
mod lab_commands;
mod machine_operator;
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
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Show it working: a cluster, KubeVirt and kubevirt-operator in it, and one Machine that reaches Running.
    Demo,
    /// Run every check: format, lints, generated files, unit tests, and the tests on the lab.
    Test(test::Options),
    /// Run a cluster to play with, and use it.
    #[command(subcommand)]
    Lab(lab_commands::LabCommand),
    /// Install KubeVirt with our virt-operator and with KubeVirt's own, and compare every object of both clusters.
    Parity(parity::Options),
    /// Measure. Raw results are kept under target/bench.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Long campaigns that break things at random and check that nothing is lost.
    #[command(subcommand)]
    Chaos(chaos::Chaos),
    /// Write the files that are made from code, or check that they are up to date.
    Generate(generate::Options),
}

fn main() -> ExitCode {
    if let Err(error) = vitivirt_lab::isolate::begin() {
        return fail(&error);
    }
    match Arguments::parse().command {
        Task::Demo => demo::run(),
        Task::Test(options) => finish(test::run(&options)),
        Task::Lab(command) => lab_commands::run(command),
        Task::Parity(options) => parity::run(&options),
        Task::Bench(bench) => bench::run(&bench),
        Task::Chaos(chaos) => chaos::run(&chaos),
        Task::Generate(options) => finish(generate::run(&options)),
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
