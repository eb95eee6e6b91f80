//! Development commands of the project. `cargo xtask --help` lists them.
//!
//! This file parses the command line. Each command has its own module: `demo`, `test`, `lab_commands` (with `lab_page`), `parity`, `e2e`,
//! `bench`, `chaos`, `image`, `generate` (with `charts` and `monitoring`) and `generate_release`. They share `programs`
//! (builds the operators), `shipped` (builds those of the image), `kubevirt_operator` (runs one of them in a lab) and
//! `terminal` (output). `text_checks` contains only tests.

#![expect(clippy::disallowed_methods, reason = "these commands measure and drive real programs in real time")]

mod bench;
mod chaos;
mod charts;
mod demo;
mod e2e;
mod generate;
mod generate_release;
mod image;
mod kubevirt_operator;
mod lab_commands;
mod lab_page;
mod monitoring;
mod parity;
mod programs;
mod reference;
mod shipped;
mod terminal;
mod test;
#[cfg(test)]
mod text_checks;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Development commands: demo, tests, benchmarks, and a cluster for experiments.
///
/// Commands that need a cluster use the lab: a real Kubernetes and KubeVirt control plane on this machine, in its own
/// network. The first use builds it from Go modules (about 8 minutes). Requires Linux, Rust and Go.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct XtaskArguments {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
    /// Show both operators: install KubeVirt, run Machines, change and remove them.
    Demo(demo::DemoOptions),
    /// Run all checks: format, lints, generated files, unit tests and tests on the lab.
    Test(test::TestOptions),
    /// Run a lab in the background and use it.
    #[command(subcommand)]
    Lab(lab_commands::LabCommand),
    /// Compare the installations of our virt-operator and of the reference operator.
    Parity(parity::ParityOptions),
    /// Run KubeVirt's own end-to-end specs of virt-operator with our operator and with upstream's
    E2e(e2e::E2eOptions),
    /// Run benchmarks. Raw results are written to target/bench.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Run long tests that inject random faults and check the result.
    #[command(subcommand)]
    Chaos(chaos::ChaosCommand),
    /// Build the image of both operators and the kubectl plugin, without a container engine
    Image(image::ImageOptions),
    /// Write the generated files, or check that they are up to date.
    Generate(generate::GenerateOptions),
}

fn main() -> ExitCode {
    if let Err(error) = vitivirt_lab::isolate::begin() {
        return fail(&error);
    }
    match XtaskArguments::parse().command {
        XtaskCommand::Demo(options) => demo::run(&options),
        XtaskCommand::Test(options) => finish(test::run(&options)),
        XtaskCommand::Lab(command) => lab_commands::run(command),
        XtaskCommand::Parity(options) => parity::run(&options),
        XtaskCommand::E2e(options) => e2e::run(&options),
        XtaskCommand::Bench(bench) => bench::run(&bench),
        XtaskCommand::Chaos(chaos) => chaos::run(&chaos),
        XtaskCommand::Image(options) => image::run(&options),
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
