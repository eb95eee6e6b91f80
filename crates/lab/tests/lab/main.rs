//! Tests of the lab itself, which the tests of the operators rely on.

mod bad_input;
mod faults;
mod isolation;
mod kubevirt;
mod nested;
mod pace;
mod second_api_server;
mod simulators;

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = nested::run_if_requested() {
        return code;
    }
    vitivirt_lab::harness::main(&vitivirt_lab::components::STANDARD, |suite| {
        kubevirt::add(suite);
        isolation::add(suite);
        faults::add(suite);
        simulators::add(suite);
        pace::add(suite);
        second_api_server::add(suite);
        bad_input::add(suite);
    })
}
