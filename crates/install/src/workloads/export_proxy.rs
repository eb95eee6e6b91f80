//! virt-exportproxy: lets exports of disks be fetched from outside of the cluster. Only with the gate VMExport.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Container, Probe};

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
            // A port's name has at most fifteen characters, and the container is called like its port.
            ..container(config, SHORT_NAME, config.image(&config.images.virt_export_proxy_image, name))
        },
        service_account: EXPORT_PROXY_SERVICE_ACCOUNT,
        security: unprivileged_pod(false),
        certificates: &[(VIRT_EXPORT_PROXY, "/etc/virt-exportproxy/certificates")],
        // Not from its own kind: so it is in the release.
        apart_from: names::VIRT_API,
    }
    .deployment(config)
}
