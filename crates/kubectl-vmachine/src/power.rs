//! `start`, `stop` and `restart`.

use std::process::ExitCode;

use anyhow::{Context, anyhow};
use kube::api::{Patch, PatchParams};
use serde_json::json;
use vitivirt_cli::{CommandError, CommandResult, print};

use crate::{arguments::NameArguments, cluster::NamespaceClient};

const MANAGER: &str = "kubectl-vmachine";

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
        let machine = cluster.machine(name).await?;
        if machine.status.is_none_or(|status| status.vmi_name.is_none()) {
            let message = format!("Machine {}/{name} is not running, so it cannot be restarted", cluster.namespace);
            return Err(CommandError::Invalid(anyhow!("{message}; use `kubectl vmachine start {name}`")));
        }
        let (namespace, version) = (&cluster.namespace, "/apis/subresources.kubevirt.io/v1");
        let request = http::Request::put(format!("{version}/namespaces/{namespace}/virtualmachines/{name}/restart"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(b"{}".to_vec())
            .context("building a request")?;
        match cluster.client.request_text(request).await {
            Ok(_) => print(&format!("Machine {namespace}/{name}: the guest restarts\n"))?,
            Err(kube::Error::Api(status)) if status.code == 403 => {
                return Err(CommandError::Failed(anyhow!(
                    "you are not allowed to restart VirtualMachine {namespace}/{name}; KubeVirt's ClusterRole \
                     kubevirt.io:edit has this permission: {}",
                    status.message
                )));
            }
            Err(error) => return Err(cluster.error(&error, "restart", name)),
        }
    }
    Ok(ExitCode::SUCCESS)
}
