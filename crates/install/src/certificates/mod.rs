//! The certificates of an installation: names, usages, lifetimes and signers. Issuing them needs keys and a clock, so
//! virt-operator does that. The issued certificates are inserted through [`IssuedCertificates`] when an object is sent.

pub mod bundle;
mod lifetime;
mod renewal;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::Value;

use crate::{
    config::DeploymentConfig,
    managed_metadata,
    metadata::namespaced,
    names::{OPERATOR_WEBHOOK_SERVICE, annotation},
};

pub(crate) use lifetime::go_duration;
pub use lifetime::{InvalidDuration, Lifetime, Lifetimes};
pub use renewal::{MIN_LIFETIME, Validity, ValidityWindow};

pub const CA: &str = "kubevirt-ca";
pub const EXPORT_CA: &str = "kubevirt-export-ca";
pub const BACKUP_CA: &str = "kubevirt-backup-ca";
/// The ConfigMap to which users add their CAs. The operator moves them into the bundle `CA`.
pub const EXTERNAL_CA: &str = "kubevirt-external-ca";
/// The ConfigMaps of CA bundles.
pub(crate) const BUNDLES: [&str; 4] = [CA, EXPORT_CA, BACKUP_CA, EXTERNAL_CA];
/// The key of a bundle in its ConfigMap.
pub const BUNDLE_KEY: &str = "ca-bundle";

pub const VIRT_API: &str = "kubevirt-virt-api-certs";
pub const VIRT_CONTROLLER: &str = "kubevirt-controller-certs";
pub(crate) const VIRT_EXPORT_PROXY: &str = "kubevirt-exportproxy-certs";
pub const VIRT_HANDLER_CLIENT: &str = "kubevirt-virt-handler-certs";
pub const VIRT_HANDLER_SERVER: &str = "kubevirt-virt-handler-server-certs";
pub(crate) const VIRT_HANDLER_MIGRATION: &str = "kubevirt-virt-handler-migration-client-certs";
pub(crate) const VIRT_HANDLER_VSOCK: &str = "kubevirt-virt-handler-vsock-client-certs";
pub const VIRT_OPERATOR: &str = "kubevirt-operator-certs";
pub const SYNCHRONIZATION_CLIENT: &str = "kubevirt-synchronization-controller-certs";
pub(crate) const SYNCHRONIZATION_SERVER: &str = "kubevirt-synchronization-controller-server-certs";
pub(crate) const TEMPLATE_API: &str = "kubevirt-virt-template-api-certs";
pub(crate) const TEMPLATE_WEBHOOK: &str = "kubevirt-virt-template-webhook-certs";
pub(crate) const TEMPLATE_METRICS: &str = "kubevirt-virt-template-controller-metrics-certs";

/// An issued certificate and its key, in PEM. It has no `Debug`, because it contains a key.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyPair {
    pub certificate: Vec<u8>,
    pub key: Vec<u8>,
}

/// The issued certificates and CA bundles of an installation, by the name of the Secret or ConfigMap. An object without
/// an issued certificate stays empty.
pub trait IssuedCertificates {
    fn key_pair(&self, secret: &str) -> Option<KeyPair>;
    /// A CA bundle in PEM. Clients of webhooks and aggregated APIs trust the bundle `CA`.
    fn bundle(&self, config_map: &str) -> Option<String>;
    /// The number of CAs of users that do not fit into the bundle `CA`. They stay in `EXTERNAL_CA`.
    fn left_out(&self) -> usize {
        0
    }
}

/// No certificates, for output without secrets.
pub struct NoCertificates;

impl IssuedCertificates for NoCertificates {
    fn key_pair(&self, _: &str) -> Option<KeyPair> {
        None
    }

    fn bundle(&self, _: &str) -> Option<String> {
        None
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Signs other certificates and itself.
    Ca,
    Server,
    Client,
}

/// One certificate and the Secret that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    pub secret: String,
    pub usage: Usage,
    /// For a CA without the suffix `@` and its creation time.
    pub common_name: String,
    pub dns_names: Vec<String>,
    /// The Secret of the CA that signs it. A CA signs itself.
    pub signer: Option<&'static str>,
    pub lifetime: Lifetime,
}

/// Every certificate of an installation, CAs first.
pub fn certificates(config: &DeploymentConfig, lifetimes: &Lifetimes) -> Vec<Certificate> {
    let template = |certificate: &Certificate| TEMPLATE_LEAVES.iter().any(|leaf| leaf.secret() == certificate.secret);
    let all = all_certificates(&config.namespace, lifetimes);
    all.filter(|certificate| config.template() || !template(certificate)).collect()
}

/// Every certificate that an installation may have, CAs first.
pub(crate) fn all_certificates(namespace: &str, lifetimes: &Lifetimes) -> impl Iterator<Item = Certificate> {
    let ca = |secret: &str, common_name: &str, lifetime: Lifetime| Certificate {
        secret: secret.to_owned(),
        usage: Usage::Ca,
        common_name: common_name.to_owned(),
        dns_names: Vec::new(),
        signer: None,
        lifetime,
    };
    let cas = [
        ca(CA, "kubevirt.io", lifetimes.ca),
        ca(EXPORT_CA, "export.kubevirt.io", lifetimes.other_cas),
        ca(BACKUP_CA, "backup.kubevirt.io", lifetimes.other_cas),
    ];
    let leaf = move |leaf: Leaf| leaf.certificate(namespace, lifetimes);
    cas.into_iter().chain(LEAVES.into_iter().chain(TEMPLATE_LEAVES).map(leaf))
}

#[derive(Clone, Copy)]
enum Leaf {
    /// A server certificate with the name of a Service and of its pods.
    Service(&'static str, &'static str),
    /// A server certificate with a KubeVirt node name.
    Node(&'static str, &'static str),
    Client(&'static str, &'static str),
}

const LEAVES: [Leaf; 10] = [
    Leaf::Service(VIRT_API, "virt-api"),
    Leaf::Service(VIRT_CONTROLLER, "virt-controller"),
    Leaf::Service(VIRT_EXPORT_PROXY, "virt-exportproxy"),
    Leaf::Node(VIRT_HANDLER_SERVER, "virt-handler"),
    Leaf::Client(VIRT_HANDLER_MIGRATION, "migration"),
    Leaf::Client(VIRT_HANDLER_VSOCK, "vsock"),
    Leaf::Client(VIRT_HANDLER_CLIENT, "virt-handler"),
    Leaf::Client(SYNCHRONIZATION_CLIENT, "virt-synchronization-controller"),
    Leaf::Node(SYNCHRONIZATION_SERVER, "virt-synchronization-controller"),
    Leaf::Service(VIRT_OPERATOR, OPERATOR_WEBHOOK_SERVICE),
];

const TEMPLATE_LEAVES: [Leaf; 3] = [
    Leaf::Service(TEMPLATE_API, "virt-template-api-service"),
    Leaf::Service(TEMPLATE_WEBHOOK, "virt-template-webhook-service"),
    Leaf::Service(TEMPLATE_METRICS, "virt-template-controller-manager-metrics-service"),
];

impl Leaf {
    fn secret(self) -> &'static str {
        let (Self::Service(secret, _) | Self::Node(secret, _) | Self::Client(secret, _)) = self;
        secret
    }

    fn certificate(self, namespace: &str, lifetimes: &Lifetimes) -> Certificate {
        let hosts = |service: &str| {
            let longer = ["", ".svc", ".svc.cluster.local"].map(|suffix| format!("{service}.{namespace}{suffix}"));
            [service.to_owned()].into_iter().chain(longer).collect()
        };
        let (usage, common_name, dns_names) = match self {
            Self::Service(_, service) => {
                (Usage::Server, format!("{service}.{namespace}.pod.cluster.local"), hosts(service))
            }
            Self::Node(_, name) => (Usage::Server, format!("kubevirt.io:system:node:{name}"), hosts(name)),
            Self::Client(_, name) => (Usage::Client, format!("kubevirt.io:system:client:{name}"), Vec::new()),
        };
        Certificate {
            secret: self.secret().to_owned(),
            usage,
            common_name,
            dns_names,
            signer: Some(CA),
            lifetime: lifetimes.leaf,
        }
    }
}

/// The Secrets without their data, in the order of the install strategy: leaf certificates first.
pub(crate) fn secrets(config: &DeploymentConfig) -> Vec<Secret> {
    let template = TEMPLATE_LEAVES.iter().filter(|_| config.template());
    let names = LEAVES.iter().map(|leaf| leaf.secret()).chain([CA, EXPORT_CA, BACKUP_CA]);
    names.chain(template.map(|leaf| leaf.secret())).map(|name| secret(&config.namespace, name)).collect()
}

pub(crate) fn secret(namespace: &str, name: &str) -> Secret {
    Secret {
        metadata: namespaced(namespace, name, &[]),
        type_: Some("kubernetes.io/tls".to_owned()),
        ..Secret::default()
    }
}

/// The ConfigMaps of CA bundles, without their data.
pub(crate) fn bundles(config: &DeploymentConfig) -> Vec<ConfigMap> {
    let bundle = |name: &str| ConfigMap { metadata: namespaced(&config.namespace, name, &[]), ..ConfigMap::default() };
    BUNDLES.map(bundle).into()
}

pub(crate) fn is_ca(secret: &str) -> bool {
    [CA, EXPORT_CA, BACKUP_CA].contains(&secret)
}

/// Notes the lifetime in the Secret. Upstream virt-operator issues the certificate again when it differs.
pub(crate) fn annotate_lifetime(secret: &mut Value, lifetime: Lifetime) {
    if let Some(metadata) = secret.get_mut("metadata").and_then(Value::as_object_mut) {
        let duration = (annotation::DURATION.to_owned(), lifetime.annotation());
        managed_metadata::merge(metadata, "annotations", &[duration].into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(properties: &[&str]) -> DeploymentConfig {
        DeploymentConfig {
            namespace: "ns".to_owned(),
            additional_properties: properties.iter().map(|key| ((*key).to_owned(), String::new())).collect(),
            ..DeploymentConfig::default()
        }
    }

    #[test]
    fn every_secret_has_exactly_one_certificate() {
        for config in [config(&[]), config(&["VirtTemplateDeploymentEnabled"])] {
            let lifetimes = Lifetimes::new(None).unwrap();
            let mut certificates_of: Vec<String> =
                certificates(&config, &lifetimes).into_iter().map(|certificate| certificate.secret).collect();
            let mut secrets_of: Vec<String> =
                secrets(&config).into_iter().filter_map(|secret| secret.metadata.name).collect();
            certificates_of.sort_unstable();
            secrets_of.sort_unstable();
            assert_eq!(certificates_of, secrets_of);
        }
    }

    #[test]
    fn a_service_certificate_has_every_dns_name_of_the_service() {
        let lifetimes = Lifetimes::new(None).unwrap();
        let certificates = certificates(&config(&[]), &lifetimes);
        let find = |secret: &str| certificates.iter().find(|certificate| certificate.secret == secret).unwrap();
        let api = find(VIRT_API);
        assert_eq!(api.common_name, "virt-api.ns.pod.cluster.local");
        assert_eq!(api.dns_names, ["virt-api", "virt-api.ns", "virt-api.ns.svc", "virt-api.ns.svc.cluster.local"]);
        assert_eq!(find(VIRT_OPERATOR).common_name, "kubevirt-operator-webhook.ns.pod.cluster.local");
        assert_eq!(find(VIRT_HANDLER_SERVER).common_name, "kubevirt.io:system:node:virt-handler");
        let migration = find(VIRT_HANDLER_MIGRATION);
        assert_eq!((migration.usage, migration.dns_names.len()), (Usage::Client, 0));
    }
}
