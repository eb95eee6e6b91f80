//! `start`, `stop` and `restart`.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, anyhow};
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio::time::{Instant, sleep};
use vitivirt_cli::{CommandError, CommandResult, print};

use crate::{arguments::NameArguments, cluster::NamespaceClient};

const MANAGER: &str = "kubectl-vmachine";
/// How long `restart` waits for the guest of a Machine that was started a moment ago.
const START: Duration = Duration::from_secs(5);
/// What KubeVirt answers while it starts, stops or restarts the same guest.
const UNDERWAY: &str = "already underway";
const POLL: Duration = Duration::from_millis(250);

pub(crate) async fn set(arguments: &NameArguments, state: &str) -> CommandResult<ExitCode> {
    let cluster = NamespaceClient::connect(&arguments.namespace).await?;
    let patch = Patch::Merge(json!({"spec": {"powerState": state}}));
    let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
    for name in &arguments.names {
        let patched = cluster.machines().patch(name, &parameters, &patch).await;
        patched.map_err(|error| cluster.error(&error, "change", name))?;
        print(&format!("Machine {}/{name}: spec.powerState is {state}\n", cluster.namespace))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// KubeVirt restarts the guest. The Machine does not change.
pub(crate) async fn restart(arguments: &NameArguments) -> CommandResult<ExitCode> {
    let cluster = NamespaceClient::connect(&arguments.namespace).await?;
    for name in &arguments.names {
        wait_for_guest(&cluster, name).await?;
        restart_guest(&cluster, name).await?;
        print(&format!("Machine {}/{name}: the guest restarts\n", cluster.namespace))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn restart_guest(cluster: &NamespaceClient, name: &str) -> CommandResult<()> {
    let (namespace, version) = (&cluster.namespace, "/apis/subresources.kubevirt.io/v1");
    let deadline = Instant::now() + START;
    loop {
        let request = http::Request::put(format!("{version}/namespaces/{namespace}/virtualmachines/{name}/restart"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(b"{}".to_vec())
            .context("building a request")?;
        match cluster.client.request_text(request).await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status)) if status.code == 403 => {
                return Err(CommandError::Failed(anyhow!(
                    "you are not allowed to restart VirtualMachine {namespace}/{name}; KubeVirt's ClusterRole \
                     kubevirt.io:edit has this permission: {}",
                    status.message
                )));
            }
            Err(kube::Error::Api(status)) if status.message.contains(UNDERWAY) => {
                if Instant::now() >= deadline {
                    return Err(CommandError::Failed(anyhow!(
                        "KubeVirt is still starting or stopping VirtualMachine {namespace}/{name}; try again when that is \
                         done: {}",
                        status.message
                    )));
                }
                sleep(POLL).await;
            }
            Err(error) => return Err(cluster.error(&error, "restart", name)),
        }
    }
}

/// Waits until the Machine has a guest: its status follows a `start` only after a moment. Fails at once if the user wants
/// the Machine to be stopped.
async fn wait_for_guest(cluster: &NamespaceClient, name: &str) -> CommandResult<()> {
    let deadline = Instant::now() + START;
    loop {
        let machine = cluster.machine(name).await?;
        let status = machine.status.unwrap_or_default();
        if status.vmi_name.is_some() {
            return Ok(());
        }
        let refusal = format!("Machine {}/{name} is not running, so it cannot be restarted", cluster.namespace);
        if machine.spec.power_state.is_some_and(|state| state != "Running") {
            return Err(CommandError::Invalid(anyhow!("{refusal}; use `kubectl vmachine start {name}`")));
        }
        if Instant::now() >= deadline {
            let phase = status.phase.map(|phase| format!(" (phase {phase:?})")).unwrap_or_default();
            return Err(CommandError::Invalid(anyhow!(
                "{refusal}: it has no guest{phase}; `kubectl vmachine describe {name}` shows why"
            )));
        }
        sleep(POLL).await;
    }
}
