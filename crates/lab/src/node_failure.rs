//! A node whose kubelet stops, and the node lifecycle controller, which does not run in a lab: this module writes what that
//! controller writes about the node and its pods.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::cluster::Lab;

const UNREACHABLE: &str = "node.kubernetes.io/unreachable";

/// Whether the node lifecycle controller has tainted a node that is not ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeTaints {
    /// What it does with every such node.
    Set,
    /// It has not done so yet, or another client has removed the taints.
    Missing,
}

impl Lab {
    /// Stops the kubelet of a node.
    pub async fn kill_node(&self, node: &str, taints: NodeTaints) -> Result<()> {
        self.set_pods(|pods| pods.dead_nodes.push(node.to_owned()));
        let taint = |effect: &str| json!({"key": UNREACHABLE, "effect": effect});
        let taints = match taints {
            NodeTaints::Set => json!([taint("NoSchedule"), taint("NoExecute")]),
            NodeTaints::Missing => Value::Null,
        };
        self.set_node(node, "Unknown", &taints).await?;
        for pod in self.pods_on(node).await? {
            self.set_pod_ready(&pod, false).await?;
        }
        Ok(())
    }

    /// Starts the kubelet of a node again.
    pub async fn revive_node(&self, node: &str) -> Result<()> {
        self.set_node(node, "True", &Value::Null).await?;
        self.set_pods(|pods| pods.dead_nodes.retain(|dead| dead != node));
        // The simulated kubelet reports a pod only when its containers change.
        for pod in self.pods_on(node).await? {
            let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
            let runs = containers.map(|container| container.ready).reduce(|all, ready| all && ready);
            if runs == Some(true) && pod.metadata.deletion_timestamp.is_none() {
                self.set_pod_ready(&pod, true).await?;
            }
        }
        Ok(())
    }

    async fn set_node(&self, node: &str, ready: &str, taints: &Value) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client());
        let conditions = json!({"status": {"conditions": [{"type": "Ready", "status": ready}]}});
        let parameters = PatchParams::default();
        nodes.patch_status(node, &parameters, &Patch::Strategic(&conditions)).await.context("setting a condition")?;
        let spec = json!({"spec": {"taints": taints}});
        nodes.patch(node, &parameters, &Patch::Merge(&spec)).await.context("setting taints")?;
        Ok(())
    }

    async fn pods_on(&self, node: &str) -> Result<Vec<Pod>> {
        let on_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
        Ok(Api::<Pod>::all(self.client()).list(&on_node).await?.items)
    }

    /// A pod that has been deleted in the meantime needs no condition.
    async fn set_pod_ready(&self, pod: &Pod, ready: bool) -> Result<()> {
        let ready = if ready { "True" } else { "False" };
        let conditions = json!({"status": {"conditions": [{"type": "Ready", "status": ready}]}});
        let pods: Api<Pod> = Api::namespaced(self.client(), &pod.namespace().unwrap_or_default());
        match pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(&conditions)).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            result => result.map(|_| ()).context("setting the condition of a pod"),
        }
    }
}
