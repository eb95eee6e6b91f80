//! The binary of virt-operator.

use std::process::ExitCode;

fn main() -> ExitCode {
    virt_operator::main()
}
