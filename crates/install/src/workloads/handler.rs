//! virt-handler: manages the VMIs of its node. The only privileged component, on every node.

use k8s_openapi::api::{
    apps::v1::{DaemonSet, DaemonSetSpec, DaemonSetUpdateStrategy},
    core::v1::{
        Container, DownwardAPIVolumeFile, DownwardAPIVolumeSource, EnvVar, HostPathVolumeSource, ObjectFieldSelector,
        PodSpec, Probe, ResourceRequirements, SELinuxOptions, SecurityContext, Volume, VolumeMount,
    },
};

use super::{
    PORT, PORT_TEXT, VERBOSITY, container, from_field, join_migration_network, mount, mount_certificate, mount_profile,
    pod_template, port, probe, quantities, requests,
};
use crate::{
    certificates::{VIRT_HANDLER_CLIENT, VIRT_HANDLER_MIGRATION, VIRT_HANDLER_SERVER, VIRT_HANDLER_VSOCK},
    config::DeploymentConfig,
    metadata::{label_selector, namespaced, string_map, strings, with_annotations},
    names::{HANDLER_SERVICE_ACCOUNT, VIRT_HANDLER, annotation, label},
};

const NODE_LABELLER: &str = "/var/lib/kubevirt-node-labeller";
const RESERVATIONS: &str = "/var/run/kubevirt/daemons/pr";
const BIDIRECTIONAL: Option<&str> = Some("Bidirectional");

/// Name, path on the node, path in the container, and mount propagation.
const HOST_PATHS: [(&str, &str, &str, Option<&str>); 6] = [
    ("libvirt-runtimes", "/var/run/kubevirt-libvirt-runtimes", "/var/run/kubevirt-libvirt-runtimes", None),
    ("virt-share-dir", "/var/run/kubevirt", "/var/run/kubevirt", BIDIRECTIONAL),
    ("virt-private-dir", "/var/run/kubevirt-private", "/var/run/kubevirt-private", None),
    // Short, because the path of a socket is limited to 108 characters.
    ("kubelet-pods", "/var/lib/kubelet/pods", "/pods", None),
    ("kubelet", "/var/lib/kubelet", "/var/lib/kubelet", BIDIRECTIONAL),
    ("node-labeller", NODE_LABELLER, NODE_LABELLER, None),
];

pub(crate) fn handler(config: &DeploymentConfig) -> DaemonSet {
    let image = config.image(&config.images.virt_handler_image, VIRT_HANDLER);
    let mut template = pod_template(config, VIRT_HANDLER, handler_container(config, image), None);
    if let Some(metadata) = &mut template.metadata {
        *metadata = with_annotations(std::mem::take(metadata), &[(annotation::REQUIRED_SCC, "kubevirt-handler")]);
        join_migration_network(metadata, config);
    }
    if let Some(pod) = &mut template.spec {
        add_volumes(pod, config);
    }
    let labels = [(label::APP, VIRT_HANDLER), (label::CHECKS_MIGRATION_NAMES, "true")];
    let mut metadata = namespaced(&config.namespace, VIRT_HANDLER, &labels);
    metadata.labels.get_or_insert_default().extend(string_map(&config.product_labels()));
    DaemonSet {
        metadata,
        spec: Some(DaemonSetSpec {
            selector: label_selector(&[(label::APP, VIRT_HANDLER)]),
            template,
            update_strategy: Some(DaemonSetUpdateStrategy {
                type_: Some("RollingUpdate".to_owned()),
                rolling_update: None,
            }),
            ..DaemonSetSpec::default()
        }),
        status: None,
    }
}

fn handler_container(config: &DeploymentConfig, image: String) -> Container {
    let arguments = [
        "--port",
        PORT_TEXT,
        "--hostname-override",
        "$(NODE_NAME)",
        "--pod-ip-address",
        "$(MY_POD_IP)",
        "--max-metric-requests",
        "3",
        "--console-server-port",
        "8186",
        "--graceful-shutdown-seconds",
        "315",
        "-v",
        VERBOSITY,
    ];
    let mut container = Container {
        command: Some(strings(&[VIRT_HANDLER])),
        args: Some(strings(&arguments)),
        ports: Some(vec![port("metrics", PORT)]),
        security_context: Some(SecurityContext {
            privileged: Some(true),
            se_linux_options: Some(SELinuxOptions { level: Some("s0".to_owned()), ..SELinuxOptions::default() }),
            ..SecurityContext::default()
        }),
        liveness_probe: Some(Probe {
            timeout_seconds: Some(10),
            period_seconds: Some(45),
            failure_threshold: Some(3),
            ..probe("/healthz")
        }),
        readiness_probe: Some(Probe { timeout_seconds: Some(10), period_seconds: Some(20), ..probe("/healthz") }),
        resources: Some(requests("10m", "325Mi")),
        ..container(config, VIRT_HANDLER, image)
    };
    let environment = [from_field("NODE_NAME", "spec.nodeName"), from_field("MY_POD_IP", "status.podIP")];
    container.env.get_or_insert_default().extend(environment);
    container
}

fn add_volumes(pod: &mut PodSpec, config: &DeploymentConfig) {
    pod.service_account_name = Some(HANDLER_SERVICE_ACCOUNT.to_owned());
    pod.host_pid = Some(true);
    pod.init_containers = Some(vec![node_labeller(config)]);
    for (secret, path) in [
        (VIRT_HANDLER_CLIENT, "/etc/virt-handler/clientcertificates"),
        (VIRT_HANDLER_SERVER, "/etc/virt-handler/servercertificates"),
        (VIRT_HANDLER_MIGRATION, "/etc/virt-handler/migrationservercertificates"),
        (VIRT_HANDLER_VSOCK, "/etc/virt-handler/vsockclientcertificates"),
    ] {
        mount_certificate(pod, secret, path);
    }
    mount_profile(pod);
    for (name, on_node, in_container, propagation) in HOST_PATHS {
        mount(pod, host_path(name, on_node, None), host_mount(name, in_container, propagation));
    }
    mount(pod, pod_info(), host_mount("podinfo", "/etc/podinfo", None));
    if !config.pull_secrets().is_empty() {
        pod.containers.push(image_holder(config));
    }
    if config.persistent_reservation() {
        let directory = Some("DirectoryOrCreate");
        pod.volumes.get_or_insert_default().extend([
            host_path("pr-helper-socket-vol", RESERVATIONS, directory),
            host_path("dev-dir", "/dev", None),
            host_path("etc-multipath", "/etc/multipath", directory),
        ]);
        pod.containers.push(reservation_helper(config));
    }
}

/// Detects the features of the node, with the programs of the virt-launcher image.
fn node_labeller(config: &DeploymentConfig) -> Container {
    let (virt_type, device) = match config.hypervisor() {
        "hyperv-direct" => ("hyperv", "mshv"),
        _ => ("kvm", "kvm"),
    };
    let variable =
        |(name, value): (&str, &str)| EnvVar { name: name.to_owned(), value: Some(value.to_owned()), value_from: None };
    Container {
        name: "virt-launcher".to_owned(),
        image: Some(config.launcher_image()),
        command: Some(strings(&["/bin/sh", "-c"])),
        args: Some(strings(&["node-labeller.sh"])),
        env: Some([("PREFERRED_VIRTTYPE", virt_type), ("HYPERVISOR_DEVICE", device)].map(variable).into()),
        security_context: Some(SecurityContext { privileged: Some(true), ..SecurityContext::default() }),
        volume_mounts: Some(vec![host_mount("node-labeller", NODE_LABELLER, None)]),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

/// With pull secrets, only virt-handler may be able to pull the virt-launcher image. A container that runs as long as
/// virt-handler keeps the image on the node, so that virt-launcher pods do not need the secrets.
fn image_holder(config: &DeploymentConfig) -> Container {
    Container {
        name: "virt-launcher-image-holder".to_owned(),
        image: Some(config.launcher_image()),
        image_pull_policy: Some("IfNotPresent".to_owned()),
        command: Some(strings(&["/bin/sh", "-c"])),
        args: Some(strings(&["sleep infinity"])),
        resources: Some(ResourceRequirements {
            limits: Some(quantities("100m", "20Mi")),
            ..ResourceRequirements::default()
        }),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

/// Manages SCSI reservations of VMIs that share disks. Only with the feature gate PersistentReservation.
fn reservation_helper(config: &DeploymentConfig) -> Container {
    let name = "pr-helper";
    Container {
        name: name.to_owned(),
        image: Some(config.image(&config.images.persistent_reservation_helper_image, name)),
        image_pull_policy: Some(config.pull_policy().to_owned()),
        command: Some(strings(&["/entrypoint.sh"])),
        args: Some(strings(&["-k", &format!("{RESERVATIONS}/pr-helper.sock")])),
        volume_mounts: Some(vec![
            host_mount("pr-helper-socket-vol", RESERVATIONS, BIDIRECTIONAL),
            host_mount("dev-dir", "/dev", Some("HostToContainer")),
            host_mount("etc-multipath", "/etc/multipath", BIDIRECTIONAL),
        ]),
        security_context: Some(SecurityContext {
            run_as_user: Some(0),
            privileged: Some(true),
            ..SecurityContext::default()
        }),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

fn host_path(name: &str, path: &str, kind: Option<&str>) -> Volume {
    let source = HostPathVolumeSource { path: path.to_owned(), type_: kind.map(ToOwned::to_owned) };
    Volume { name: name.to_owned(), host_path: Some(source), ..Volume::default() }
}

fn host_mount(name: &str, path: &str, propagation: Option<&str>) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        mount_propagation: propagation.map(ToOwned::to_owned),
        ..VolumeMount::default()
    }
}

/// Only earlier releases read it. A downgrade may run them in this pod.
fn pod_info() -> Volume {
    let item = DownwardAPIVolumeFile {
        path: "network-status".to_owned(),
        field_ref: Some(ObjectFieldSelector {
            field_path: "metadata.annotations['k8s.v1.cni.cncf.io/network-status']".to_owned(),
            api_version: None,
        }),
        ..DownwardAPIVolumeFile::default()
    };
    let source = DownwardAPIVolumeSource { items: Some(vec![item]), default_mode: None };
    Volume { name: "podinfo".to_owned(), downward_api: Some(source), ..Volume::default() }
}
