//! The Deployments of virt-template.

use k8s_openapi::{
    api::{
        apps::v1::{Deployment, DeploymentSpec},
        core::v1::{
            Affinity, Capabilities, Container, ContainerPort, HTTPGetAction, KeyToPath, NodeAffinity, NodeSelector,
            NodeSelectorRequirement, NodeSelectorTerm, PodSpec, PodTemplateSpec, Probe, ResourceRequirements,
            SecretVolumeSource, SecurityContext, Volume, VolumeMount,
        },
    },
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};
use vitivirt_api::KUBEVIRT_REGISTRY;

use super::{API_SERVER, API_SERVER_ACCOUNT, CONTROLLER, CONTROLLER_ACCOUNT, NAME, VERSION, in_namespace};
use crate::{
    certificates::{TEMPLATE_API, TEMPLATE_METRICS, TEMPLATE_WEBHOOK},
    config::DeploymentConfig,
    metadata::{label_selector, string_map, strings},
    names::{VIRT_TEMPLATE_API_SERVER, VIRT_TEMPLATE_CONTROLLER, label},
    workloads::{quantities, unprivileged_pod},
};

pub(crate) const API_SERVER_CONTAINER: &str = "apiserver";
pub(crate) const CONTROLLER_CONTAINER: &str = "manager";

pub(crate) fn deployments(config: &DeploymentConfig) -> Vec<Deployment> {
    vec![api_server(config), controller(config)]
}

fn api_server(config: &DeploymentConfig) -> Deployment {
    let certificate = "/tmp/k8s-api-server/api-cert";
    let arguments = [
        "--disable-http2-serving",
        "--secure-port=9443",
        &format!("--tls-cert-file={certificate}/tls.crt"),
        &format!("--tls-private-key-file={certificate}/tls.key"),
    ];
    let container = Container {
        command: Some(strings(&["/apiserver"])),
        ports: Some(vec![port("api", 9443)]),
        volume_mounts: Some(vec![mount("api-cert", certificate)]),
        liveness_probe: Some(probe("/livez", 9443, Some("HTTPS"), 15, 20)),
        readiness_probe: Some(probe("/readyz", 9443, Some("HTTPS"), 5, 10)),
        ..container(
            config,
            API_SERVER_CONTAINER,
            image(config, &config.images.virt_template_apiserver_image, VIRT_TEMPLATE_API_SERVER),
            &arguments,
        )
    };
    let volumes = vec![secret("api-cert", TEMPLATE_API)];
    deployment(config, VIRT_TEMPLATE_API_SERVER, API_SERVER, API_SERVER_ACCOUNT, container, volumes)
}

fn controller(config: &DeploymentConfig) -> Deployment {
    let (metrics, webhook) = ("/tmp/k8s-metrics-server/metrics-certs", "/tmp/k8s-webhook-server/serving-certs");
    let arguments = [
        "--metrics-bind-address=:8443",
        "--leader-elect",
        "--health-probe-bind-address=:8081",
        &format!("--metrics-cert-path={metrics}"),
        &format!("--webhook-cert-path={webhook}"),
    ];
    let container = Container {
        command: Some(strings(&["/manager"])),
        ports: Some(vec![port("webhook-server", 9443)]),
        volume_mounts: Some(vec![mount("metrics-certs", metrics), mount("webhook-certs", webhook)]),
        liveness_probe: Some(probe("/healthz", 8081, None, 15, 20)),
        readiness_probe: Some(probe("/readyz", 8081, None, 5, 10)),
        ..container(
            config,
            CONTROLLER_CONTAINER,
            image(config, &config.images.virt_template_controller_image, VIRT_TEMPLATE_CONTROLLER),
            &arguments,
        )
    };
    let item = |key: &str| KeyToPath { key: key.to_owned(), path: key.to_owned(), mode: None };
    let mut metrics = secret("metrics-certs", TEMPLATE_METRICS);
    if let Some(source) = &mut metrics.secret {
        source.items = Some(vec![item("tls.crt"), item("tls.key")]);
        source.optional = Some(false);
    }
    let volumes = vec![secret("webhook-certs", TEMPLATE_WEBHOOK), metrics];
    deployment(config, VIRT_TEMPLATE_CONTROLLER, CONTROLLER, CONTROLLER_ACCOUNT, container, volumes)
}

/// An image with the registry and the prefix of the other images, but the version of virt-template.
fn image(config: &DeploymentConfig, given: &str, name: &str) -> String {
    let registry = match config.registry.as_str() {
        "" => KUBEVIRT_REGISTRY,
        registry => registry,
    };
    match given {
        "" => format!("{registry}/{}{name}:{}", config.image_prefix, VERSION.1),
        given => given.to_owned(),
    }
}

fn container(config: &DeploymentConfig, name: &str, image: String, arguments: &[&str]) -> Container {
    let environment = config.extra_environment();
    let mut arguments = strings(arguments);
    arguments.extend(strings(&["-v", "2"]));
    Container {
        name: name.to_owned(),
        image: Some(image),
        image_pull_policy: Some(config.pull_policy().to_owned()),
        args: Some(arguments),
        env: (!environment.is_empty()).then_some(environment),
        resources: Some(ResourceRequirements {
            requests: Some(quantities("10m", "64Mi")),
            limits: Some(quantities("500m", "128Mi")),
            ..ResourceRequirements::default()
        }),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities { drop: Some(strings(&["ALL"])), add: None }),
            ..SecurityContext::default()
        }),
        ..Container::default()
    }
}

fn deployment(
    config: &DeploymentConfig,
    name: &str,
    role: (&str, &str),
    account: &str,
    container: Container,
    volumes: Vec<Volume>,
) -> Deployment {
    let mut metadata = in_namespace(config, name);
    let labels = metadata.labels.get_or_insert_default();
    labels.extend(string_map(&[role]));
    labels.extend(string_map(&config.product_labels()));
    let mut pod_labels = string_map(&[(label::NAME, NAME), role, (label::MAY_REACH_CLUSTER_SERVICES, "true")]);
    pod_labels.extend(string_map(&config.product_labels()));
    let annotations = string_map(&[("kubectl.kubernetes.io/default-container", &container.name), VERSION]);
    let pull_secrets = config.pull_secrets();
    Deployment {
        metadata,
        spec: Some(DeploymentSpec {
            replicas: Some(1),
            selector: label_selector(&[(label::NAME, NAME), role]),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(pod_labels),
                    annotations: Some(annotations),
                    ..ObjectMeta::default()
                }),
                spec: Some(PodSpec {
                    affinity: Some(architecture_affinity()),
                    containers: vec![container],
                    image_pull_secrets: (!pull_secrets.is_empty()).then_some(pull_secrets),
                    security_context: Some(unprivileged_pod(true)),
                    service_account_name: Some(account.to_owned()),
                    termination_grace_period_seconds: Some(10),
                    volumes: Some(volumes),
                    ..PodSpec::default()
                }),
            },
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

/// The architectures of its images.
fn architecture_affinity() -> Affinity {
    let one_of = |key: &str, values: &[&str]| NodeSelectorRequirement {
        key: key.to_owned(),
        operator: "In".to_owned(),
        values: Some(strings(values)),
    };
    let term = NodeSelectorTerm {
        match_expressions: Some(vec![
            one_of("kubernetes.io/arch", &["amd64", "arm64", "s390x"]),
            one_of("kubernetes.io/os", &["linux"]),
        ]),
        match_fields: None,
    };
    Affinity {
        node_affinity: Some(NodeAffinity {
            required_during_scheduling_ignored_during_execution: Some(NodeSelector { node_selector_terms: vec![term] }),
            ..NodeAffinity::default()
        }),
        ..Affinity::default()
    }
}

fn port(name: &str, number: i32) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: number,
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

fn mount(name: &str, path: &str) -> VolumeMount {
    VolumeMount { name: name.to_owned(), mount_path: path.to_owned(), read_only: Some(true), ..VolumeMount::default() }
}

fn secret(name: &str, secret: &str) -> Volume {
    let source = SecretVolumeSource { secret_name: Some(secret.to_owned()), ..SecretVolumeSource::default() };
    Volume { name: name.to_owned(), secret: Some(source), ..Volume::default() }
}

fn probe(path: &str, port: i32, scheme: Option<&str>, delay: i32, period: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::Int(port),
            scheme: scheme.map(ToOwned::to_owned),
            ..HTTPGetAction::default()
        }),
        initial_delay_seconds: Some(delay),
        period_seconds: Some(period),
        ..Probe::default()
    }
}
