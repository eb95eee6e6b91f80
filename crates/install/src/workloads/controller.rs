//! virt-controller: creates the pods of VMIs and reconciles the other KubeVirt resources.

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Container, EnvVar, Probe},
};

use super::{Component, PORT, PORT_TEXT, VERBOSITY, container, port, probe, requests, unprivileged, unprivileged_pod};
use crate::{
    certificates::{BACKUP_CA, EXPORT_CA, VIRT_CONTROLLER},
    config::DeploymentConfig,
    metadata::strings,
    names::{self, CONTROLLER_SERVICE_ACCOUNT},
};

pub(super) fn deployment(config: &DeploymentConfig) -> Deployment {
    let name = names::VIRT_CONTROLLER;
    let launcher = config.launcher_image();
    let exporter = config.image(&config.images.virt_export_server_image, "virt-exportserver");
    let arguments =
        ["--launcher-image", &launcher, "--exporter-image", &exporter, "--port", PORT_TEXT, "-v", VERBOSITY];
    let mut container = Container {
        command: Some(strings(&[name])),
        args: Some(strings(&arguments)),
        ports: Some(vec![port("metrics", PORT)]),
        liveness_probe: Some(Probe { timeout_seconds: Some(10), failure_threshold: Some(8), ..probe("/healthz") }),
        readiness_probe: Some(Probe { timeout_seconds: Some(10), ..probe("/leader") }),
        resources: Some(requests("10m", "275Mi")),
        security_context: Some(unprivileged()),
        ..container(config, name, config.image(&config.images.virt_controller_image, name))
    };
    container.env.get_or_insert_default().push(EnvVar {
        name: "SIDECAR_SHIM_IMAGE".to_owned(),
        value: Some(config.image(&config.images.sidecar_shim_image, "sidecar-shim")),
        value_from: None,
    });
    Component {
        name,
        container,
        service_account: CONTROLLER_SERVICE_ACCOUNT,
        security: unprivileged_pod(true),
        certificates: &[
            (VIRT_CONTROLLER, "/etc/virt-controller/certificates"),
            (EXPORT_CA, "/etc/virt-controller/exportca"),
            (BACKUP_CA, "/etc/virt-controller/backupca"),
        ],
        anti_affinity_to: name,
    }
    .deployment(config)
}
