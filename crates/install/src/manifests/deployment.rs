//! The Deployment of the operator.
//!
//! It differs from that of upstream virt-operator where the program does: it requests less memory, has other health
//! endpoints, and reads its certificate from the API server, so it mounts none. It only prefers the control plane: in a
//! cluster without such nodes the operator must run to report that KubeVirt's components cannot be scheduled.

use k8s_openapi::{
    api::{
        apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy},
        core::v1::{Container, EnvVar, LocalObjectReference, PodSpec, PodTemplateSpec, Probe, SecurityContext},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use vitivirt_api::KUBEVIRT_REGISTRY;

use crate::{
    RELEASE,
    metadata::{label_selector, namespaced, string_map, strings, with_annotations},
    names::{OPERATOR_SERVICE_ACCOUNT, VIRT_OPERATOR, annotation, label},
    placement::{DefaultPlacement, place},
    workloads::{
        PORT, PORT_TEXT, PRIORITY_CLASS, VERBOSITY, anti_affinity, critical_addons_toleration, from_field, port,
        requests, unprivileged, unprivileged_pod,
    },
};

const WEBHOOK_PORT: i32 = 8444;

pub(super) fn deployment(namespace: &str, image: &str, image_pull_secrets: &[String]) -> Deployment {
    let ours = (label::APP, VIRT_OPERATOR);
    Deployment {
        metadata: namespaced(namespace, VIRT_OPERATOR, &[ours]),
        spec: Some(DeploymentSpec {
            replicas: Some(2),
            selector: label_selector(&[ours]),
            strategy: Some(DeploymentStrategy {
                type_: Some("RollingUpdate".to_owned()),
                ..DeploymentStrategy::default()
            }),
            template: template(image, image_pull_secrets),
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

fn template(image: &str, image_pull_secrets: &[String]) -> PodTemplateSpec {
    let labels = [
        (label::APP, VIRT_OPERATOR),
        ("name", VIRT_OPERATOR),
        (label::PROMETHEUS, "true"),
        (label::MAY_REACH_CLUSTER_SERVICES, "true"),
    ];
    let metadata =
        ObjectMeta { name: Some(VIRT_OPERATOR.to_owned()), labels: Some(string_map(&labels)), ..ObjectMeta::default() };
    let pull_secrets = image_pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    let mut pod = PodSpec {
        image_pull_secrets: (!image_pull_secrets.is_empty()).then(|| pull_secrets.collect()),
        priority_class_name: Some(PRIORITY_CLASS.to_owned()),
        affinity: Some(anti_affinity(VIRT_OPERATOR)),
        tolerations: Some(vec![critical_addons_toleration()]),
        service_account_name: Some(OPERATOR_SERVICE_ACCOUNT.to_owned()),
        security_context: Some(unprivileged_pod(true)),
        containers: vec![container(image)],
        ..PodSpec::default()
    };
    place(&mut pod, None, DefaultPlacement::PreferControlPlane);
    PodTemplateSpec {
        metadata: Some(with_annotations(metadata, &[(annotation::REQUIRED_SCC, "restricted-v2")])),
        spec: Some(pod),
    }
}

fn container(image: &str) -> Container {
    let variable = |name: &str, value: String| EnvVar { name: name.to_owned(), value: Some(value), value_from: None };
    Container {
        name: VIRT_OPERATOR.to_owned(),
        image: Some(image.to_owned()),
        image_pull_policy: Some("IfNotPresent".to_owned()),
        command: Some(strings(&[VIRT_OPERATOR])),
        args: Some(strings(&["--port", PORT_TEXT, "-v", VERBOSITY])),
        env: Some(vec![
            // KubeVirt's images are derived from it, so it is the image of upstream virt-operator.
            variable("VIRT_OPERATOR_IMAGE", format!("{KUBEVIRT_REGISTRY}/{VIRT_OPERATOR}:{RELEASE}")),
            variable("KUBEVIRT_VERSION", RELEASE.to_owned()),
            from_field("NAMESPACE", "metadata.namespace"),
            from_field("POD_NAME", "metadata.name"),
        ]),
        ports: Some(vec![port("metrics", PORT), port("webhooks", WEBHOOK_PORT)]),
        liveness_probe: Some(probe("/healthz")),
        readiness_probe: Some(probe("/readyz")),
        resources: Some(requests("10m", "40Mi")),
        security_context: Some(SecurityContext { read_only_root_filesystem: Some(true), ..unprivileged() }),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

fn probe(path: &str) -> Probe {
    Probe { initial_delay_seconds: Some(5), timeout_seconds: Some(10), ..crate::workloads::probe(path) }
}
