//! The operator's Deployment and what makes its metrics reachable. The pod fits the pod security level `restricted`.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vitivirt_api::{IMAGE, machine::INSTALLATION_LABELS};

use crate::rbac::{ACCOUNT, NAMESPACE};

const NAME: &str = "kubevirt-operator-controller-manager";
const METRICS: &str = "kubevirt-operator-metrics";
const METRICS_PORT: u16 = 8080;
const HEALTH_PORT: u16 = 8081;

/// The labels that select the operator's pods.
fn selector() -> BTreeMap<&'static str, &'static str> {
    [("app.kubernetes.io/name", "kubevirt-operator"), ("app.kubernetes.io/component", "manager")].into()
}

fn labels() -> BTreeMap<&'static str, &'static str> {
    let mut labels = selector();
    labels.extend(INSTALLATION_LABELS);
    labels
}

fn metadata(name: &str) -> Value {
    json!({"name": name, "namespace": NAMESPACE, "labels": labels()})
}

pub(super) fn deployment() -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(NAME),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": selector()},
            "template": {
                "metadata": {
                    "labels": labels(),
                    "annotations": {"kubectl.kubernetes.io/default-container": "manager"},
                },
                "spec": pod(),
            },
        },
    })
}

fn pod() -> Value {
    json!({
        "serviceAccountName": ACCOUNT,
        // Without a user: the image has a numeric one, and OpenShift assigns each namespace its own range.
        "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
        // The operator gives up its Lease when it receives SIGTERM.
        "terminationGracePeriodSeconds": 10,
        "containers": [{
            "name": "manager",
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "command": ["kubevirt-operator"],
            "env": [
                {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
                {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            ],
            "ports": [
                {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
                {"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"},
            ],
            "livenessProbe": {
                "httpGet": {"path": "/healthz", "port": "health"},
                "initialDelaySeconds": 15,
                "periodSeconds": 20,
            },
            "readinessProbe": {
                "httpGet": {"path": "/readyz", "port": "health"},
                "periodSeconds": 5,
            },
            "resources": {
                "limits": {"cpu": "500m", "memory": "512Mi"},
                "requests": {"cpu": "100m", "memory": "256Mi"},
            },
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": true,
            },
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }],
    })
}

pub(super) fn metrics_service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(METRICS),
        "spec": {
            "selector": selector(),
            "ports": [{"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics", "protocol": "TCP"}],
        },
    })
}

/// For the Prometheus operator.
pub(super) fn service_monitor() -> Value {
    service_monitor_with(&json!({"port": "metrics", "path": "/metrics", "scheme": "http"}))
}

/// For metrics over TLS with a self-signed certificate, which require a token. Prometheus sends that of its own account.
pub(super) fn secure_service_monitor() -> Value {
    service_monitor_with(&json!({
        "port": "metrics",
        "path": "/metrics",
        "scheme": "https",
        "bearerTokenFile": "/var/run/secrets/kubernetes.io/serviceaccount/token",
        "tlsConfig": {"insecureSkipVerify": true},
    }))
}

fn service_monitor_with(endpoint: &Value) -> Value {
    json!({
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata(METRICS),
        "spec": {"selector": {"matchLabels": selector()}, "endpoints": [endpoint]},
    })
}

/// What changes in the Deployment if the metrics require TLS and a token. A strategic merge patch adds the variables to
/// those that the container has.
pub(super) fn secure_metrics_patch() -> Value {
    let variables = ["METRICS_TLS", "METRICS_AUTHORIZATION"].map(|name| json!({"name": name, "value": "true"}));
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"template": {"spec": {"containers": [{"name": "manager", "env": variables}]}}},
    })
}

/// Metrics are reachable only from namespaces with the label `metrics: enabled`. The kubelet's probes are not affected
/// by network policies.
pub(super) fn network_policy() -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata("kubevirt-operator-allow-metrics"),
        "spec": {
            "podSelector": {"matchLabels": selector()},
            "policyTypes": ["Ingress"],
            "ingress": [{
                "from": [{"namespaceSelector": {"matchLabels": {"metrics": "enabled"}}}],
                "ports": [{"port": METRICS_PORT, "protocol": "TCP"}],
            }],
        },
    })
}
