//! kubevirt-operator on the lab: what becomes of changes.

mod changes;
#[path = "../cluster/replica.rs"]
#[allow(dead_code, unused_imports, reason = "the other tests use the rest")]
mod replica;
#[path = "../cluster/world.rs"]
#[allow(dead_code, unused_imports, reason = "the other tests use the rest")]
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    lab::harness::main(&lab::parts::STANDARD, changes::add)
}
