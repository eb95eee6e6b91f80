//! What must exist before a virt-operator runs, and its Deployment: the reference's manifests, from its own generator.

use anyhow::{Context, Result, bail};
use kube::Client;
use serde_json::{Value, json};

use super::NAMESPACE;
use crate::manifests;
use crate::parts::{self, Group};

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
