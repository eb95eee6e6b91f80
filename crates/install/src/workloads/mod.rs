//! The Deployments and the DaemonSet of KubeVirt's components, before placement, replicas and labels of the KubeVirt
//! resource are applied (`installation`). Common parts are here; each component has its own file.

mod api;
mod controller;
mod export_proxy;
mod handler;
mod synchronization_controller;

use k8s_openapi::{
    api::{
        apps::v1::{Deployment, DeploymentSpec},
        core::v1::{
            Affinity, Capabilities, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource,
            HTTPGetAction, ObjectFieldSelector, PodAffinityTerm, PodAntiAffinity, PodSecurityContext, PodSpec,
            PodTemplateSpec, Probe, ResourceRequirements, SeccompProfile, SecretVolumeSource, SecurityContext,
            Toleration, Volume, VolumeMount, WeightedPodAffinityTerm,
        },
    },
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{LabelSelector, LabelSelectorRequirement, ObjectMeta},
        util::intstr::IntOrString,
    },
};

use crate::{
    config::DeploymentConfig,
    metadata::{label_selector, namespaced, string_map, strings, with_annotations},
    names::{annotation, label},
};

pub(crate) use handler::handler;

pub(crate) const PORT: i32 = 8443;
pub(crate) const PORT_TEXT: &str = "8443";
/// The initial log verbosity of every component. The KubeVirt resource changes it at run time.
pub(crate) const VERBOSITY: &str = "2";
pub(crate) const PRIORITY_CLASS: &str = "kubevirt-cluster-critical";
const MIGRATION_INTERFACE: &str = "migration0";

pub(crate) fn deployments(config: &DeploymentConfig) -> Vec<Deployment> {
    vec![
        api::deployment(config),
        controller::deployment(config),
        export_proxy::deployment(config),
        synchronization_controller::deployment(config),
    ]
}

/// A pod with one container, to which each component adds its parts.
fn pod_template(
    config: &DeploymentConfig,
    name: &str,
    container: Container,
    affinity: Option<Affinity>,
) -> PodTemplateSpec {
    let mut labels =
        string_map(&[(label::APP, name), (label::PROMETHEUS, "true"), (label::MAY_REACH_CLUSTER_SERVICES, "true")]);
    labels.extend(string_map(&config.product_labels()));
    let pull_secrets = config.pull_secrets();
    PodTemplateSpec {
        metadata: Some(ObjectMeta { name: Some(name.to_owned()), labels: Some(labels), ..ObjectMeta::default() }),
        spec: Some(PodSpec {
            priority_class_name: Some(PRIORITY_CLASS.to_owned()),
            affinity,
            tolerations: Some(vec![critical_addons_toleration()]),
            image_pull_secrets: (!pull_secrets.is_empty()).then_some(pull_secrets),
            containers: vec![container],
            ..PodSpec::default()
        }),
    }
}

/// Components also run on nodes that are reserved for critical add-ons.
pub(crate) fn critical_addons_toleration() -> Toleration {
    Toleration {
        key: Some("CriticalAddonsOnly".to_owned()),
        operator: Some("Exists".to_owned()),
        ..Toleration::default()
    }
}

/// The parts of a Deployment that differ between components.
struct Component<'a> {
    name: &'a str,
    container: Container,
    service_account: &'a str,
    security: PodSecurityContext,
    /// Secrets and their mount paths.
    certificates: &'a [(&'a str, &'a str)],
    /// The component with whose pods this one has an anti-affinity.
    anti_affinity_to: &'a str,
}

impl Component<'_> {
    fn deployment(self, config: &DeploymentConfig) -> Deployment {
        let mut template = pod_template(config, self.name, self.container, Some(anti_affinity(self.anti_affinity_to)));
        let scc = [(annotation::REQUIRED_SCC, "restricted-v2")];
        template.metadata = template.metadata.map(|metadata| with_annotations(metadata, &scc));
        if let Some(pod) = &mut template.spec {
            for (secret, path) in self.certificates {
                mount_certificate(pod, secret, path);
            }
            mount_profile(pod);
            pod.service_account_name = Some(self.service_account.to_owned());
            pod.security_context = Some(self.security);
        }
        let mut metadata =
            namespaced(&config.namespace, self.name, &[(label::APP, self.name), (label::NAME, self.name)]);
        metadata.labels.get_or_insert_default().extend(string_map(&config.product_labels()));
        Deployment {
            metadata,
            spec: Some(DeploymentSpec {
                replicas: Some(2),
                selector: label_selector(&[(label::APP, self.name)]),
                template,
                ..DeploymentSpec::default()
            }),
            status: None,
        }
    }
}

/// The common part of the container of a component.
fn container(config: &DeploymentConfig, name: &str, image: String) -> Container {
    let environment = config.extra_environment();
    Container {
        name: name.to_owned(),
        image: Some(image),
        image_pull_policy: Some(config.pull_policy().to_owned()),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        env: (!environment.is_empty()).then_some(environment),
        ..Container::default()
    }
}

pub(crate) fn anti_affinity(component: &str) -> Affinity {
    let selector = LabelSelector {
        match_expressions: Some(vec![LabelSelectorRequirement {
            key: label::APP.to_owned(),
            operator: "In".to_owned(),
            values: Some(strings(&[component])),
        }]),
        match_labels: None,
    };
    Affinity {
        pod_anti_affinity: Some(PodAntiAffinity {
            preferred_during_scheduling_ignored_during_execution: Some(vec![WeightedPodAffinityTerm {
                weight: 1,
                pod_affinity_term: PodAffinityTerm {
                    label_selector: Some(selector),
                    topology_key: "kubernetes.io/hostname".to_owned(),
                    ..PodAffinityTerm::default()
                },
            }]),
            ..PodAntiAffinity::default()
        }),
        ..Affinity::default()
    }
}

fn mount(pod: &mut PodSpec, volume: Volume, mount: VolumeMount) {
    pod.volumes.get_or_insert_default().push(volume);
    if let Some(container) = pod.containers.first_mut() {
        container.volume_mounts.get_or_insert_default().push(mount);
    }
}

/// The Secret is optional, because the program waits for its certificate.
fn mount_certificate(pod: &mut PodSpec, secret: &str, path: &str) {
    let source = SecretVolumeSource {
        secret_name: Some(secret.to_owned()),
        optional: Some(true),
        ..SecretVolumeSource::default()
    };
    let volume = Volume { name: secret.to_owned(), secret: Some(source), ..Volume::default() };
    let at = VolumeMount {
        name: secret.to_owned(),
        mount_path: path.to_owned(),
        read_only: Some(true),
        ..VolumeMount::default()
    };
    mount(pod, volume, at);
}

fn mount_profile(pod: &mut PodSpec) {
    let name = || "profile-data".to_owned();
    let volume = Volume { name: name(), empty_dir: Some(EmptyDirVolumeSource::default()), ..Volume::default() };
    mount(pod, volume, VolumeMount { name: name(), mount_path: "/profile-data".to_owned(), ..VolumeMount::default() });
}

pub(crate) fn port(name: &str, number: i32) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: number,
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

/// The probe of every component, with an initial delay of 15 seconds.
pub(crate) fn probe(path: &str) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            scheme: Some("HTTPS".to_owned()),
            port: IntOrString::Int(PORT),
            path: Some(path.to_owned()),
            ..HTTPGetAction::default()
        }),
        initial_delay_seconds: Some(15),
        ..Probe::default()
    }
}

pub(crate) fn requests(cpu: &str, memory: &str) -> ResourceRequirements {
    ResourceRequirements { requests: Some(quantities(cpu, memory)), ..ResourceRequirements::default() }
}

pub(crate) fn quantities(cpu: &str, memory: &str) -> std::collections::BTreeMap<String, Quantity> {
    [("cpu", cpu), ("memory", memory)].map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned()))).into()
}

pub(crate) fn from_field(name: &str, path: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { field_path: path.to_owned(), api_version: None }),
            ..EnvVarSource::default()
        }),
        value: None,
    }
}

fn runtime_default() -> SeccompProfile {
    SeccompProfile { type_: "RuntimeDefault".to_owned(), localhost_profile: None }
}

/// A pod that does not run as root. The two older components also set a seccomp profile.
pub(crate) fn unprivileged_pod(seccomp: bool) -> PodSecurityContext {
    PodSecurityContext {
        run_as_non_root: Some(true),
        seccomp_profile: seccomp.then(runtime_default),
        ..PodSecurityContext::default()
    }
}

pub(crate) fn unprivileged() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities { drop: Some(strings(&["ALL"])), add: None }),
        seccomp_profile: Some(runtime_default()),
        ..SecurityContext::default()
    }
}

/// Connects the pod to the migration network.
fn join_migration_network(metadata: &mut ObjectMeta, config: &DeploymentConfig) {
    if let Some(network) = config.migration_network() {
        let networks = metadata.annotations.get_or_insert_default();
        networks.insert(annotation::NETWORKS.to_owned(), format!("{network}@{MIGRATION_INTERFACE}"));
    }
}
