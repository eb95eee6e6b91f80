//! Which certificates an installation has: names, uses, lifetimes and who signs. Issuing them needs keys and a clock,
//! so it is done elsewhere; what was issued comes back through `Issued` when an object is sent.

pub mod bundle;
mod due;
mod lifetime;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};

use crate::{build::namespaced, config::DeploymentConfig, names::OPERATOR_WEBHOOK_SERVICE};

pub use due::{SHORTEST, Term, Validity};
pub(crate) use lifetime::go_duration;
pub use lifetime::{BadDuration, Lifetime, Lifetimes, parse_duration};

pub const CA: &str = "kubevirt-ca";
pub const EXPORT_CA: &str = "kubevirt-export-ca";
pub const BACKUP_CA: &str = "kubevirt-backup-ca";
/// Where users put authorities of their own; they are moved from there into the bundle `CA`.
pub const EXTERNAL_CA: &str = "kubevirt-external-ca";
/// The key of a bundle in its ConfigMap.
pub const BUNDLE_KEY: &str = "ca-bundle";

pub const VIRT_API: &str = "kubevirt-virt-api-certs";
pub const VIRT_CONTROLLER: &str = "kubevirt-controller-certs";
pub const VIRT_EXPORT_PROXY: &str = "kubevirt-exportproxy-certs";
pub const VIRT_HANDLER_CLIENT: &str = "kubevirt-virt-handler-certs";
pub const VIRT_HANDLER_SERVER: &str = "kubevirt-virt-handler-server-certs";
pub const VIRT_HANDLER_MIGRATION: &str = "kubevirt-virt-handler-migration-client-certs";
pub const VIRT_HANDLER_VSOCK: &str = "kubevirt-virt-handler-vsock-client-certs";
pub const VIRT_OPERATOR: &str = "kubevirt-operator-certs";
pub const SYNCHRONIZATION_CLIENT: &str = "kubevirt-synchronization-controller-certs";
pub const SYNCHRONIZATION_SERVER: &str = "kubevirt-synchronization-controller-server-certs";
pub const TEMPLATE_API: &str = "kubevirt-virt-template-api-certs";
pub const TEMPLATE_WEBHOOK: &str = "kubevirt-virt-template-webhook-certs";
pub const TEMPLATE_METRICS: &str = "kubevirt-virt-template-controller-metrics-certs";

/// A certificate that has been issued, in PEM. It has no `Debug`, because it holds a key.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyPair {
    pub certificate: Vec<u8>,
    pub key: Vec<u8>,
}

/// What was issued, by the name of its Secret or ConfigMap. What is missing stays empty in the object.
pub trait Issued {
    fn key_pair(&self, secret: &str) -> Option<KeyPair>;
    /// A bundle in PEM. That of `CA` is what webhooks and aggregated APIs are trusted by.
    fn bundle(&self, config_map: &str) -> Option<String>;
}

/// Nothing has been issued.
pub struct NothingIssued;

impl Issued for NothingIssued {
    fn key_pair(&self, _: &str) -> Option<KeyPair> {
        None
    }

    fn bundle(&self, _: &str) -> Option<String> {
        None
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Signs others, and itself.
    Ca,
    Server,
    Client,
}

/// One certificate and the Secret that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    pub secret: String,
    pub usage: Usage,
    /// For an authority the part before `@` and the time of its making.
    pub common_name: String,
    pub dns_names: Vec<String>,
    /// The Secret of the authority that signs it; an authority signs itself.
    pub signer: Option<&'static str>,
    pub lifetime: Lifetime,
    /// How long before the authority's own end it is renewed, when that comes first.
    pub signer_renew_before: Option<std::time::Duration>,
}

/// Every certificate of an installation, authorities first.
pub fn certificates(config: &DeploymentConfig, lifetimes: &Lifetimes) -> Vec<Certificate> {
    let authority = |secret: &str, common_name: &str, lifetime: Lifetime| Certificate {
        secret: secret.to_owned(),
        usage: Usage::Ca,
        common_name: common_name.to_owned(),
        dns_names: Vec::new(),
        signer: None,
        lifetime,
        signer_renew_before: None,
    };
    let all = [
        authority(CA, "kubevirt.io", lifetimes.authority),
        authority(EXPORT_CA, "export.kubevirt.io", lifetimes.other_authorities),
        authority(BACKUP_CA, "backup.kubevirt.io", lifetimes.other_authorities),
    ];
    let leaf = |leaf: Leaf| leaf.certificate(&config.namespace, lifetimes);
    let template = TEMPLATE_LEAVES.iter().copied().filter(|_| config.template());
    all.into_iter().chain(LEAVES.iter().copied().chain(template).map(leaf)).collect()
}

#[derive(Clone, Copy)]
enum Leaf {
    /// Of a service, with the name of a pod of it.
    Service(&'static str, &'static str),
    /// Of something that is known by a name of its own.
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
            signer_renew_before: Some(lifetimes.authority.renew_before),
        }
    }
}

/// The Secrets, without what is issued: leaves first, as a strategy lists them.
pub(crate) fn secrets(config: &DeploymentConfig) -> Vec<Secret> {
    let template = TEMPLATE_LEAVES.iter().filter(|_| config.template());
    let names = LEAVES.iter().map(|leaf| leaf.secret()).chain([CA, EXPORT_CA, BACKUP_CA]);
    names.chain(template.map(|leaf| leaf.secret())).map(|name| secret(&config.namespace, name)).collect()
}

fn secret(namespace: &str, name: &str) -> Secret {
    Secret {
        metadata: namespaced(namespace, name, &[]),
        type_: Some("kubernetes.io/tls".to_owned()),
        ..Secret::default()
    }
}

/// The ConfigMaps that hold bundles, without what is issued.
pub(crate) fn bundles(config: &DeploymentConfig) -> Vec<ConfigMap> {
    let bundle = |name: &str| ConfigMap { metadata: namespaced(&config.namespace, name, &[]), ..ConfigMap::default() };
    [CA, EXPORT_CA, BACKUP_CA, EXTERNAL_CA].map(bundle).into()
}

pub(crate) fn is_authority(secret: &str) -> bool {
    [CA, EXPORT_CA, BACKUP_CA].contains(&secret)
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
    fn each_secret_is_described_once() {
        for config in [config(&[]), config(&["VirtTemplateDeploymentEnabled"])] {
            let lifetimes = Lifetimes::new(None).unwrap();
            let mut described: Vec<String> =
                certificates(&config, &lifetimes).into_iter().map(|certificate| certificate.secret).collect();
            let mut made: Vec<String> =
                secrets(&config).into_iter().filter_map(|secret| secret.metadata.name).collect();
            described.sort_unstable();
            made.sort_unstable();
            assert_eq!(described, made);
        }
    }

    #[test]
    fn a_service_is_known_by_all_of_its_names() {
        let lifetimes = Lifetimes::new(None).unwrap();
        let all = certificates(&config(&[]), &lifetimes);
        let find = |secret: &str| all.iter().find(|certificate| certificate.secret == secret).unwrap();
        let api = find(VIRT_API);
        assert_eq!(api.common_name, "virt-api.ns.pod.cluster.local");
        assert_eq!(api.dns_names, ["virt-api", "virt-api.ns", "virt-api.ns.svc", "virt-api.ns.svc.cluster.local"]);
        assert_eq!(find(VIRT_OPERATOR).common_name, "kubevirt-operator-webhook.ns.pod.cluster.local");
        assert_eq!(find(VIRT_HANDLER_SERVER).common_name, "kubevirt.io:system:node:virt-handler");
        let migration = find(VIRT_HANDLER_MIGRATION);
        assert_eq!((migration.usage, migration.dns_names.len()), (Usage::Client, 0));
    }
}
