//! `kubectl vmachine` with an operator and KubeVirt. Its other tests are in its own crate.

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use serde_json::json;
use tokio::process::Command;
use vitivirt_lab::harness::{SharedLabs, Suite};

use crate::{
    machine_test::{MACHINE_PATIENCE, MachineTest, machine},
    poll::poll_until,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; the_plugin_stops_starts_and_restarts_a_machine);
}

/// The output of a command of the plugin that succeeds.
async fn plugin(test: &MachineTest, arguments: &[&str]) -> Result<String> {
    let file = Path::new(env!("CARGO_BIN_EXE_kubevirt-operator")).with_file_name("kubectl-vmachine");
    ensure!(file.exists(), "{} does not exist; run `cargo build --workspace --bins`", file.display());
    let mut command = Command::new(file);
    let command = command.args(arguments).args(["-n", test.namespace]).env_clear();
    let output = command.env("KUBECONFIG", test.lab.kubeconfig()).output().await.context("running the plugin")?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

async fn the_plugin_stops_starts_and_restarts_a_machine(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "plugin")).await?;
    test.create_json(&machine("web", &json!({"template": "small"}))).await?;
    test.wait_until_running("web").await?;
    let tree = plugin(&test, &["describe", "web"]).await?;
    for text in ["Machine web: Running", "VirtualMachineInstance web", "PersistentVolumeClaim web-root"] {
        ensure!(tree.contains(text), "{text:?} is missing in\n{tree}");
    }

    let vmis = test.vmis();
    let uid = async || -> Result<Option<String>> { Ok(vmis.get_opt("web").await?.and_then(|vmi| vmi.uid())) };
    let before = uid().await?;
    plugin(&test, &["restart", "web"]).await?;
    let is_replaced = || async {
        let now = vmis.get_opt("web").await?.and_then(|vmi| vmi.uid());
        Ok(now.is_some() && now != before)
    };
    poll_until(MACHINE_PATIENCE, is_replaced, || "a new guest".to_owned()).await?;
    test.wait_until_running("web").await?;

    plugin(&test, &["stop", "web"]).await?;
    test.wait_for_reason("web", "Stopped").await?;
    ensure!(uid().await?.is_none(), "the guest still runs");
    plugin(&test, &["start", "web"]).await?;
    // The status may still be that of a stopped Machine, and KubeVirt may still be starting the guest.
    let restarted = plugin(&test, &["restart", "web"]).await?;
    ensure!(restarted.contains("the guest restarts"), "{restarted}");
    test.wait_until_running("web").await?;
    test.delete_machine("web").await
}
