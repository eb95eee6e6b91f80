//! The install strategy: every object of a KubeVirt release, before it is customized and placed for a particular
//! KubeVirt resource and cluster.
//!
//! This operator generates the strategy of its release. The operator of another release dumps its strategy into a
//! ConfigMap, and this operator dumps its own for other operators: so each can install the release of the other.

pub(crate) mod dump;
pub(crate) mod job;
mod text;

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, reason};

use crate::{
    api_services, certificates,
    config::DeploymentConfig,
    crds::{CRDS, CrdSource, TEMPLATE_CRDS},
    digest::Digest,
    instancetypes::{self, CompressedLines, INSTANCETYPES, PREFERENCES},
    kind::Kind,
    monitoring, openshift, policy, rbac, services, template, webhooks, workloads,
};

pub use text::config_map;

/// Every object of a release, in the order of the dumped strategy.
#[derive(Clone, Default)]
pub struct InstallStrategy {
    pub(crate) items: Vec<StrategyItem>,
}

/// One object of an install strategy. Large objects stay compressed.
#[derive(Clone)]
pub struct StrategyItem {
    pub kind: Kind,
    pub key: ObjectKey,
    source: ItemSource,
}

#[derive(Clone)]
enum ItemSource {
    Object(Value),
    Crd(CrdSource),
    /// One line of an asset. The lines are shared.
    Line(Arc<[String]>, usize),
    /// A large object of another release.
    Compressed(Arc<[u8]>),
}

impl StrategyItem {
    fn new(kind: Kind, object: Value) -> Self {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let key = ObjectKey::namespaced(text("/metadata/namespace"), text("/metadata/name"));
        Self { kind, key, source: ItemSource::Object(object) }
    }

    /// The object as the KubeVirt release defines it.
    pub fn object(&self) -> Result<Value, Failure> {
        match &self.source {
            ItemSource::Object(object) => Ok(object.clone()),
            ItemSource::Crd(crd) => crd.object(),
            ItemSource::Line(lines, line) => instancetypes::object(lines, *line),
            ItemSource::Compressed(bytes) => text::decompress(bytes),
        }
    }

    /// The metadata of the object as the KubeVirt release defines it.
    pub(crate) fn metadata(&self) -> Result<Value, Failure> {
        match &self.source {
            ItemSource::Crd(crd) => crd.metadata(),
            _ => Ok(self.object()?.get_mut("metadata").map(Value::take).unwrap_or_default()),
        }
    }

    /// A digest of the object as it is kept. It changes with the object.
    pub(crate) fn digest(&self) -> Digest {
        match &self.source {
            ItemSource::Object(object) => Digest::of_object(object),
            ItemSource::Crd(crd) => Digest::of_bytes(crd.bytes()),
            ItemSource::Line(lines, line) => {
                Digest::of_bytes(lines.get(*line).map(String::as_bytes).unwrap_or_default())
            }
            ItemSource::Compressed(bytes) => Digest::of_bytes(bytes),
        }
    }

    /// Whether it stays compressed until it is sent.
    pub(crate) fn is_compressed(&self) -> bool {
        !matches!(self.source, ItemSource::Object(_))
    }
}

impl InstallStrategy {
    /// The install strategy of the release whose data this program contains.
    pub fn generate(
        config: &DeploymentConfig,
        monitor_namespace: Option<&str>,
        runbook_url_template: Option<&str>,
    ) -> Result<Self, Failure> {
        let mut strategy = Self { items: Vec::new() };
        strategy.add_rbac(config, monitor_namespace)?;
        strategy.add_crds(config);
        strategy.add_admission(config)?;
        strategy.add_workloads(config)?;
        strategy.add_all(Kind::SecurityContextConstraints, openshift::constraints(config))?;
        if let Some(namespace) = monitor_namespace {
            strategy.add_all(Kind::ServiceMonitor, [monitoring::service_monitor(config, namespace)])?;
            strategy.add_all(Kind::PrometheusRule, [monitoring::prometheus_rule(config, runbook_url_template)?])?;
        }
        strategy.add_all(Kind::ConfigMap, certificates::bundles(config))?;
        strategy.add_all(Kind::Route, [openshift::route(config)])?;
        strategy.add_lines(Kind::Instancetype, INSTANCETYPES)?;
        strategy.add_lines(Kind::Preference, PREFERENCES)?;
        strategy.items.sort_by_key(|item| item.kind);
        Ok(strategy)
    }

    pub fn items(&self) -> &[StrategyItem] {
        &self.items
    }

    fn add_rbac(&mut self, config: &DeploymentConfig, monitor_namespace: Option<&str>) -> Result<(), Failure> {
        let mut cluster_roles = rbac::cluster_roles(config);
        self.add_all(Kind::ServiceAccount, rbac::service_accounts(config))?;
        self.add_all(Kind::ClusterRoleBinding, rbac::cluster_role_bindings(config))?;
        self.add_all(Kind::Role, rbac::roles(config, monitor_namespace))?;
        self.add_all(Kind::RoleBinding, rbac::role_bindings(config, monitor_namespace))?;
        if config.template() {
            cluster_roles.extend(template::cluster_roles());
            self.add_all(Kind::ServiceAccount, template::service_accounts(config))?;
            self.add_all(Kind::ClusterRoleBinding, template::cluster_role_bindings(config))?;
            self.add_all(Kind::Role, template::roles(config))?;
            self.add_all(Kind::RoleBinding, template::role_bindings(config))?;
        }
        if config.opt_out_role_aggregation() {
            cluster_roles.iter_mut().for_each(rbac::opt_out_of_aggregation);
        }
        self.add_all(Kind::ClusterRole, cluster_roles)
    }

    fn add_crds(&mut self, config: &DeploymentConfig) {
        let template = TEMPLATE_CRDS.iter().filter(|_| config.template());
        self.items.extend(CRDS.iter().chain(template).map(|crd| StrategyItem {
            kind: Kind::CustomResourceDefinition,
            key: ObjectKey::cluster(crd.name()),
            source: ItemSource::Crd(*crd),
        }));
    }

    fn add_admission(&mut self, config: &DeploymentConfig) -> Result<(), Failure> {
        self.add_all(Kind::ValidatingWebhookConfiguration, webhooks::validating(config))?;
        self.add_all(Kind::MutatingWebhookConfiguration, webhooks::mutating(config))?;
        self.add_all(Kind::ValidatingAdmissionPolicyBinding, [policy::binding()])?;
        self.add_all(Kind::ValidatingAdmissionPolicy, [policy::policy(config)])?;
        self.add_all(Kind::ApiService, api_services::api_services(config))?;
        if config.template() {
            self.add_all(Kind::ValidatingWebhookConfiguration, template::validating(config))?;
            self.add_all(Kind::ValidatingAdmissionPolicyBinding, [template::policy_binding()])?;
            self.add_all(Kind::ValidatingAdmissionPolicy, [template::policy()])?;
            self.add_all(Kind::ApiService, template::api_services(config))?;
        }
        Ok(())
    }

    fn add_workloads(&mut self, config: &DeploymentConfig) -> Result<(), Failure> {
        self.add_all(Kind::Service, services::services(config))?;
        self.add_all(Kind::Secret, certificates::secrets(config))?;
        self.add_all(Kind::Deployment, workloads::deployments(config))?;
        self.add_all(Kind::DaemonSet, [workloads::handler(config)])?;
        if config.template() {
            self.add_all(Kind::Service, template::services(config))?;
            self.add_all(Kind::Deployment, template::deployments(config))?;
        }
        Ok(())
    }

    fn add_lines(&mut self, kind: Kind, asset: CompressedLines) -> Result<(), Failure> {
        let lines = asset.lines()?;
        for (line, text) in lines.iter().enumerate() {
            let key = ObjectKey::cluster(&instancetypes::name(text)?);
            self.items.push(StrategyItem { kind, key, source: ItemSource::Line(Arc::clone(&lines), line) });
        }
        Ok(())
    }

    fn add_all<T: Serialize>(&mut self, kind: Kind, objects: impl IntoIterator<Item = T>) -> Result<(), Failure> {
        for object in objects {
            let object = serde_json::to_value(&object).map_err(|error| {
                let message = format!("{} cannot be serialized: {error}", kind.name());
                Failure::bug(reason::BAD_REQUEST, message)
            })?;
            self.items.push(StrategyItem::new(kind, object));
        }
        Ok(())
    }
}
