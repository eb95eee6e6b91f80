//! The manifests of a virt-operator and its Deployment: for the reference operator from its own generator, for ours
//! from the command `virt-operator manifests`.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams},
};
use serde_json::{Value, json};

use super::NAMESPACE;
use crate::{
    components::{self, ComponentGroup},
    kubelet::{OwnProgram, pod_log, split_image},
    manifests,
    server_process::log_tail,
};

const NAME: &str = "virt-operator";

/// virt-operator derives the images of the components from it.
pub(super) const REFERENCE_IMAGE: &str = "quay.io/kubevirt/virt-operator:v1.8.4";

/// The image under which a lab runs our virt-operator. No registry has it: a release has one image for both programs.
const OWN_IMAGE: &str = "ghcr.io/vitistack/virt-operator:lab";

/// A release of KubeVirt that the lab has built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KubeVirtRelease {
    /// v1.8.4.
    #[default]
    Current,
    /// v1.7.0.
    Previous,
}

impl KubeVirtRelease {
    pub fn version(self) -> &'static str {
        match self {
            KubeVirtRelease::Current => "v1.8.4",
            KubeVirtRelease::Previous => "v1.7.0",
        }
    }

    fn group(self) -> ComponentGroup {
        match self {
            KubeVirtRelease::Current => ComponentGroup::KubeVirt,
            KubeVirtRelease::Previous => ComponentGroup::KubeVirtPrevious,
        }
    }
}

/// A virt-operator, and additional environment variables for its Deployment.
#[derive(Clone, Debug)]
pub struct VirtOperator {
    /// The executable of our virt-operator. None for the reference operator.
    pub program: Option<PathBuf>,
    /// The release of the reference operator.
    pub release: KubeVirtRelease,
    /// The image of our virt-operator in its Deployment.
    pub image: String,
    /// Environment variables such as `VIRT_API_IMAGE`.
    pub environment: Vec<(String, String)>,
}

impl VirtOperator {
    /// The reference operator.
    pub fn reference() -> Self {
        Self::reference_of(KubeVirtRelease::Current)
    }

    /// The reference operator of a release.
    pub fn reference_of(release: KubeVirtRelease) -> Self {
        VirtOperator { program: None, release, image: REFERENCE_IMAGE.to_owned(), environment: Vec::new() }
    }

    /// Our virt-operator, from this executable.
    pub fn ours(program: impl Into<PathBuf>) -> Self {
        VirtOperator { program: Some(program.into()), image: OWN_IMAGE.to_owned(), ..Self::reference() }
    }

    /// The executable for the pods of this operator, whatever the tag of their image.
    pub(crate) fn own_program(&self) -> Option<OwnProgram> {
        let (repository, _) = split_image(&self.image);
        let image = repository.split_once('/').map_or(repository, |(_, path)| path);
        Some(OwnProgram { image: image.to_owned(), file: self.program.clone()? })
    }
}

/// Creates namespace, CRD, RBAC, PriorityClass and Deployment.
pub(crate) async fn create_operator(client: &Client, operator: &VirtOperator) -> Result<()> {
    manifests::create(client, &operator_manifests(operator).await?).await.context("installing virt-operator")
}

/// Replaces the manifests of another operator or of another release, as `kubectl replace` does.
pub(crate) async fn replace_operator(client: &Client, operator: &VirtOperator) -> Result<()> {
    manifests::replace(client, &operator_manifests(operator).await?).await.context("replacing virt-operator")
}

async fn operator_manifests(operator: &VirtOperator) -> Result<Vec<Value>> {
    let mut documents = match &operator.program {
        Some(program) => {
            run_for_yaml(program, &["manifests", "--namespace", NAMESPACE, "--image", &operator.image]).await?
        }
        None => reference_manifests(operator.release).await?,
    };
    for document in &mut documents {
        let containers = document.pointer_mut("/spec/template/spec/containers").and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            if let Some(variables) = container.get_mut("env").and_then(Value::as_array_mut) {
                let additional = operator.environment.iter().map(|(name, value)| json!({"name": name, "value": value}));
                variables.extend(additional);
            }
        }
    }
    Ok(documents)
}

/// Deletes the Deployment and returns when its pods are gone.
pub(crate) async fn delete_operator(client: &Client, timeout: Duration) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    deployments.delete(NAME, &DeleteParams::background()).await.context("deleting virt-operator's Deployment")?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let selection = ListParams::default().labels(&format!("kubevirt.io={NAME}"));
    let gone = async {
        // The garbage collector deletes the pods. Their names are not known, so this polls.
        while !pods.list(&selection).await?.items.is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    };
    match tokio::time::timeout(timeout, gone).await {
        Ok(result) => result,
        Err(_) => bail!("the pods of virt-operator did not end within {timeout:?}"),
    }
}

async fn reference_manifests(release: KubeVirtRelease) -> Result<Vec<Value>> {
    let generator = components::binary(release.group(), "resource-generator")?;
    let mut documents = vec![namespace()];
    for kind in ["kv", "operator-rbac", "priorityclass"] {
        let arguments = [format!("--type={kind}"), format!("--namespace={NAMESPACE}")];
        documents.extend(run_for_yaml(&generator, &arguments).await?);
    }
    documents.push(deployment(release));
    Ok(documents)
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

/// Waits until both replicas are ready.
pub(crate) async fn ready(client: &Client, timeout: Duration, logs: &Path) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let ready = kube::runtime::wait::await_condition(deployments, NAME, |deployment: Option<&Deployment>| {
        deployment.is_some_and(|deployment| {
            let replicas = deployment.spec.as_ref().and_then(|spec| spec.replicas);
            replicas.is_some() && deployment.status.as_ref().and_then(|status| status.ready_replicas) == replicas
        })
    });
    match tokio::time::timeout(timeout, ready).await {
        Ok(result) => result.map(|_| ()).context("watching virt-operator's Deployment"),
        Err(_) => bail!("virt-operator did not become ready within {timeout:?}; {}", describe_pods(client, logs).await),
    }
}

/// Resolves with an error if the operator's Deployment exists and none of its pods became ready within `timeout`, and
/// never otherwise. It ignores an operator that runs without a Deployment.
pub(crate) async fn never_ready(client: &Client, timeout: Duration, logs: &Path) -> anyhow::Error {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let ready = kube::runtime::wait::await_condition(deployments.clone(), NAME, |deployment: Option<&Deployment>| {
        deployment.and_then(|deployment| deployment.status.as_ref()?.ready_replicas).is_some_and(|ready| ready > 0)
    });
    if let Err(_elapsed) = tokio::time::timeout(timeout, ready).await
        && let Ok(Some(_)) = deployments.get_opt(NAME).await
    {
        let pods = describe_pods(client, logs).await;
        return anyhow!("virt-operator did not become ready within {timeout:?} and cannot install KubeVirt; {pods}");
    }
    std::future::pending().await
}

/// The operator's pods and the end of their logs, on one line.
async fn describe_pods(client: &Client, logs: &Path) -> String {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let selection = ListParams::default().labels(&format!("kubevirt.io={NAME}"));
    let pods = api.list(&selection).await.map(|list| list.items).unwrap_or_default();
    if pods.is_empty() {
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
        format!("pod {} was restarted {restarts} times, end of its log: {}", pod.name_any(), log_tail(&log))
    };
    pods.iter().map(describe).collect::<Vec<_>>().join("; ")
}

/// The YAML documents that a program prints.
async fn run_for_yaml(program: &Path, arguments: &[impl AsRef<OsStr>]) -> Result<Vec<Value>> {
    let what = || {
        let words = arguments.iter().map(|word| word.as_ref().to_string_lossy().into_owned());
        format!("{} {}", program.display(), words.collect::<Vec<_>>().join(" "))
    };
    let output = tokio::process::Command::new(program)
        .args(arguments)
        .output()
        .await
        .with_context(|| format!("running {}", what()))?;
    if !output.status.success() {
        bail!("{} failed: {}", what(), String::from_utf8_lossy(&output.stderr).trim());
    }
    manifests::parse(&String::from_utf8_lossy(&output.stdout)).with_context(what)
}

fn deployment(release: KubeVirtRelease) -> Value {
    let image = format!("quay.io/kubevirt/virt-operator:{}", release.version());
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
                            {"name": "VIRT_OPERATOR_IMAGE", "value": image},
                            {"name": "WATCH_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['olm.targetNamespaces']"}}},
                            {"name": "KUBEVIRT_VERSION", "value": release.version()},
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
