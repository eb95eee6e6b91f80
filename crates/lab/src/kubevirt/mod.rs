//! KubeVirt in a lab: installed by the reference operator, by ours, or only simulated for scale.

pub(crate) mod install_strategy;
mod operator;
pub(crate) mod simulated;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::api::{ApiResource, DynamicObject, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

pub use operator::REFERENCE_IMAGE;
pub(crate) use operator::create_operator;

pub(crate) const NAMESPACE: &str = crate::virt_handler::NAMESPACE;

/// Who brings KubeVirt into the cluster.
#[derive(Clone, Debug, Default)]
pub enum KubeVirt {
    /// Nobody: a plain Kubernetes.
    #[default]
    None,
    /// Its own Go operator. The custom resource may be given; the default is the release's.
    Reference { custom_resource: Option<Value> },
    /// Our virt-operator, from this file.
    Ours { program: PathBuf, custom_resource: Option<Value> },
    /// Only its resource definitions and a simulator of VM and VMI status: enough for thousands of them.
    Simulated,
}

pub(crate) fn kubevirt_resource() -> ApiResource {
    ApiResource {
        group: "kubevirt.io".to_owned(),
        version: "v1".to_owned(),
        api_version: "kubevirt.io/v1".to_owned(),
        kind: "KubeVirt".to_owned(),
        plural: "kubevirts".to_owned(),
    }
}

/// The release's own custom resource.
pub fn default_custom_resource() -> Value {
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

/// Creates the custom resource and waits until the operator says that it is deployed.
pub(crate) async fn deploy(client: &Client, custom_resource: Option<Value>) -> Result<()> {
    let custom_resource = custom_resource.unwrap_or_else(default_custom_resource);
    let object: DynamicObject = serde_json::from_value(custom_resource).context("the KubeVirt custom resource")?;
    let name = object.metadata.name.clone().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), NAMESPACE, &kubevirt_resource());
    api.create(&PostParams::default(), &object).await.context("creating the KubeVirt custom resource")?;
    let deployed = kube::runtime::wait::await_condition(api.clone(), &name, |kubevirt: Option<&DynamicObject>| {
        kubevirt
            .is_some_and(|kubevirt| kubevirt.data.pointer("/status/phase").and_then(Value::as_str) == Some("Deployed"))
    });
    match tokio::time::timeout(PATIENCE, deployed).await {
        Ok(result) => result.map(|_| ()).context("watching the KubeVirt custom resource"),
        Err(_) => {
            let status = api.get(&name).await.ok().and_then(|kubevirt| kubevirt.data.get("status").cloned());
            bail!("KubeVirt was not deployed within {PATIENCE:?}; its status: {}", status.unwrap_or_default())
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(240);
