//! The connection to the cluster, and errors that say what to do.

use std::sync::Arc;

use anyhow::{Context, anyhow};
use kube::{Api, Client};
use vitivirt_api::machine::Machine;
use vitivirt_cli::{CommandError, CommandResult};
use vitivirt_runtime::{
    client::{configuration, connect},
    metrics::Metrics,
    root_cause::root_cause,
};

use crate::arguments::NamespaceArguments;

pub(crate) struct NamespaceClient {
    pub(crate) client: Client,
    pub(crate) namespace: String,
}

impl NamespaceClient {
    pub(crate) async fn connect(arguments: &NamespaceArguments) -> CommandResult<Self> {
        let cluster = &arguments.cluster;
        let config = configuration(cluster.kubeconfig.as_deref(), cluster.context.as_deref()).await;
        let config = config.context("connecting")?;
        let agent = concat!("kubectl-vmachine/", env!("CARGO_PKG_VERSION"));
        let clients = connect(&config, agent, None, &Arc::new(Metrics::new("command"))).context("connecting")?;
        let namespace = arguments.namespace.clone().unwrap_or(config.default_namespace);
        Ok(Self { client: clients.rate_limited, namespace })
    }

    pub(crate) fn machines(&self) -> Api<Machine> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// A Machine that the user names.
    pub(crate) async fn machine(&self, name: &str) -> CommandResult<Machine> {
        self.machines().get(name).await.map_err(|error| self.error(&error, "read", name))
    }

    /// What a failed request about a Machine means.
    pub(crate) fn error(&self, error: &kube::Error, verb: &str, name: &str) -> CommandError {
        let machine = format!("Machine {}/{name}", self.namespace);
        match error {
            kube::Error::Api(status)
                if status.code == 404 && status.details.as_ref().is_some_and(|of| !of.name.is_empty()) =>
            {
                CommandError::Invalid(anyhow!("{machine} not found"))
            }
            kube::Error::Api(status) if status.code == 404 => {
                CommandError::Failed(anyhow!("the cluster has no CRD for Machines; install kubevirt-operator first"))
            }
            kube::Error::Api(status) if status.code == 403 => {
                CommandError::Failed(anyhow!("you are not allowed to {verb} {machine}: {}", status.message))
            }
            kube::Error::Api(status) if status.code == 422 => {
                CommandError::Invalid(anyhow!("{machine}: {}", status.message))
            }
            error => CommandError::Failed(anyhow!("cannot {verb} {machine}: {}", root_cause(error))),
        }
    }
}
