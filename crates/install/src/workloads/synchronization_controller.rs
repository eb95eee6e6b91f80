//! virt-synchronization-controller: synchronizes the state of a migration with another cluster. Only with the feature
//! gate DecentralizedLiveMigration.

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Container, Probe},
};

use super::{
    Component, PORT, VERBOSITY, container, from_field, join_migration_network, port, probe, requests, unprivileged_pod,
};
use crate::{
    certificates::{SYNCHRONIZATION_CLIENT, SYNCHRONIZATION_SERVER},
    config::DeploymentConfig,
    metadata::strings,
    names::{self, SYNCHRONIZATION_SERVICE_ACCOUNT, label},
};

const SHORT_NAME: &str = "sync";

pub(super) fn deployment(config: &DeploymentConfig) -> Deployment {
    let name = names::VIRT_SYNCHRONIZATION_CONTROLLER;
    let number = config.synchronization_port();
    let mut container = Container {
        command: Some(strings(&[name, "--v", VERBOSITY, "--port", &number.to_string()])),
        ports: Some(vec![port("metrics", PORT), port(SHORT_NAME, number)]),
        readiness_probe: Some(Probe { period_seconds: Some(10), ..probe("/healthz") }),
        resources: Some(requests("5m", "150Mi")),
        ..container(config, SHORT_NAME, config.image(&config.images.virt_synchronization_controller_image, name))
    };
    container.env.get_or_insert_default().push(from_field("MY_POD_IP", "status.podIP"));
    let mut deployment = Component {
        name,
        container,
        service_account: SYNCHRONIZATION_SERVICE_ACCOUNT,
        security: unprivileged_pod(false),
        certificates: &[
            (SYNCHRONIZATION_CLIENT, "/etc/virt-sync-controller/clientcertificates"),
            (SYNCHRONIZATION_SERVER, "/etc/virt-sync-controller/servercertificates"),
        ],
        anti_affinity_to: name,
    }
    .deployment(config);
    if let Some(metadata) = deployment.spec.as_mut().and_then(|spec| spec.template.metadata.as_mut()) {
        // It serves no metrics.
        metadata.labels.get_or_insert_default().remove(label::PROMETHEUS);
        join_migration_network(metadata, config);
    }
    deployment
}
