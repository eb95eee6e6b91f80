//! kubevirt-operator on the lab, as its own service account.

mod lease;
mod life;
mod replica;

use std::process::ExitCode;

fn main() -> ExitCode {
    lab::harness::main(&lab::parts::STANDARD, |suite| {
        lease::add(suite);
        life::add(suite);
    })
}
