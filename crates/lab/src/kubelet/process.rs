//! Pods with a real process: KubeVirt's virt-api, virt-controller and virt-operator, and our own operators.
//!
//! Each uses the token of its own service account, for two reasons: virt-api silently drops VMI status that is not
//! written by KubeVirt's service accounts, and the tests prove that the installed RBAC is sufficient.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use kube::{Client, ResourceExt};
use tokio::{process::Child, task::JoinSet};

use super::volumes::{self, VolumeUpdates};
use crate::{
    components::{self, ComponentGroup},
    credentials::{Credentials, service_account_credentials},
    launch::Launch,
    server_process::ServerCommand,
};

const SERVICE_ACCOUNT_FOLDER: &str = "var/run/secrets/kubernetes.io/serviceaccount";

/// The programs with a `--listen` option: KubeVirt's, and our replacement for one of them.
const LISTENERS: [&str; 3] = ["virt-api", "virt-controller", "virt-operator"];

/// One of our programs, and the image that contains it.
#[derive(Clone, Debug)]
pub struct OwnProgram {
    /// Matches the image's repository, without registry and tag: `vitistack/virt-operator`.
    pub image: String,
    pub file: PathBuf,
}

impl OwnProgram {
    /// Whether a container with this image and command runs this program. An image may contain several programs, and
    /// the file names of these are their commands.
    fn is_run_by(&self, repository: &str, command: Option<&str>, own: &[OwnProgram]) -> bool {
        let is_of_image = |program: &OwnProgram| repository.ends_with(&program.image);
        let is_alone = own.iter().filter(|program| is_of_image(program)).count() == 1;
        is_of_image(self) && (is_alone || self.file.file_name().and_then(|name| name.to_str()) == command)
    }
}

/// The executable for a container's image and command. None if the container is only simulated.
pub(crate) fn program_of(container: &Container, own: &[OwnProgram]) -> Option<Result<PathBuf>> {
    let image = container.image.as_deref().unwrap_or_default();
    let (repository, tag) = split_image(image);
    let command = container.command.as_ref().and_then(|command| Path::new(command.first()?).file_name()?.to_str());
    if let Some(program) = own.iter().find(|program| program.is_run_by(repository, command, own)) {
        return Some(Ok(program.file.clone()));
    }
    let name = command?;
    if !LISTENERS.contains(&name) {
        return None;
    }
    // Tests rename images and use digests. Only the previous release must be distinguished.
    let group = if tag == Some("v1.7.0") { ComponentGroup::KubeVirtPrevious } else { ComponentGroup::KubeVirt };
    Some(components::binary(group, name))
}

/// `registry:5000/a/b:tag@sha256:…` → (`registry:5000/a/b`, `tag`)
pub(crate) fn split_image(image: &str) -> (&str, Option<&str>) {
    let undigested = image.split('@').next().unwrap_or_default();
    let slash = undigested.rfind('/').map_or(0, |slash| slash + 1);
    match undigested.get(slash..).and_then(|name| name.find(':')) {
        Some(colon) => (undigested.get(..slash + colon).unwrap_or_default(), undigested.get(slash + colon + 1..)),
        None => (undigested, None),
    }
}

/// Everything that is kept when the process is restarted.
pub(crate) struct PodProcess {
    command: ServerCommand,
    /// The tasks that update the volumes.
    _volumes: JoinSet<()>,
}

pub(crate) struct ProcessContext<'a> {
    pub(crate) admin: &'a Credentials,
    pub(crate) client: &'a Client,
    pub(crate) folder: &'a Path,
    pub(crate) volume_updates: VolumeUpdates,
}

impl PodProcess {
    pub(crate) async fn prepare(
        context: &ProcessContext<'_>,
        pod: &Pod,
        address: IpAddr,
        program: PathBuf,
    ) -> Result<Self> {
        let namespace = pod.namespace().unwrap_or_default();
        let spec = pod.spec.clone().unwrap_or_default();
        let container = spec.containers.first().context("the pod has no container")?;
        let root = context.folder.join("pods").join(pod.uid().unwrap_or_default());
        std::fs::create_dir_all(root.join("tmp")).context("creating the pod's root folder")?;
        let volumes = volumes::mount(context.client, pod, &root, &context.volume_updates).await?;

        let account = spec.service_account_name.as_deref().unwrap_or("default");
        let identity =
            service_account_credentials(context.admin, context.client, &namespace, account, Some(pod)).await?;
        let secrets = root.join(SERVICE_ACCOUNT_FOLDER);
        std::fs::create_dir_all(&secrets).context("creating the service account's folder")?;
        for (name, text) in identity.in_cluster_files(&namespace) {
            std::fs::write(secrets.join(name), text)
                .with_context(|| format!("writing the service account's {name}"))?;
        }

        let name = pod.name_any();
        let launch = Launch {
            hostname: name.clone(),
            root,
            arguments: arguments(container, &program, address),
            program,
            name: container
                .command
                .as_ref()
                .and_then(|command| command.first())
                .cloned()
                .unwrap_or_else(|| container.name.clone()),
            environment: environment(container, pod, address, identity.server),
        };
        let (file, environment) = launch.command()?;
        let command = ServerCommand {
            name: format!("pod {namespace}/{name}"),
            program: file,
            arguments: Vec::new(),
            environment,
            log: pod_log(&context.folder.join("logs"), &namespace, &name),
            restarts: false,
        };
        Ok(PodProcess { command, _volumes: volumes })
    }

    pub(crate) fn spawn(&self) -> Result<Child> {
        self.command.spawn()
    }
}

/// The log file of a pod's process.
pub(crate) fn pod_log(logs: &Path, namespace: &str, name: &str) -> PathBuf {
    logs.join(format!("pod-{namespace}-{name}.log"))
}

/// Several programs listen on the same port. Those with a `--listen` option get the address of their pod.
fn arguments(container: &Container, program: &Path, address: IpAddr) -> Vec<String> {
    let command = container.command.clone().unwrap_or_default();
    let mut arguments: Vec<String> =
        command.into_iter().skip(1).chain(container.args.clone().unwrap_or_default()).collect();
    let knows_listen = program.file_name().is_some_and(|name| LISTENERS.iter().any(|listener| name == *listener));
    if knows_listen && container.ports.as_ref().is_some_and(|ports| !ports.is_empty()) {
        arguments.extend(["--listen".to_owned(), address.to_string()]);
    }
    arguments
}

fn environment(
    container: &Container,
    pod: &Pod,
    address: IpAddr,
    server: std::net::SocketAddr,
) -> Vec<(String, String)> {
    let mut environment = vec![
        ("HOSTNAME".to_owned(), pod.name_any()),
        ("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned()),
        ("KUBERNETES_SERVICE_HOST".to_owned(), server.ip().to_string()),
        ("KUBERNETES_SERVICE_PORT".to_owned(), server.port().to_string()),
        // kubevirt-operator has no option `--listen`, and by default listens on every address.
        ("METRICS_BIND_ADDRESS".to_owned(), format!("{address}:8080")),
        ("HEALTH_PROBE_BIND_ADDRESS".to_owned(), format!("{address}:8081")),
    ];
    environment.extend(container.env.iter().flatten().map(|variable| {
        (variable.name.clone(), variable.value.clone().unwrap_or_else(|| field(variable, pod, address)))
    }));
    environment
}

/// The part of the downward API that the programs use.
fn field(variable: &EnvVar, pod: &Pod, address: IpAddr) -> String {
    let path =
        variable.value_from.as_ref().and_then(|from| from.field_ref.as_ref()).map(|field| field.field_path.as_str());
    let spec = pod.spec.as_ref();
    match path {
        Some("metadata.name") => pod.name_any(),
        Some("metadata.namespace") => pod.namespace().unwrap_or_default(),
        Some("metadata.uid") => pod.uid().unwrap_or_default(),
        Some("status.podIP") => address.to_string(),
        Some("spec.nodeName") => spec.and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        Some("spec.serviceAccountName") => spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        Some(path) => path
            .strip_prefix("metadata.annotations['")
            .and_then(|rest| rest.strip_suffix("']"))
            .and_then(|key| pod.annotations().get(key).cloned())
            .unwrap_or_default(),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_split_into_repository_and_tag() {
        for (image, expected) in [
            ("quay.io/kubevirt/virt-api:v1.8.4", ("quay.io/kubevirt/virt-api", Some("v1.8.4"))),
            ("registry:5000/virt-api", ("registry:5000/virt-api", None)),
            ("registry:5000/virt-api:x@sha256:abc", ("registry:5000/virt-api", Some("x"))),
            ("virt-api@sha256:abc", ("virt-api", None)),
        ] {
            assert_eq!(split_image(image), expected, "{image}");
        }
    }

    #[test]
    fn only_programs_with_a_listen_option_get_it() {
        let container: Container = serde_json::from_value(serde_json::json!({
            "name": "x", "command": ["program", "--a"], "args": ["--b"], "ports": [{"containerPort": 8443}],
        }))
        .unwrap();
        let address: IpAddr = [10, 1, 2, 0].into();
        let arguments_of = |program: &str| arguments(&container, Path::new(program), address);
        assert_eq!(arguments_of("/parts/virt-api"), ["--a", "--b", "--listen", "10.1.2.0"]);
        assert_eq!(arguments_of("/target/debug/virt-operator"), ["--a", "--b", "--listen", "10.1.2.0"]);
        assert_eq!(arguments_of("/target/debug/kubevirt-operator"), ["--a", "--b"]);
    }

    #[test]
    fn the_downward_api_provides_annotations() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "p", "annotations": {"olm.targetNamespaces": "a,b"}},
        }))
        .unwrap();
        let variable = |path: &str| -> EnvVar {
            serde_json::from_value(serde_json::json!({"name": "X", "valueFrom": {"fieldRef": {"fieldPath": path}}}))
                .unwrap()
        };
        let address: IpAddr = [10, 1, 2, 0].into();
        assert_eq!(field(&variable("metadata.annotations['olm.targetNamespaces']"), &pod, address), "a,b");
        assert_eq!(field(&variable("status.podIP"), &pod, address), "10.1.2.0");
        assert_eq!(field(&variable("metadata.annotations['none']"), &pod, address), "");
    }
}
