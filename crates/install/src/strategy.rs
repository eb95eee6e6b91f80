//! The install strategy: every object of a release as the release defines it, before anything of a particular cluster
//! or resource is laid over it.
//!
//! Ours is generated. That of another release comes as text from that release's own operator, and ours is written as
//! such text for it: that is how either installs what the other defines.

pub(crate) mod job;
mod text;

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, reason};

use crate::{
    api_services, certificates,
    config::DeploymentConfig,
    crds::{CrdSource, DEFINITIONS, TEMPLATE_DEFINITIONS},
    instancetypes::{self, Bundle, INSTANCETYPES, PREFERENCES},
    kind::Kind,
    monitoring, openshift, policy, rbac, services, template, webhooks, workloads,
};

pub(crate) use text::GENERATE_NAME;
pub use text::{ENCODING, MANIFESTS, config_map};

/// Every object of a release, in the order in which its text lists them.
pub struct Strategy {
    pub(crate) items: Vec<Item>,
}

/// One object of it. Big ones stay packed.
pub struct Item {
    pub kind: Kind,
    pub key: ObjectKey,
    source: Source,
}

#[derive(Clone)]
enum Source {
    Object(Value),
    CrdSource(CrdSource),
    /// One of the lines of a bundle, which are shared.
    Bundled(Arc<[String]>, usize),
    /// A big object of another release.
    Repacked(Arc<[u8]>),
}

impl Item {
    fn new(kind: Kind, object: Value) -> Self {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let key = ObjectKey::namespaced(text("/metadata/namespace"), text("/metadata/name"));
        Self { kind, key, source: Source::Object(object) }
    }

    /// The object as the release defines it.
    pub fn object(&self) -> Result<Value, Failure> {
        match &self.source {
            Source::Object(object) => Ok(object.clone()),
            Source::CrdSource(definition) => definition.object(),
            Source::Bundled(lines, line) => instancetypes::object(lines, *line),
            Source::Repacked(bytes) => text::unpack(bytes),
        }
    }

    /// Whether it is to stay packed until it is sent.
    pub(crate) fn is_packed(&self) -> bool {
        !matches!(self.source, Source::Object(_))
    }
}

impl Strategy {
    /// That of the release whose data this program holds.
    pub fn generate(
        config: &DeploymentConfig,
        monitor_namespace: Option<&str>,
        runbook_url_template: Option<&str>,
    ) -> Result<Self, Failure> {
        let mut strategy = Self { items: Vec::new() };
        strategy.add_access(config, monitor_namespace)?;
        strategy.add_definitions(config);
        strategy.add_admission(config)?;
        strategy.add_workloads(config)?;
        strategy.all(Kind::SecurityContextConstraints, openshift::constraints(config))?;
        if let Some(namespace) = monitor_namespace {
            strategy.all(Kind::ServiceMonitor, [monitoring::service_monitor(config, namespace)])?;
            strategy.all(Kind::PrometheusRule, [monitoring::prometheus_rule(config, runbook_url_template)?])?;
        }
        strategy.all(Kind::ConfigMap, certificates::bundles(config))?;
        strategy.all(Kind::Route, [openshift::route(config)])?;
        strategy.add_bundle(Kind::Instancetype, INSTANCETYPES)?;
        strategy.add_bundle(Kind::Preference, PREFERENCES)?;
        strategy.items.sort_by_key(|item| item.kind);
        Ok(strategy)
    }

    pub fn items(&self) -> &[Item] {
        &self.items
    }

    fn add_access(&mut self, config: &DeploymentConfig, monitor_namespace: Option<&str>) -> Result<(), Failure> {
        let mut cluster_roles = rbac::cluster_roles(config);
        self.all(Kind::ServiceAccount, rbac::service_accounts(config))?;
        self.all(Kind::ClusterRoleBinding, rbac::cluster_role_bindings(config))?;
        self.all(Kind::Role, rbac::roles(config, monitor_namespace))?;
        self.all(Kind::RoleBinding, rbac::role_bindings(config, monitor_namespace))?;
        if config.template() {
            cluster_roles.extend(template::cluster_roles());
            self.all(Kind::ServiceAccount, template::service_accounts(config))?;
            self.all(Kind::ClusterRoleBinding, template::cluster_role_bindings(config))?;
            self.all(Kind::Role, template::roles(config))?;
            self.all(Kind::RoleBinding, template::role_bindings(config))?;
        }
        if config.opt_out_role_aggregation() {
            cluster_roles.iter_mut().for_each(rbac::opt_out_of_aggregation);
        }
        self.all(Kind::ClusterRole, cluster_roles)
    }

    fn add_definitions(&mut self, config: &DeploymentConfig) {
        let template = TEMPLATE_DEFINITIONS.iter().filter(|_| config.template());
        self.items.extend(DEFINITIONS.iter().chain(template).map(|definition| Item {
            kind: Kind::CustomResourceDefinition,
            key: ObjectKey::cluster(definition.name()),
            source: Source::CrdSource(*definition),
        }));
    }

    fn add_admission(&mut self, config: &DeploymentConfig) -> Result<(), Failure> {
        self.all(Kind::ValidatingWebhookConfiguration, webhooks::validating(config))?;
        self.all(Kind::MutatingWebhookConfiguration, webhooks::mutating(config))?;
        self.all(Kind::ValidatingAdmissionPolicyBinding, [policy::binding()])?;
        self.all(Kind::ValidatingAdmissionPolicy, [policy::policy(config)])?;
        self.all(Kind::ApiService, api_services::api_services(config))?;
        if config.template() {
            self.all(Kind::ValidatingWebhookConfiguration, template::validating(config))?;
            self.all(Kind::ValidatingAdmissionPolicyBinding, [template::policy_binding()])?;
            self.all(Kind::ValidatingAdmissionPolicy, [template::policy()])?;
            self.all(Kind::ApiService, template::api_services(config))?;
        }
        Ok(())
    }

    fn add_workloads(&mut self, config: &DeploymentConfig) -> Result<(), Failure> {
        self.all(Kind::Service, services::services(config))?;
        self.all(Kind::Secret, certificates::secrets(config))?;
        self.all(Kind::Deployment, workloads::deployments(config))?;
        self.all(Kind::DaemonSet, [workloads::handler(config)])?;
        if config.template() {
            self.all(Kind::Service, template::services(config))?;
            self.all(Kind::Deployment, template::deployments(config))?;
        }
        Ok(())
    }

    fn add_bundle(&mut self, kind: Kind, bundle: Bundle) -> Result<(), Failure> {
        let lines = bundle.lines()?;
        for (line, text) in lines.iter().enumerate() {
            let key = ObjectKey::cluster(&instancetypes::name(text)?);
            self.items.push(Item { kind, key, source: Source::Bundled(Arc::clone(&lines), line) });
        }
        Ok(())
    }

    fn all<T: Serialize>(&mut self, kind: Kind, objects: impl IntoIterator<Item = T>) -> Result<(), Failure> {
        for object in objects {
            let object = serde_json::to_value(&object).map_err(|error| {
                let message = format!("a {} cannot be written as JSON: {error}", kind.name());
                Failure::bug(reason::BAD_REQUEST, message)
            })?;
            self.items.push(Item::new(kind, object));
        }
        Ok(())
    }
}
