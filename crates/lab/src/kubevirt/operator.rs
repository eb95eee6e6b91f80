//! What must exist before a virt-operator runs, and its Deployment: the reference's manifests, from its own generator.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use super::NAMESPACE;
use crate::kubelet::pod_log;
use crate::manifests;
use crate::parts::{self, Group};
use crate::server::last_words;

const NAME: &str = "virt-operator";

/// Component images are derived from it, whatever runs the operator.
pub const REFERENCE_IMAGE: &str = "quay.io/kubevirt/virt-operator:v1.8.4";

/// Namespace, CRD, RBAC, priority class and a Deployment that runs `image`.
pub(crate) async fn create_operator(client: &Client, image: &str) -> Result<()> {
    let mut documents = vec![namespace()];
    for kind in ["kv", "operator-rbac", "priorityclass"] {
        documents.extend(generate(kind).await?);
    }
    documents.push(deployment(image));
    manifests::create(client, &documents).await.context("installing virt-operator")
}

pub(crate) fn namespace() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": NAMESPACE,
            "labels": {"kubevirt.io": "", "pod-security.kubernetes.io/enforce": "privileged"},
        },
    })
}

/// Resolves with a complaint if the operator's Deployment exists and none of its pods has been ready within `patience`;
/// never otherwise. An operator that somebody runs without a Deployment is not its concern.
pub(crate) async fn never_ready(client: &Client, patience: Duration, logs: &Path) -> anyhow::Error {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let ready = kube::runtime::wait::await_condition(deployments.clone(), NAME, |deployment: Option<&Deployment>| {
        deployment.and_then(|deployment| deployment.status.as_ref()?.ready_replicas).is_some_and(|ready| ready > 0)
    });
    if let Err(_elapsed) = tokio::time::timeout(patience, ready).await
        && let Ok(Some(_)) = deployments.get_opt(NAME).await
    {
        let pods = pods(client, logs).await;
        return anyhow!("virt-operator has not become ready within {patience:?}, so nobody installs KubeVirt; {pods}");
    }
    std::future::pending().await
}

/// The operator's pods and what they said last, on one line.
async fn pods(client: &Client, logs: &Path) -> String {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let selection = ListParams::default().labels(&format!("kubevirt.io={NAME}"));
    let found = pods.list(&selection).await.map(|list| list.items).unwrap_or_default();
    if found.is_empty() {
        return "it has no pods".to_owned();
    }
    let describe = |pod: &Pod| {
        let restarts: i32 = pod
            .status
            .iter()
            .flat_map(|status| status.container_statuses.iter().flatten())
            .map(|container| container.restart_count)
            .sum();
        let log = pod_log(logs, NAMESPACE, &pod.name_any());
        format!("{} was restarted {restarts} times, its last words: {}", pod.name_any(), last_words(&log))
    };
    found.iter().map(describe).collect::<Vec<_>>().join("; ")
}

async fn generate(kind: &str) -> Result<Vec<Value>> {
    let generator = parts::binary(Group::KubeVirt, "resource-generator")?;
    let output = tokio::process::Command::new(generator)
        .arg(format!("--type={kind}"))
        .arg(format!("--namespace={NAMESPACE}"))
        .output()
        .await
        .context("running resource-generator")?;
    if !output.status.success() {
        bail!("resource-generator --type={kind} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    manifests::parse(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("resource-generator --type={kind}"))
}

fn deployment(image: &str) -> Value {
    let labels = json!({"kubevirt.io": "virt-operator", "name": "virt-operator", "prometheus.kubevirt.io": "true"});
    let probe = json!({
        "httpGet": {"path": "/metrics", "port": 8443, "scheme": "HTTPS"},
        "initialDelaySeconds": 5,
        "timeoutSeconds": 10,
    });
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "virt-operator", "namespace": NAMESPACE, "labels": {"kubevirt.io": "virt-operator"}},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"kubevirt.io": "virt-operator"}},
            "strategy": {"type": "RollingUpdate"},
            "template": {
                "metadata": {"name": "virt-operator", "labels": labels},
                "spec": {
                    "serviceAccountName": "kubevirt-operator",
                    "priorityClassName": "kubevirt-cluster-critical",
                    "nodeSelector": {"kubernetes.io/os": "linux"},
                    "tolerations": [{"key": "CriticalAddonsOnly", "operator": "Exists"}],
                    "containers": [{
                        "name": "virt-operator",
                        "image": image,
                        "command": ["virt-operator"],
                        "args": ["--port", "8443", "-v", "2"],
                        "env": [
                            {"name": "VIRT_OPERATOR_IMAGE", "value": REFERENCE_IMAGE},
                            {"name": "WATCH_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['olm.targetNamespaces']"}}},
                            {"name": "KUBEVIRT_VERSION", "value": "v1.8.4"},
                        ],
                        "ports": [
                            {"name": "metrics", "containerPort": 8443, "protocol": "TCP"},
                            {"name": "webhooks", "containerPort": 8444, "protocol": "TCP"},
                        ],
                        "readinessProbe": probe,
                        "resources": {"requests": {"cpu": "10m", "memory": "450Mi"}},
                        "volumeMounts": [
                            {"name": "kubevirt-operator-certs", "mountPath": "/etc/virt-operator/certificates", "readOnly": true},
                            {"name": "profile-data", "mountPath": "/profile-data"},
                        ],
                    }],
                    "volumes": [
                        {"name": "kubevirt-operator-certs", "secret": {"secretName": "kubevirt-operator-certs", "optional": true}},
                        {"name": "profile-data", "emptyDir": {}},
                    ],
                },
            },
        },
    })
}
