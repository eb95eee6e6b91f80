//! `completions SHELL`: the completion script of a program.

use std::process::ExitCode;

use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};

use crate::{CommandResult, print};

#[derive(Debug, Clone, Args)]
pub struct CompletionsArguments {
    /// Shell that the script is for
    #[arg(value_enum)]
    shell: Shell,
}

impl CompletionsArguments {
    /// Prints the script for the program with these arguments.
    pub fn run<C: CommandFactory>(&self) -> CommandResult<ExitCode> {
        print(&self.script::<C>())?;
        Ok(ExitCode::SUCCESS)
    }

    fn script<C: CommandFactory>(&self) -> String {
        let mut command = C::command();
        let name = command.get_name().to_owned();
        let mut script = Vec::new();
        generate(self.shell, &mut command, name, &mut script);
        String::from_utf8_lossy(&script).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use clap::{Parser, ValueEnum};

    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "program")]
    struct Program {
        #[arg(long)]
        flag: bool,
    }

    #[test]
    fn every_shell_has_a_script_that_names_program_and_flags() {
        for &shell in Shell::value_variants() {
            let script = CompletionsArguments { shell }.script::<Program>();
            assert!(script.contains("program") && script.contains("flag"), "{shell}: {script}");
        }
    }
}
