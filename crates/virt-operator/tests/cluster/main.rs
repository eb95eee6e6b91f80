//! virt-operator on the lab, as its own service account.

#![expect(clippy::indexing_slicing, reason = "a panic in a test is a failed test")]

mod alerts;
mod certificates;
mod charts;
mod commands;
mod drift;
mod edits;
mod failover;
mod faults;
mod install;
mod lanes;
mod lifecycle;
mod manifests;
mod permissions;
mod pods;
mod process;
mod refusals;
mod rehearsal;
mod removal;
mod rollout;
mod rotation;
mod storage;
mod support;
mod takeover;
mod unreachable;
mod upgrade;
mod webhook_client;

use std::process::ExitCode;

use vitivirt_lab::{
    components::{HELM, WITH_PREVIOUS},
    harness::Suite,
};

fn main() -> ExitCode {
    vitivirt_lab::harness::main(&[WITH_PREVIOUS.as_slice(), &HELM].concat(), add)
}

/// The long tests come first, so that no thread waits for the last one.
fn add(suite: &mut Suite) {
    upgrade::add(suite);
    lanes::add(suite);
    takeover::add(suite);
    failover::add(suite);
    rotation::add(suite);
    rollout::add(suite);
    removal::add(suite);
    certificates::add(suite);
    permissions::add(suite);
    charts::add(suite);
    install::add(suite);
    lifecycle::add(suite);
    edits::add(suite);
    drift::add(suite);
    rehearsal::add(suite);
    faults::add(suite);
    storage::add(suite);
    unreachable::add(suite);
    pods::add(suite);
    commands::add(suite);
    refusals::add(suite);
    manifests::add(suite);
    process::add(suite);
    alerts::add(suite);
}
