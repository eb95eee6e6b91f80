//! KubeVirt in a lab: installed by the reference operator or by ours, or simulated for benchmarks.

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
pub use operator::{KubeVirtRelease, VirtOperator};
pub(crate) use operator::{create_operator, delete_operator, ready, replace_operator};
use serde_json::{Value, json};

pub(crate) const NAMESPACE: &str = crate::virt_handler::NAMESPACE;
/// The user of virt-operator in the audit log, upstream's too.
pub const VIRT_OPERATOR_USER: &str = "system:serviceaccount:kubevirt:kubevirt-operator";

/// How KubeVirt is installed in the cluster.
#[derive(Clone, Debug, Default)]
pub enum KubeVirtInstaller {
    /// Not at all: plain Kubernetes.
    #[default]
    None,
    /// By the reference operator. The default KubeVirt resource is the release's own.
    Reference { custom_resource: Option<Value> },
    /// By our virt-operator: this executable, with the manifests that it prints.
    Ours { program: PathBuf, custom_resource: Option<Value> },
    /// Only the CRDs, and a simulator of VM and VMI status: enough for thousands of VMs.
    Simulated,
}

/// A kind of `kubevirt.io/v1`, for a dynamic client.
pub fn kubevirt_resource(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind))
}

/// The KubeVirt resource of the release.
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

/// Creates the KubeVirt resource and waits until its phase is Deployed. It fails early if the operator does not become
/// ready; `logs` is the folder with the logs of its pods. Returns the resource as it was when it was deployed.
pub(crate) async fn deploy(client: &Client, custom_resource: Option<Value>, logs: &Path) -> Result<DynamicObject> {
    let custom_resource = custom_resource.unwrap_or_else(default_custom_resource);
    let object: DynamicObject = serde_json::from_value(custom_resource).context("invalid KubeVirt resource")?;
    let name = object.metadata.name.clone().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), NAMESPACE, &kubevirt_resource("KubeVirt"));
    api.create(&PostParams::default(), &object).await.context("creating the KubeVirt resource")?;
    let deployed = kube::runtime::wait::await_condition(api.clone(), &name, |kubevirt: Option<&DynamicObject>| {
        kubevirt
            .is_some_and(|kubevirt| kubevirt.data.pointer("/status/phase").and_then(Value::as_str) == Some("Deployed"))
    });
    let waited = tokio::select! {
        waited = tokio::time::timeout(TIMEOUT, deployed) => waited,
        error = operator::never_ready(client, OPERATOR_TIMEOUT, logs) => return Err(error),
    };
    match waited {
        Ok(result) => result.context("watching the KubeVirt resource")?.context("the KubeVirt resource was deleted"),
        Err(_) => {
            let status = api.get(&name).await.ok().and_then(|kubevirt| kubevirt.data.get("status").cloned());
            bail!("KubeVirt was not deployed within {TIMEOUT:?}; its status: {}", status.unwrap_or_default())
        }
    }
}

const TIMEOUT: Duration = Duration::from_secs(240);
/// An operator that is not ready after this time will not become ready.
const OPERATOR_TIMEOUT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_plural_names_of_kubevirt() {
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
