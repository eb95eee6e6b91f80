//! The Services for metrics, virt-api, the webhooks of the operator and virt-exportproxy.

use k8s_openapi::{
    api::core::v1::{Service, ServicePort, ServiceSpec},
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};

use crate::{
    config::DeploymentConfig,
    metadata::{namespaced, string_map},
    names::{OPERATOR_WEBHOOK_SERVICE, VIRT_API, VIRT_EXPORT_PROXY, VIRT_OPERATOR, label},
};

const SCRAPED: (&str, &str) = (label::PROMETHEUS, "true");

pub(crate) fn services(config: &DeploymentConfig) -> Vec<Service> {
    let namespace = &config.namespace;
    let ours = [(label::APP, ""), SCRAPED];
    let mut metrics = service(
        namespaced(namespace, "kubevirt-prometheus-metrics", &ours),
        SCRAPED,
        port(Some("metrics"), IntOrString::String("metrics".to_owned())),
    );
    // Prometheus scrapes every pod, so the Service is headless.
    if let Some(spec) = &mut metrics.spec {
        spec.cluster_ip = Some("None".to_owned());
    }
    let component = |name: &str| {
        let selected = (label::APP, name);
        service(namespaced(namespace, name, &[selected]), selected, port(None, IntOrString::Int(8443)))
    };
    let webhook = service(
        namespaced(namespace, OPERATOR_WEBHOOK_SERVICE, &ours),
        (label::APP, VIRT_OPERATOR),
        port(Some("webhooks"), IntOrString::String("webhooks".to_owned())),
    );
    vec![metrics, component(VIRT_API), webhook, component(VIRT_EXPORT_PROXY)]
}

fn service(metadata: ObjectMeta, selected: (&str, &str), port: ServicePort) -> Service {
    Service {
        metadata,
        spec: Some(ServiceSpec {
            selector: Some(string_map(&[selected])),
            ports: Some(vec![port]),
            type_: Some("ClusterIP".to_owned()),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

fn port(name: Option<&str>, target: IntOrString) -> ServicePort {
    ServicePort {
        name: name.map(ToOwned::to_owned),
        port: 443,
        target_port: Some(target),
        protocol: Some("TCP".to_owned()),
        ..ServicePort::default()
    }
}
