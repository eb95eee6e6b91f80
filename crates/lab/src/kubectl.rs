//! Runs kubectl as the lab's administrator.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::process::Command;

use crate::{
    Lab,
    components::{self, ComponentGroup},
};

impl Lab {
    /// Runs kubectl with all permissions and returns what it prints. Fails with its error message.
    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let program = components::binary(ComponentGroup::Kubernetes, "kubectl")?;
        let output = Command::new(program)
            .args(arguments)
            .env("KUBECONFIG", self.kubeconfig())
            .stdin(Stdio::null())
            .output()
            .await
            .context("running kubectl")?;
        if !output.status.success() {
            bail!("kubectl {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
