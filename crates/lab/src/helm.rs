//! Runs Helm as the lab's administrator.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::process::Command;

use crate::{
    Lab,
    components::{self, ComponentGroup},
};

/// A release of Helm that the lab builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Helm {
    /// v3.22.0.
    V3,
    /// v4.3.1.
    V4,
}

impl Helm {
    pub const ALL: [Helm; 2] = [Helm::V3, Helm::V4];

    fn group(self) -> ComponentGroup {
        match self {
            Helm::V3 => ComponentGroup::Helm3,
            Helm::V4 => ComponentGroup::Helm4,
        }
    }
}

impl Lab {
    /// Runs Helm with all permissions and returns what it prints. Fails with its error message. Helm reads and writes no
    /// files of the user.
    pub async fn helm(&self, helm: Helm, arguments: &[&str]) -> Result<String> {
        let program = components::binary(helm.group(), "helm")?;
        let home = self.folder().join(format!("{helm:?}"));
        let output = Command::new(program)
            .args(arguments)
            .env_clear()
            .env("KUBECONFIG", self.kubeconfig())
            // Without it, Helm writes its cache of the API's kinds to the current folder.
            .env("HOME", &home)
            .env("HELM_CACHE_HOME", home.join("cache"))
            .env("HELM_CONFIG_HOME", home.join("config"))
            .env("HELM_DATA_HOME", home.join("data"))
            .stdin(Stdio::null())
            .output()
            .await
            .context("running helm")?;
        if !output.status.success() {
            // `helm lint` prints the reasons to standard output.
            let text = [output.stderr, output.stdout].map(|text| String::from_utf8_lossy(&text).trim().to_owned());
            bail!("Helm {helm:?}: {}: {}", arguments.join(" "), text.join("\n").trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
