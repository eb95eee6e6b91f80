//! Tests of kubevirt-operator on the lab. The operator runs as its own service account, with the permissions of
//! `config/rbac`.

#![expect(clippy::disallowed_methods, reason = "the lab runs in real time")]

mod changes;
mod coexistence;
mod cost;
mod crash;
mod data;
mod drift;
mod edit_chains;
mod foreign_crds;
mod invalid_specs;
mod lease;
mod lifecycle;
mod machine_test;
mod packages;
mod poll;
mod process;
mod random_specs;
mod recovery;
mod rejections;
mod replica;
mod tenants;

use std::process::ExitCode;

fn main() -> ExitCode {
    vitivirt_lab::harness::main(&vitivirt_lab::components::STANDARD, |suite| {
        lease::add(suite);
        process::add(suite);
        lifecycle::add(suite);
        crash::add(suite);
        rejections::add(suite);
        recovery::add(suite);
        coexistence::add(suite);
        drift::add(suite);
        random_specs::add(suite);
        invalid_specs::add(suite);
        edit_chains::add(suite);
        changes::add(suite);
        cost::add(suite);
        tenants::add(suite);
        packages::add(suite);
        data::add(suite);
        foreign_crds::add(suite);
    })
}
