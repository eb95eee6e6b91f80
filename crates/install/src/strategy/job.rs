//! The Job that dumps the install strategy of another release: it runs the operator of that release once, which writes
//! its strategy to a ConfigMap.

use k8s_openapi::{
    api::{
        batch::v1::{Job, JobSpec},
        core::v1::{Capabilities, Container, EnvVar, PodSpec, PodTemplateSpec, SeccompProfile, SecurityContext},
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use vitivirt_api::{Body, Failure, ObjectKey, kubevirt::KubeVirt};

use crate::{
    RELEASE,
    config::DeploymentConfig,
    environment::Environment,
    images::OperatorImage,
    metadata::{string_map, strings},
    names::{STRATEGY_JOB_APP, annotation, label},
    placement::{self, DefaultPlacement},
};

/// Environment variables of the Job. Upstream virt-operator reads the first one.
pub mod variable {
    pub const CONFIG: &str = "TARGET_DEPLOYMENT_CONFIG";
    pub const NAMESPACE: &str = "TARGET_INSTALL_NAMESPACE";
    pub const PULL_POLICY: &str = "TARGET_IMAGE_PULL_POLICY";
    pub(crate) const OPERATOR_IMAGE: &str = "VIRT_OPERATOR_IMAGE";
}

/// Whether the resource asks for a release whose data this program does not contain. The tag of the operator's image
/// counts as the release of this program.
pub fn is_of_another_release(kubevirt: &KubeVirt, environment: &Environment) -> bool {
    let requested = kubevirt.spec.image_tag.as_str();
    let own = OperatorImage::parse(&environment.operator_image).and_then(|image| image.tag());
    !requested.is_empty() && requested != RELEASE && Some(requested) != own
}

/// The name follows from the configuration, so that the Job is not created twice. Upstream virt-operator uses
/// `generateName`.
pub(crate) fn key(config: &DeploymentConfig) -> ObjectKey {
    ObjectKey::namespaced(&config.namespace, &format!("kubevirt-{}-job", config.id))
}

/// `spec.customizeComponents` does not apply to the Job, as in upstream virt-operator. The garbage collector deletes the
/// Job with the KubeVirt resource.
pub(crate) fn job(kubevirt: &KubeVirt, config: &DeploymentConfig) -> Result<Body, Failure> {
    let key = key(config);
    let image = &config.images.virt_operator_image;
    let variable =
        |name: &str, value: &str| EnvVar { name: name.to_owned(), value: Some(value.to_owned()), ..EnvVar::default() };
    let environment = [
        variable(variable::OPERATOR_IMAGE, image),
        variable(variable::NAMESPACE, &config.namespace),
        variable(variable::PULL_POLICY, config.pull_policy()),
        variable(variable::CONFIG, &config.json()),
    ];
    let container = Container {
        name: "install-strategy-upload".to_owned(),
        image: Some(image.clone()),
        image_pull_policy: Some(config.pull_policy().to_owned()),
        command: Some(strings(&["virt-operator", "--dump-install-strategy"])),
        env: Some(environment.into_iter().chain(config.extra_environment()).collect()),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities { drop: Some(strings(&["ALL"])), ..Capabilities::default() }),
            run_as_non_root: Some(true),
            seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), ..SeccompProfile::default() }),
            ..SecurityContext::default()
        }),
        ..Container::default()
    };
    let mut pod = PodSpec {
        service_account_name: Some(key.name().to_owned()),
        restart_policy: Some("Never".to_owned()),
        image_pull_secrets: Some(config.pull_secrets()).filter(|secrets| !secrets.is_empty()),
        containers: vec![container],
        ..PodSpec::default()
    };
    placement::place(&mut pod, kubevirt.spec.infra.as_ref(), DefaultPlacement::ControlPlane);
    let labels = [(label::APP, ""), (label::MANAGED_BY, label::MANAGED_BY_VALUE), (label::INSTALL_STRATEGY, "")];
    let annotations = [
        (annotation::VERSION, config.kube_virt_version.as_str()),
        (annotation::REGISTRY, &config.registry),
        (annotation::IDENTIFIER, &config.id),
    ];
    let owner = OwnerReference {
        api_version: kubevirt.types.api_version.clone(),
        kind: kubevirt.types.kind.clone(),
        name: kubevirt.metadata.name.clone().unwrap_or_default(),
        uid: kubevirt.metadata.uid.clone().unwrap_or_default(),
        ..OwnerReference::default()
    };
    let job = Job {
        metadata: ObjectMeta {
            name: Some(key.name().to_owned()),
            namespace: Some(config.namespace.clone()),
            labels: Some(string_map(&labels)),
            annotations: Some(string_map(&annotations)),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(JobSpec {
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(string_map(&[
                        (label::APP, STRATEGY_JOB_APP),
                        (label::MAY_REACH_CLUSTER_SERVICES, "true"),
                    ])),
                    ..ObjectMeta::default()
                }),
                spec: Some(pod),
            },
            ..JobSpec::default()
        }),
        status: None,
    };
    Body::from_object(&job)
}
