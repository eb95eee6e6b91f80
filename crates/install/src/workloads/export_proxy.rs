//! virt-exportproxy: serves exports of disks outside the cluster. Only with the feature gate VMExport.

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Container, Probe},
};

use super::{Component, PORT, PORT_TEXT, VERBOSITY, container, port, probe, requests, unprivileged_pod};
use crate::{
    certificates::VIRT_EXPORT_PROXY,
    config::DeploymentConfig,
    metadata::strings,
    names::{self, EXPORT_PROXY_SERVICE_ACCOUNT},
};

const SHORT_NAME: &str = "exportproxy";

pub(super) fn deployment(config: &DeploymentConfig) -> Deployment {
    let name = names::VIRT_EXPORT_PROXY;
    Component {
        name,
        container: Container {
            command: Some(strings(&[name, "--port", PORT_TEXT, "-v", VERBOSITY])),
            ports: Some(vec![port(SHORT_NAME, PORT), port("metrics", PORT)]),
            readiness_probe: Some(Probe { period_seconds: Some(10), ..probe("/healthz") }),
            resources: Some(requests("5m", "150Mi")),
            // The name of a port has at most 15 characters, and the container has the name of its port.
            ..container(config, SHORT_NAME, config.image(&config.images.virt_export_proxy_image, name))
        },
        service_account: EXPORT_PROXY_SERVICE_ACCOUNT,
        security: unprivileged_pod(false),
        certificates: &[(VIRT_EXPORT_PROXY, "/etc/virt-exportproxy/certificates")],
        // Anti-affinity to another component, as in upstream virt-operator.
        anti_affinity_to: names::VIRT_API,
    }
    .deployment(config)
}
