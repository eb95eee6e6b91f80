//! Pods with a real process: KubeVirt's virt-api, virt-controller and virt-operator, and our own operators.
//!
//! Each uses the token of its own service account, for two reasons: virt-api silently drops VMI status that is not
//! written by KubeVirt's service accounts, and the tests prove that the installed RBAC is sufficient.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use kube::{Client, ResourceExt};
use tokio::{process::Child, task::JoinSet};

use super::{
    programs::{LISTENERS, PodProgram},
    volumes::{self, VolumeUpdates},
};
use crate::{
    addresses::loopback,
    credentials::{Credentials, service_account_credentials},
    image::ContainerImage,
    launch::{ContainerRoot, Launch},
    server_process::ServerCommand,
};

const SERVICE_ACCOUNT_FOLDER: &str = "var/run/secrets/kubernetes.io/serviceaccount";

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
        program: PodProgram,
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
            arguments: arguments(container, &program.file, address),
            name: container
                .command
                .as_ref()
                .and_then(|command| command.first())
                .cloned()
                .unwrap_or_else(|| container.name.clone()),
            environment: environment(container, pod, address, identity.server, program.image.as_ref()),
            container: program.image.as_ref().map(|image| container_root(image, container, pod)).transpose()?,
            program: program.file,
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
    image: Option<&ContainerImage>,
) -> Vec<(String, String)> {
    let mut environment: Vec<(String, String)> = match image {
        Some(image) => image.environment().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        None => vec![("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned())],
    };
    environment.extend([
        ("HOSTNAME".to_owned(), pod.name_any()),
        ("KUBERNETES_SERVICE_HOST".to_owned(), server.ip().to_string()),
        ("KUBERNETES_SERVICE_PORT".to_owned(), server.port().to_string()),
        // kubevirt-operator has no option `--listen`, and by default listens on every address.
        ("METRICS_BIND_ADDRESS".to_owned(), format!("{address}:8080")),
        ("HEALTH_PROBE_BIND_ADDRESS".to_owned(), format!("{address}:8081")),
        ("STATUS_BIND_ADDRESS".to_owned(), format!("{}:8082", loopback(address))),
    ]);
    environment.extend(container.env.iter().flatten().map(|variable| {
        let value = variable.value.clone().unwrap_or_else(|| field(variable, pod, address));
        (variable.name.clone(), listening_on(address, &variable.name, value))
    }));
    environment
}

/// All pods share the network of the lab. So a program that would listen on every address of its pod (`:8080`) listens
/// on the pod's own one.
fn listening_on(address: IpAddr, variable: &str, value: String) -> String {
    let is_port_alone = variable.ends_with("_BIND_ADDRESS") && value.starts_with(':');
    if is_port_alone { format!("{address}{value}") } else { value }
}

/// The security context of the pod and its container, as far as it changes how the program runs.
fn container_root(image: &ContainerImage, container: &Container, pod: &Pod) -> Result<ContainerRoot> {
    let of_container = container.security_context.clone().unwrap_or_default();
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.security_context.clone()).unwrap_or_default();
    let number = |given: Option<i64>, own: u32| match given {
        Some(given) => u32::try_from(given).with_context(|| format!("{given} is not a user or group")),
        None => Ok(own),
    };
    let user = number(of_container.run_as_user.or(of_pod.run_as_user), image.user.0)?;
    let non_root = of_container.run_as_non_root.or(of_pod.run_as_non_root).unwrap_or_default();
    ensure!(user != 0 || !non_root, "container has runAsNonRoot and image will run as root");
    Ok(ContainerRoot {
        files: image.root.clone(),
        user,
        group: number(of_container.run_as_group.or(of_pod.run_as_group), image.user.1)?,
        read_only: of_container.read_only_root_filesystem.unwrap_or_default(),
    })
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
    fn a_port_alone_becomes_the_address_of_the_pod() {
        let address: IpAddr = [10, 1, 2, 0].into();
        let listening = |name: &str, value: &str| listening_on(address, name, value.to_owned());
        assert_eq!(listening("METRICS_BIND_ADDRESS", ":9090"), "10.1.2.0:9090");
        assert_eq!(listening("METRICS_BIND_ADDRESS", "127.0.0.1:9090"), "127.0.0.1:9090");
        assert_eq!(listening("PATTERN", ":9090"), ":9090");
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
