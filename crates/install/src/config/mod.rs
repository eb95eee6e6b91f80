//! The deployment configuration in the format of the KubeVirt release: its fields, its JSON and its identifier.
//!
//! The identifier is an annotation of every object and a field of the status. It equals that of upstream virt-operator,
//! so that each operator recognises the installation of the other and does not restart it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{EnvVar, LocalObjectReference};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha1::{Digest, Sha1};
use vitivirt_api::{ObjectKey, kubevirt::KubeVirt, text::hex};

use crate::{
    environment::Environment,
    images::OperatorImage,
    names::{STRATEGY_GENERATE_NAME, gate, label},
};

type Properties = BTreeMap<String, String>;

/// Keys of `additional_properties`.
mod property {
    pub(super) const EXTERNAL_NET_RESOURCE_INJECTION: &str = "ExternalNetResourceInjection";
    pub(super) const HYPERVISOR: &str = "HypervisorName";
    pub(super) const MIGRATION_NETWORK: &str = "MigrationNetwork";
    pub(super) const MONITOR_ACCOUNT: &str = "MonitorAccount";
    pub(super) const MONITOR_NAMESPACE: &str = "MonitorNamespace";
    pub(super) const OPT_OUT_ROLE_AGGREGATION: &str = "OptOutRoleAggregation";
    pub(super) const PERSISTENT_RESERVATION: &str = "PersistentReservationEnabled";
    pub(super) const PRODUCT_COMPONENT: &str = "productComponent";
    pub(super) const PRODUCT_NAME: &str = "productName";
    pub(super) const PRODUCT_VERSION: &str = "productVersion";
    pub(super) const PULL_POLICY: &str = "ImagePullPolicy";
    pub(super) const PULL_SECRETS: &str = "ImagePullSecrets";
    pub(super) const SERVICE_MONITOR_NAMESPACE: &str = "ServiceMonitorNamespace";
    pub(super) const SYNCHRONIZATION_PORT: &str = "SynchronizationPort";
    pub(super) const TEMPLATE: &str = "VirtTemplateDeploymentEnabled";
}

const MONITOR_NAMESPACES: [&str; 2] = ["openshift-monitoring", "monitoring"];
const MONITOR_ACCOUNT: &str = "prometheus-k8s";
const SYNCHRONIZATION_PORT: i32 = 9185;
const KVM: &str = "kvm";

/// The configuration that a KubeVirt resource asks for. The order of its fields is that of the KubeVirt release,
/// because the identifier depends on it. Empty fields are not in its JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeploymentConfig {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub registry: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_prefix: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kube_virt_version: String,
    #[serde(flatten)]
    pub images: ComponentImages,
    #[serde(skip_serializing_if = "Properties::is_empty")]
    pub additional_properties: Properties,
    #[serde(skip_serializing_if = "Properties::is_empty")]
    pub passthrough_env_vars: Properties,
}

/// Images that are set explicitly. An empty image is derived from that of the operator, which is always set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ComponentImages {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_operator_image: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_api_image: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_controller_image: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_handler_image: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_launcher_image: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_export_proxy_image: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_export_server_image: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_synchronization_controller_image: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_template_apiserver_image: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub virt_template_controller_image: String,
    #[serde(rename = "GsImage", skip_serializing_if = "String::is_empty")]
    pub guestfs_image: String,
    #[serde(rename = "PrHelperImage", skip_serializing_if = "String::is_empty")]
    pub persistent_reservation_helper_image: String,
    #[serde(rename = "SidecarShimImage", skip_serializing_if = "String::is_empty")]
    pub sidecar_shim_image: String,
}

impl DeploymentConfig {
    pub fn new(kubevirt: &KubeVirt, environment: &Environment) -> Self {
        let spec = &kubevirt.spec;
        let version = Some(environment.kubevirt_version.as_str()).filter(|text| !text.is_empty()).unwrap_or("latest");
        let parsed = OperatorImage::parse(&environment.operator_image);
        let derived = parsed.as_ref().map_or("", |image| image.registry);
        let registry = first_of(&[&spec.image_registry, derived]);
        let tag = first_of(&[&spec.image_tag, parsed.as_ref().and_then(OperatorImage::tag).unwrap_or(version)]);
        let is_requested = !(spec.image_registry.is_empty() && spec.image_tag.is_empty());
        let images = &environment.images;
        let mut config = Self {
            id: String::new(),
            namespace: kubevirt.metadata.namespace.clone().unwrap_or_default(),
            // The prefix is that of the operator's image, even if the registry is another one.
            image_prefix: parsed.as_ref().map_or("", |image| image.prefix).to_owned(),
            images: ComponentImages {
                virt_operator_image: if is_requested {
                    format!("{registry}/virt-operator:{tag}")
                } else {
                    environment.operator_image.clone()
                },
                virt_api_image: images.api.clone(),
                virt_controller_image: images.controller.clone(),
                virt_handler_image: images.handler.clone(),
                virt_launcher_image: images.launcher.clone(),
                virt_export_proxy_image: images.export_proxy.clone(),
                virt_export_server_image: images.export_server.clone(),
                virt_synchronization_controller_image: images.synchronization_controller.clone(),
                virt_template_apiserver_image: images.template_api_server.clone(),
                virt_template_controller_image: images.template_controller.clone(),
                guestfs_image: images.guestfs.clone(),
                persistent_reservation_helper_image: images.persistent_reservation_helper.clone(),
                sidecar_shim_image: images.sidecar_shim.clone(),
            },
            registry,
            kube_virt_version: tag,
            additional_properties: properties(kubevirt),
            passthrough_env_vars: environment.passed_on.clone(),
        };
        config.id = config.identifier();
        config
    }

    /// The SHA-1 of the names and values of all fields, with the names of the KubeVirt release.
    fn identifier(&self) -> String {
        let images = &self.images;
        let mut hash = Sha1::new();
        for text in [
            "ID",
            "Namespace",
            &self.namespace,
            "Registry",
            &self.registry,
            "ImagePrefix",
            &self.image_prefix,
            "KubeVirtVersion",
            &self.kube_virt_version,
            "ComponentImages",
            "VirtOperatorImage",
            &images.virt_operator_image,
            "VirtApiImage",
            &images.virt_api_image,
            "VirtControllerImage",
            &images.virt_controller_image,
            "VirtHandlerImage",
            &images.virt_handler_image,
            "VirtLauncherImage",
            &images.virt_launcher_image,
            "VirtExportProxyImage",
            &images.virt_export_proxy_image,
            "VirtExportServerImage",
            &images.virt_export_server_image,
            "VirtSynchronizationControllerImage",
            &images.virt_synchronization_controller_image,
            "VirtTemplateApiserverImage",
            &images.virt_template_apiserver_image,
            "VirtTemplateControllerImage",
            &images.virt_template_controller_image,
            "GsImage",
            &images.guestfs_image,
            "PrHelperImage",
            &images.persistent_reservation_helper_image,
            "SidecarShimImage",
            &images.sidecar_shim_image,
        ] {
            hash.update(text);
        }
        for (name, properties) in
            [("AdditionalProperties", &self.additional_properties), ("PassthroughEnvVars", &self.passthrough_env_vars)]
        {
            hash.update(name);
            for (key, value) in properties.iter().filter(|(key, _)| !key.is_empty()) {
                hash.update(key);
                hash.update(value);
            }
        }
        hex(&hash.finalize())
    }

    /// The part of the identifier that is used in names.
    pub(crate) fn short_id(&self) -> &str {
        self.id.get(..10).unwrap_or(&self.id)
    }

    /// The ConfigMap with the install strategy. Its name follows from the content, so that it cannot be created twice.
    /// Upstream virt-operator uses `generateName`.
    pub fn strategy_key(&self) -> ObjectKey {
        ObjectKey::namespaced(&self.namespace, &format!("{STRATEGY_GENERATE_NAME}{}", self.short_id()))
    }

    /// Its JSON, byte for byte as upstream virt-operator writes it to the status.
    pub fn json(&self) -> String {
        go_json(self)
    }

    /// Candidates for the namespace of the monitoring stack, in order of preference.
    pub fn monitor_namespaces(&self) -> Vec<&str> {
        match self.property(property::MONITOR_NAMESPACE) {
            "" => MONITOR_NAMESPACES.to_vec(),
            namespace => vec![namespace],
        }
    }

    /// `None` if the configured name is not valid.
    pub fn monitor_account(&self) -> Option<&str> {
        match self.property(property::MONITOR_ACCOUNT) {
            "" => Some(MONITOR_ACCOUNT),
            account => Some(account).filter(|account| vitivirt_api::text::is_subdomain(account)),
        }
    }

    pub(crate) fn service_monitor_namespace(&self) -> Option<&str> {
        Some(self.property(property::SERVICE_MONITOR_NAMESPACE)).filter(|namespace| !namespace.is_empty())
    }

    /// An image: the given one, or that of the KubeVirt release.
    pub(crate) fn image(&self, given: &str, name: &str) -> String {
        match given {
            "" => format!("{}/{}{name}:{}", self.registry, self.image_prefix, self.kube_virt_version),
            given => given.to_owned(),
        }
    }

    /// The image of `virtctl guestfs`. No installed object names it.
    pub fn guestfs_image(&self) -> String {
        self.image(&self.images.guestfs_image, "libguestfs-tools")
    }

    pub(crate) fn launcher_image(&self) -> String {
        self.image(&self.images.virt_launcher_image, "virt-launcher")
    }

    pub(crate) fn pull_policy(&self) -> &str {
        match self.property(property::PULL_POLICY) {
            "" => "IfNotPresent",
            policy => policy,
        }
    }

    pub(crate) fn pull_secrets(&self) -> Vec<LocalObjectReference> {
        serde_json::from_str(self.property(property::PULL_SECRETS)).unwrap_or_default()
    }

    pub(crate) fn extra_environment(&self) -> Vec<EnvVar> {
        let variable = |(name, value): (&String, &String)| EnvVar {
            name: name.clone(),
            value: Some(value.clone()),
            ..EnvVar::default()
        };
        self.passthrough_env_vars.iter().map(variable).collect()
    }

    pub fn synchronization_port(&self) -> i32 {
        self.property(property::SYNCHRONIZATION_PORT).parse().unwrap_or(SYNCHRONIZATION_PORT)
    }

    pub(crate) fn migration_network(&self) -> Option<&str> {
        self.additional_properties.get(property::MIGRATION_NETWORK).map(String::as_str)
    }

    pub(crate) fn hypervisor(&self) -> &str {
        self.additional_properties.get(property::HYPERVISOR).map_or(KVM, String::as_str)
    }

    pub(crate) fn persistent_reservation(&self) -> bool {
        self.additional_properties.contains_key(property::PERSISTENT_RESERVATION)
    }

    pub(crate) fn template(&self) -> bool {
        self.additional_properties.contains_key(property::TEMPLATE)
    }

    pub(crate) fn external_net_resource_injection(&self) -> bool {
        self.additional_properties.contains_key(property::EXTERNAL_NET_RESOURCE_INJECTION)
    }

    pub(crate) fn opt_out_role_aggregation(&self) -> bool {
        self.additional_properties.contains_key(property::OPT_OUT_ROLE_AGGREGATION)
    }

    /// The product labels of a workload in the install strategy. KubeVirt reads them from properties that a KubeVirt
    /// resource never sets, so usually only the version is set.
    pub(crate) fn product_labels(&self) -> Vec<(&'static str, &str)> {
        let version = self.additional_properties.get(property::PRODUCT_VERSION).unwrap_or(&self.kube_virt_version);
        [
            (label::VERSION, version.as_str()),
            (label::PART_OF, self.property(property::PRODUCT_NAME)),
            (label::COMPONENT, self.property(property::PRODUCT_COMPONENT)),
        ]
        .into_iter()
        .filter(|(_, value)| !value.is_empty() && is_label_value(value))
        .collect()
    }

    fn property(&self, key: &str) -> &str {
        self.additional_properties.get(key).map(String::as_str).unwrap_or_default()
    }
}

/// Every field of the specification under its Go name. KubeVirt uses the printed form of each field: a string is
/// itself, and any other value is the name of its type, which therefore does not change the identifier.
fn properties(kubevirt: &KubeVirt) -> Properties {
    let spec = &kubevirt.spec;
    let configuration = &spec.configuration;
    let has = |name: &str| configuration.feature_gates().iter().any(|gate| gate == name);
    let mut properties: Properties = [
        (property::PULL_POLICY, spec.image_pull_policy.as_str()),
        (property::MONITOR_NAMESPACE, &spec.monitor_namespace),
        (property::SERVICE_MONITOR_NAMESPACE, &spec.service_monitor_namespace),
        (property::MONITOR_ACCOUNT, &spec.monitor_account),
        ("WorkloadUpdateStrategy", "<v1.KubeVirtWorkloadUpdateStrategy Value>"),
        ("UninstallStrategy", &spec.uninstall_strategy),
        ("CertificateRotationStrategy", "<v1.KubeVirtCertificateRotateStrategy Value>"),
        ("ProductVersion", &spec.product_version),
        ("ProductName", &spec.product_name),
        ("ProductComponent", &spec.product_component),
        (property::SYNCHRONIZATION_PORT, &spec.synchronization_port),
        ("Configuration", "<v1.KubeVirtConfiguration Value>"),
        ("Infra", "<*v1.ComponentConfig Value>"),
        ("Workloads", "<*v1.ComponentConfig Value>"),
        ("CustomizeComponents", "<v1.CustomizeComponents Value>"),
        (property::HYPERVISOR, hypervisor(kubevirt, has(gate::CONFIGURABLE_HYPERVISOR))),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .collect();
    properties.insert(property::PULL_SECRETS.to_owned(), pull_secrets(spec.image_pull_secrets.as_deref()));
    let mut set = |key: &str, value: &str| properties.insert(key.to_owned(), value.to_owned());
    if let Some(network) = configuration.migrations.as_ref().and_then(|migrations| migrations.network.as_deref()) {
        set(property::MIGRATION_NETWORK, network);
    }
    if has(gate::PERSISTENT_RESERVATION) {
        set(property::PERSISTENT_RESERVATION, "");
    }
    let template = configuration.virt_template_deployment.as_ref().and_then(|template| template.enabled);
    if has(gate::TEMPLATE) && template.unwrap_or(true) {
        set(property::TEMPLATE, "");
    }
    if has(gate::EXTERNAL_NET_RESOURCE_INJECTION) {
        set(property::EXTERNAL_NET_RESOURCE_INJECTION, "");
    }
    if has(gate::OPT_OUT_ROLE_AGGREGATION) && configuration.role_aggregation_strategy.as_deref() == Some("Manual") {
        set(property::OPT_OUT_ROLE_AGGREGATION, "");
    }
    properties
}

fn hypervisor(kubevirt: &KubeVirt, configurable: bool) -> &str {
    let first = kubevirt.spec.configuration.hypervisors.as_ref().and_then(|all| all.first());
    first.filter(|_| configurable).map_or(KVM, |hypervisor| &hypervisor.name)
}

fn pull_secrets(secrets: Option<&[LocalObjectReference]>) -> String {
    let Some(secrets) = secrets else { return "null".to_owned() };
    let secret = |secret: &LocalObjectReference| match secret.name.as_str() {
        "" => json!({}),
        name => json!({ "name": name }),
    };
    go_json(&secrets.iter().map(secret).collect::<Vec<_>>())
}

fn first_of(texts: &[&str]) -> String {
    texts.iter().find(|text| !text.is_empty()).copied().unwrap_or_default().to_owned()
}

/// JSON as Go writes it. The types of this crate can always be serialized.
pub(crate) fn go_json<T: Serialize>(value: &T) -> String {
    vitivirt_api::text::go_json(value).unwrap_or_default()
}

/// Whether this is a valid value of a label.
pub(crate) fn is_label_value(text: &str) -> bool {
    let ends = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && ends(bytes.first())
        && ends(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

#[cfg(test)]
mod tests;
