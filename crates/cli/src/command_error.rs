//! How a command fails, and the exit status that follows from it.

use std::process::ExitCode;

/// Why a command printed no result.
#[derive(Debug)]
pub enum CommandError {
    /// The input is invalid or is refused: exit status 1.
    Invalid(anyhow::Error),
    /// The command could not do its work, for example because a file or the cluster cannot be read: exit status 2.
    Failed(anyhow::Error),
}

pub type CommandResult<T> = Result<T, CommandError>;

impl CommandError {
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Invalid(_) => 1,
            Self::Failed(_) => 2,
        }
    }

    pub fn error(&self) -> &anyhow::Error {
        match self {
            Self::Invalid(error) | Self::Failed(error) => error,
        }
    }
}

/// What is not known to be a mistake in the input is a failure.
impl From<anyhow::Error> for CommandError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

/// Marks an error as a mistake in the input.
pub trait OrInvalid<T> {
    fn or_invalid(self) -> CommandResult<T>;
}

impl<T, E: Into<anyhow::Error>> OrInvalid<T> for Result<T, E> {
    fn or_invalid(self) -> CommandResult<T> {
        self.map_err(|error| CommandError::Invalid(error.into()))
    }
}

/// Prints the error of a failed command and returns the exit code of the program.
pub fn exit_code(result: CommandResult<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("error: {:#}", error.error());
        ExitCode::from(error.exit_status())
    })
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn invalid_input_exits_with_1_and_everything_else_with_2() {
        let failed: CommandResult<()> = Err(anyhow!("connection refused")).map_err(CommandError::from);
        assert_eq!(failed.unwrap_err().exit_status(), 2);
        let invalid: CommandResult<()> = Err(anyhow!("spec.x: invalid value")).or_invalid();
        assert_eq!(invalid.unwrap_err().exit_status(), 1);
        assert_eq!(exit_code(Ok(ExitCode::SUCCESS)), ExitCode::SUCCESS);
        assert_eq!(exit_code(Err(CommandError::Failed(anyhow!("x")))), ExitCode::from(2));
    }
}
