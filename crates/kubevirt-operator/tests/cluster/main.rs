//! kubevirt-operator on the lab, as its own service account.

mod crash;
mod lease;
mod life;
mod machine;
mod refusals;
mod replica;
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    lab::harness::main(&lab::parts::STANDARD, |suite| {
        lease::add(suite);
        life::add(suite);
        machine::add(suite);
        crash::add(suite);
        refusals::add(suite);
    })
}
