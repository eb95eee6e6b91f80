//! KubeVirt in a lab: installed by the reference operator, by ours, or only simulated for scale.

pub(crate) mod install_strategy;
mod operator;
pub(crate) mod simulated;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, PostParams},
};
pub use operator::VirtOperator;
pub(crate) use operator::{OWN_REPOSITORY, create_operator, ready};
use serde_json::{Value, json};

pub(crate) const NAMESPACE: &str = crate::virt_handler::NAMESPACE;

/// Who brings KubeVirt into the cluster.
#[derive(Clone, Debug, Default)]
pub enum KubeVirtInstaller {
    /// Nobody: a plain Kubernetes.
    #[default]
    None,
    /// Its own Go operator. The custom resource may be given; the default is the release's.
    Reference { custom_resource: Option<Value> },
    /// Our virt-operator, from this file, with the manifests that it prints.
    Ours { program: PathBuf, custom_resource: Option<Value> },
    /// Only its resource definitions and a simulator of VM and VMI status: enough for thousands of them.
    Simulated,
}

/// A kind of `kubevirt.io/v1`, for a client without its type.
pub fn kubevirt_resource(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind))
}

/// The release's own custom resource.
fn default_custom_resource() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
        "spec": {
            "certificateRotateStrategy": {},
            "configuration": {"developerConfiguration": {"featureGates": []}},
            "customizeComponents": {},
            "imagePullPolicy": "IfNotPresent",
            "workloadUpdateStrategy": {},
        },
    })
}

/// Creates the custom resource and waits until the operator says that it is deployed. An operator that never becomes
/// ready ends the wait early; `logs` is where its pods write. Returns the resource as it was at that very moment.
pub(crate) async fn deploy(client: &Client, custom_resource: Option<Value>, logs: &Path) -> Result<DynamicObject> {
    let custom_resource = custom_resource.unwrap_or_else(default_custom_resource);
    let object: DynamicObject = serde_json::from_value(custom_resource).context("the KubeVirt custom resource")?;
    let name = object.metadata.name.clone().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), NAMESPACE, &kubevirt_resource("KubeVirt"));
    api.create(&PostParams::default(), &object).await.context("creating the KubeVirt custom resource")?;
    let deployed = kube::runtime::wait::await_condition(api.clone(), &name, |kubevirt: Option<&DynamicObject>| {
        kubevirt
            .is_some_and(|kubevirt| kubevirt.data.pointer("/status/phase").and_then(Value::as_str) == Some("Deployed"))
    });
    let waited = tokio::select! {
        waited = tokio::time::timeout(TIMEOUT, deployed) => waited,
        complaint = operator::never_ready(client, OPERATOR_TIMEOUT, logs) => return Err(complaint),
    };
    match waited {
        Ok(result) => {
            result.context("watching the KubeVirt custom resource")?.context("the KubeVirt custom resource is gone")
        }
        Err(_) => {
            let status = api.get(&name).await.ok().and_then(|kubevirt| kubevirt.data.get("status").cloned());
            bail!("KubeVirt was not deployed within {TIMEOUT:?}; its status: {}", status.unwrap_or_default())
        }
    }
}

const TIMEOUT: Duration = Duration::from_secs(240);
/// An operator is ready long before it is done; one that is not by then will not be.
const OPERATOR_TIMEOUT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_plurals_that_kubevirt_gives_them() {
        for (kind, plural) in [
            ("KubeVirt", "kubevirts"),
            ("VirtualMachine", "virtualmachines"),
            ("VirtualMachineInstance", "virtualmachineinstances"),
            ("VirtualMachineInstanceMigration", "virtualmachineinstancemigrations"),
        ] {
            assert_eq!(kubevirt_resource(kind).plural, plural);
        }
    }
}
