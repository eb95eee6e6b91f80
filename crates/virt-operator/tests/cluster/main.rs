//! virt-operator on the lab, as its own service account.

#![expect(clippy::indexing_slicing, reason = "a panic in a test is a failed test")]

mod alerts;
mod commands;
mod install;
mod lifecycle;
mod manifests;
mod process;
mod support;

use std::process::ExitCode;

use vitivirt_lab::harness::Suite;

fn main() -> ExitCode {
    vitivirt_lab::harness::main(&vitivirt_lab::components::STANDARD, add)
}

fn add(suite: &mut Suite) {
    manifests::add(suite);
    commands::add(suite);
    install::add(suite);
    lifecycle::add(suite);
    process::add(suite);
    alerts::add(suite);
}
