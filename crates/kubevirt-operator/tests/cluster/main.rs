//! kubevirt-operator on the lab, as its own service account.

mod changes;
mod crash;
mod drift;
mod edits;
mod healing;
mod invalid;
mod lease;
mod life;
mod machine;
mod neighbours;
mod random;
mod refusals;
mod replica;
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    vitivirt_lab::harness::main(&vitivirt_lab::parts::STANDARD, |suite| {
        lease::add(suite);
        life::add(suite);
        machine::add(suite);
        crash::add(suite);
        refusals::add(suite);
        healing::add(suite);
        neighbours::add(suite);
        drift::add(suite);
        random::add(suite);
        invalid::add(suite);
        edits::add(suite);
        changes::add(suite);
    })
}
