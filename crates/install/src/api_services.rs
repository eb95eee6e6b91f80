//! The aggregated APIs of virt-api: console, pause, migrate and other subresources.

use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::{APIService, APIServiceSpec, ServiceReference};

use crate::{
    certificates,
    config::DeploymentConfig,
    metadata::{cluster_scoped, with_annotations},
    names::{VIRT_API, annotation, label},
};

const GROUP: &str = "subresources.kubevirt.io";

pub(crate) fn api_services(config: &DeploymentConfig) -> Vec<APIService> {
    let labels = [(label::APP, "virt-api-aggregator")];
    let annotations = [(annotation::CERTIFICATE_SECRET, certificates::VIRT_API)];
    ["v1", "v1alpha3"]
        .map(|version| APIService {
            metadata: with_annotations(cluster_scoped(&format!("{version}.{GROUP}"), &labels), &annotations),
            spec: Some(spec(GROUP, version, &config.namespace, VIRT_API)),
            status: None,
        })
        .into()
}

pub(crate) fn spec(group: &str, version: &str, namespace: &str, service: &str) -> APIServiceSpec {
    APIServiceSpec {
        group: Some(group.to_owned()),
        version: Some(version.to_owned()),
        service: Some(ServiceReference {
            namespace: Some(namespace.to_owned()),
            name: Some(service.to_owned()),
            port: None,
        }),
        group_priority_minimum: 1000,
        version_priority: 15,
        ..APIServiceSpec::default()
    }
}
