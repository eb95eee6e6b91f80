//! virt-api: validates and mutates the objects of users, and serves the subresources of VMs.

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Container, Probe},
};

use super::{Component, PORT, PORT_TEXT, VERBOSITY, container, port, probe, requests, unprivileged, unprivileged_pod};
use crate::{
    certificates::{VIRT_API, VIRT_HANDLER_CLIENT},
    config::DeploymentConfig,
    metadata::strings,
    names::{self, API_SERVICE_ACCOUNT},
};

pub(super) fn deployment(config: &DeploymentConfig) -> Deployment {
    let name = names::VIRT_API;
    let arguments = ["--port", PORT_TEXT, "--console-server-port", "8186", "--subresources-only", "-v", VERBOSITY];
    Component {
        name,
        container: Container {
            command: Some(strings(&[name])),
            args: Some(strings(&arguments)),
            ports: Some(vec![port(name, PORT), port("metrics", PORT)]),
            readiness_probe: Some(Probe {
                period_seconds: Some(10),
                ..probe("/apis/subresources.kubevirt.io/v1/healthz")
            }),
            resources: Some(requests("5m", "500Mi")),
            security_context: Some(unprivileged()),
            ..container(config, name, config.image(&config.images.virt_api_image, name))
        },
        service_account: API_SERVICE_ACCOUNT,
        security: unprivileged_pod(true),
        certificates: &[
            (VIRT_API, "/etc/virt-api/certificates"),
            (VIRT_HANDLER_CLIENT, "/etc/virt-handler/clientcertificates"),
        ],
        anti_affinity_to: name,
    }
    .deployment(config)
}
