//! How another release tells what it consists of: its own operator is run once, and leaves the text of its strategy in
//! a ConfigMap.

use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, EnvVar, PodSpec, PodTemplateSpec, SeccompProfile, SecurityContext,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, kubevirt::KubeVirt};

use crate::{
    RELEASE,
    build::{map, strings},
    config::DeploymentConfig,
    customize::Customizer,
    environment::Environment,
    images::OperatorImage,
    kind::Kind,
    names::{OPERATOR_SERVICE_ACCOUNT, annotation, label},
    placement::{self, Usually},
};

const APP: &str = "virt-operator-strategy-dumper";
/// What a release's operator is told with. The reference reads the first.
pub mod variable {
    pub const CONFIG: &str = "TARGET_DEPLOYMENT_CONFIG";
    pub const NAMESPACE: &str = "TARGET_INSTALL_NAMESPACE";
    pub const PULL_POLICY: &str = "TARGET_IMAGE_PULL_POLICY";
    pub const OPERATOR_IMAGE: &str = "VIRT_OPERATOR_IMAGE";
}

/// Whether the resource asks for a release whose data this program does not hold. The operator's own image may have
/// any tag: it is this program, and installs what it holds.
pub fn is_of_another_release(kubevirt: &KubeVirt, environment: &Environment) -> bool {
    let asked = kubevirt.spec.image_tag.as_str();
    let own = OperatorImage::parse(&environment.operator_image).and_then(|image| image.tag());
    !asked.is_empty() && asked != RELEASE && Some(asked) != own
}

/// The reference lets the server choose the end of the name; ours follows from the deployment, so that it is not
/// started twice.
pub(crate) fn key(config: &DeploymentConfig) -> ObjectKey {
    ObjectKey::namespaced(&config.namespace, &format!("kubevirt-{}-job", config.id))
}

pub(crate) fn job(kubevirt: &KubeVirt, config: &DeploymentConfig) -> Result<Value, Failure> {
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
        service_account_name: Some(OPERATOR_SERVICE_ACCOUNT.to_owned()),
        restart_policy: Some("Never".to_owned()),
        image_pull_secrets: Some(config.pull_secrets()).filter(|secrets| !secrets.is_empty()),
        containers: vec![container],
        ..PodSpec::default()
    };
    placement::place(&mut pod, kubevirt.spec.infra.as_ref(), Usually::ControlPlane);
    let labels = [(label::APP, ""), (label::MANAGED_BY, label::MANAGED_BY_VALUE), (label::INSTALL_STRATEGY, "")];
    let annotations = [
        (annotation::VERSION, config.kube_virt_version.as_str()),
        (annotation::REGISTRY, &config.registry),
        (annotation::IDENTIFIER, &config.id),
    ];
    let key = key(config);
    let job = Job {
        metadata: ObjectMeta {
            name: Some(key.name().to_owned()),
            namespace: Some(config.namespace.clone()),
            labels: Some(map(&labels)),
            annotations: Some(map(&annotations)),
            ..ObjectMeta::default()
        },
        spec: Some(JobSpec {
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(map(&[(label::APP, APP), (label::MAY_REACH_CLUSTER_SERVICES, "true")])),
                    ..ObjectMeta::default()
                }),
                spec: Some(pod),
            },
            ..JobSpec::default()
        }),
        status: None,
    };
    let mut object = vitivirt_api::Body::of(&job)?.into_json();
    Customizer::new(&kubevirt.spec.customize_components)?.apply(Kind::Job, key.name(), &mut object)?;
    Ok(object)
}
