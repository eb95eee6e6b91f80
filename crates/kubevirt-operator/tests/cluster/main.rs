//! Tests of kubevirt-operator on the lab. The operator runs as its own service account, with the permissions of
//! `config/rbac`.

#![expect(clippy::disallowed_methods, reason = "the lab runs in real time")]

mod changes;
mod charts;
mod check;
mod coexistence;
mod cost;
mod crash;
mod data;
mod documents;
mod drift;
mod edit_chains;
mod foreign_crds;
mod invalid_specs;
mod lease;
mod lifecycle;
mod machine_test;
mod packages;
mod permissions;
mod plugin;
mod poll;
mod predictions;
mod process;
mod random_specs;
mod recovery;
mod rejections;
mod replica;
mod restore;
mod secure_metrics;
mod status_page;
mod tenants;

use std::process::ExitCode;

use vitivirt_lab::components::{HELM, STANDARD};

fn main() -> ExitCode {
    vitivirt_lab::harness::main(&[STANDARD.as_slice(), &HELM].concat(), |suite| {
        suite.check_permissions(kubevirt_operator::rbac::ACCOUNT, permissions::every_permission_is_used);
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
        charts::add(suite);
        permissions::add(suite);
        plugin::add(suite);
        data::add(suite);
        restore::add(suite);
        predictions::add(suite);
        foreign_crds::add(suite);
        status_page::add(suite);
        secure_metrics::add(suite);
        check::add(suite);
        documents::add(suite);
    })
}
