//! Checks whether the installed Go can build the components. Each problem has its own error message.

use std::process::Command;

use anyhow::{Result, bail};

/// The oldest Go that Kubernetes v1.36 builds with.
const MINIMUM: (u32, u32) = (1, 26);

pub(crate) fn check() -> Result<()> {
    let output = match Command::new("go").arg("version").env("GOTOOLCHAIN", "local").output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
            "`go` was not found: install Go {}.{} or newer (https://go.dev/dl) and put it on PATH; \
             the lab builds its control plane from Go modules",
            MINIMUM.0,
            MINIMUM.1
        ),
        Err(error) => bail!("cannot run `go version`: {error}; reinstall Go"),
    };
    check_version(&String::from_utf8_lossy(&output.stdout))
}

fn check_version(output: &str) -> Result<()> {
    match parse(output) {
        Some(version) if version >= MINIMUM => Ok(()),
        Some((major, minor)) => bail!(
            "Go {major}.{minor} is too old: Kubernetes v1.36, which the lab builds, needs Go {}.{} or newer; \
             install it from https://go.dev/dl",
            MINIMUM.0,
            MINIMUM.1
        ),
        None => bail!("`go version` printed {:?}, which contains no version; reinstall Go", output.trim()),
    }
}

/// "go version go1.26.8 linux/amd64" → (1, 26)
fn parse(output: &str) -> Option<(u32, u32)> {
    let version = output.split_whitespace().find_map(|word| word.strip_prefix("go1."))?;
    let minor: String = version.chars().take_while(char::is_ascii_digit).collect();
    Some((1, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recent_go_is_accepted() {
        for output in ["go version go1.26.8 linux/amd64\n", "go version go1.27rc1 linux/arm64\n"] {
            check_version(output).unwrap();
        }
    }

    #[test]
    fn an_old_go_is_rejected_with_the_minimum_version() {
        let message = check_version("go version go1.22.1 linux/amd64\n").unwrap_err().to_string();
        assert!(message.contains("Go 1.22 is too old") && message.contains("1.26 or newer"), "{message}");
    }

    #[test]
    fn output_without_a_version_is_an_error() {
        assert!(check_version("what?").unwrap_err().to_string().contains("contains no version"));
    }
}
