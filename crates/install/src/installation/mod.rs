//! An installation: the install strategy of a KubeVirt release, customized and placed for one KubeVirt resource and its
//! cluster. It decides which objects are installed and in which stage. `strategy` has the objects of the release,
//! `object` builds the body of one object, and `plan` compares them with the cluster.

use std::sync::Arc;

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec},
    },
    apimachinery::pkg::util::intstr::IntOrString,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use vitivirt_api::{
    Body, Failure, ObjectKey,
    kubevirt::{KubeVirt, KubeVirtSpec},
};

use crate::{
    certificates::{self, Certificate, Lifetimes},
    config::DeploymentConfig,
    customize::{self, Customizer, INVALID_CUSTOMIZATION},
    environment::{Cluster, Environment},
    kind::Kind,
    managed_metadata::ManagedMetadata,
    metadata::namespaced,
    names::{
        VIRT_API, VIRT_CONTROLLER, VIRT_EXPORT_PROXY, VIRT_HANDLER, VIRT_SYNCHRONIZATION_CONTROLLER,
        VIRT_TEMPLATE_API_SERVER, VIRT_TEMPLATE_CONTROLLER, gate, label,
    },
    object::{InstallationObject, StrategyConfigMap},
    order::Stage,
    placement::{self, DefaultPlacement},
    rollout,
    strategy::{InstallStrategy, StrategyItem},
    template, validation, webhooks,
};

/// Reason of a failure: a duration in `spec.certificateRotateStrategy` is invalid.
pub const INVALID_DURATION: &str = "InvalidCertificateDuration";

/// Reason of a failure: another release has a certificate that this operator cannot issue.
pub(crate) const UNKNOWN_CERTIFICATE: &str = "UnknownCertificate";

pub struct Installation {
    pub config: DeploymentConfig,
    /// In the order of their stages.
    pub objects: Vec<InstallationObject>,
    pub certificates: Vec<Certificate>,
    /// Parts of `spec.customizeComponents` without effect on these objects, one sentence for each.
    pub(crate) unused_customizations: Vec<String>,
    /// Nodes that can run VMs.
    pub(crate) schedulable_nodes: usize,
}

impl Installation {
    /// The installation of the release whose data this program contains.
    pub fn new(kubevirt: &KubeVirt, environment: &Environment, cluster: &Cluster) -> Result<Self, Failure> {
        let config = DeploymentConfig::new(kubevirt, environment);
        let monitor = cluster.monitor_namespace.as_deref();
        let strategy = InstallStrategy::generate(&config, monitor, environment.runbook_url_template.as_deref())?;
        let config_map = InstallationObject::strategy_config_map(StrategyConfigMap {
            config: config.clone(),
            monitor_namespace: cluster.monitor_namespace.clone(),
            runbook_url_template: environment.runbook_url_template.clone(),
        });
        let mut installation = Self::from_strategy(strategy, config, kubevirt, cluster)?;
        installation.objects.insert(0, config_map);
        Ok(installation)
    }

    /// The installation of another release, from the install strategy that its own operator dumped.
    pub(crate) fn from_strategy(
        strategy: InstallStrategy,
        config: DeploymentConfig,
        kubevirt: &KubeVirt,
        cluster: &Cluster,
    ) -> Result<Self, Failure> {
        validation::check_installable(kubevirt)?;
        let lifetimes = Lifetimes::new(kubevirt.spec.self_signed())
            .map_err(|error| Failure::invalid(INVALID_DURATION, error.to_string()))?;
        let builder = Builder {
            spec: &kubevirt.spec,
            cluster,
            customizer: Customizer::new(&kubevirt.spec.customize_components)?,
            managed_metadata: Arc::new(ManagedMetadata::new(kubevirt, &config)),
            lifetimes,
        };
        let (mut objects, mut unused) = (Vec::new(), Vec::new());
        for item in strategy.items {
            objects.extend(builder.objects(item, &mut unused)?);
        }
        objects.sort_by_key(|object| object.stage);
        unused.splice(0..0, builder.unmatched_patches(&objects));
        let mut certificates = certificates::certificates(&config, &builder.lifetimes);
        // Another release may have fewer certificates. A certificate that this operator does not know cannot be issued.
        let secrets: Vec<&str> =
            objects.iter().filter(|object| object.kind == Kind::Secret).map(|object| object.key.name()).collect();
        certificates.retain(|certificate| secrets.contains(&certificate.secret.as_str()));
        if let Some(unknown) =
            secrets.iter().find(|name| !certificates.iter().any(|certificate| certificate.secret == **name))
        {
            let message = format!(
                "KubeVirt {} is not supported by this operator: it requires an unknown certificate {unknown}; use \
                 the operator of that release",
                config.kube_virt_version
            );
            return Err(Failure::invalid(UNKNOWN_CERTIFICATE, message));
        }
        let schedulable_nodes = cluster.schedulable_nodes;
        Ok(Self { config, objects, certificates, unused_customizations: unused, schedulable_nodes })
    }
}

/// Builds the objects of one installation.
struct Builder<'a> {
    spec: &'a KubeVirtSpec,
    cluster: &'a Cluster,
    customizer: Customizer,
    managed_metadata: Arc<ManagedMetadata>,
    lifetimes: Lifetimes,
}

impl Builder<'_> {
    /// The stage of an object, or `None` if the installation does not contain it.
    fn stage(&self, kind: Kind, name: &str) -> Option<Stage> {
        let has = |gate: &str| self.spec.configuration.feature_gates().iter().any(|enabled| enabled == gate);
        let instancetypes = self.spec.configuration.common_instancetypes_deployment.as_ref();
        let (stage, included) = match kind {
            Kind::CustomResourceDefinition => (Stage::Crds, true),
            Kind::ServiceMonitor => (Stage::Monitoring, self.cluster.service_monitors),
            Kind::PrometheusRule => (Stage::Monitoring, self.cluster.prometheus_rules),
            Kind::ServiceAccount | Kind::ClusterRole | Kind::Role => (Stage::Rbac, true),
            Kind::ClusterRoleBinding | Kind::RoleBinding => (Stage::Bindings, true),
            Kind::SecurityContextConstraints => (Stage::SecurityConstraints, self.cluster.security_context_constraints),
            Kind::Service => (Stage::Services, true),
            Kind::ValidatingAdmissionPolicy | Kind::ValidatingAdmissionPolicyBinding => {
                (Stage::Policies, self.cluster.admission_policies)
            }
            Kind::Secret if certificates::is_ca(name) => (Stage::CaSecrets, true),
            Kind::Secret => (Stage::Certificates, true),
            Kind::ConfigMap => (Stage::CaConfigMaps, true),
            Kind::MutatingWebhookConfiguration if name == webhooks::POD_MUTATOR => {
                (Stage::Webhooks, has(gate::CONTAINER_PATH_VOLUMES))
            }
            Kind::MutatingWebhookConfiguration | Kind::ValidatingWebhookConfiguration => (Stage::Webhooks, true),
            Kind::ApiService => (Stage::ApiServices, true),
            Kind::Route => (Stage::Routes, self.cluster.routes && has(gate::VM_EXPORT)),
            Kind::Deployment => match name {
                VIRT_API => (Stage::Api, true),
                VIRT_CONTROLLER => (Stage::Controller, true),
                VIRT_EXPORT_PROXY => (Stage::ExportProxy, has(gate::VM_EXPORT)),
                VIRT_SYNCHRONIZATION_CONTROLLER => {
                    (Stage::SynchronizationController, has(gate::DECENTRALIZED_LIVE_MIGRATION))
                }
                VIRT_TEMPLATE_API_SERVER | VIRT_TEMPLATE_CONTROLLER => (Stage::Template, has(gate::TEMPLATE)),
                // Upstream virt-operator does not install Deployments that it does not know by name.
                _ => (Stage::Template, false),
            },
            Kind::DaemonSet => (Stage::Handler, true),
            Kind::Instancetype | Kind::Preference => {
                (Stage::Instancetypes, instancetypes.and_then(|toggle| toggle.enabled).unwrap_or(true))
            }
            Kind::PodDisruptionBudget | Kind::Job => (Stage::Api, false),
        };
        included.then_some(stage)
    }

    /// The object and the objects that follow from it. Customizations without effect are added to `unused`.
    fn objects(&self, item: StrategyItem, unused: &mut Vec<String>) -> Result<Vec<InstallationObject>, Failure> {
        let (kind, key) = (item.kind, item.key.clone());
        let Some(stage) = self.stage(kind, key.name()) else { return Ok(Vec::new()) };
        if item.is_compressed() {
            return Ok(vec![InstallationObject::compressed(stage, item, &self.managed_metadata)]);
        }
        let mut object = item.object()?;
        let replicas = object.pointer("/spec/replicas").cloned();
        let rolling_update = object.pointer(rollout::ROLLING_UPDATE).cloned();
        if is_customized(kind, key.name()) {
            self.customizer.apply(kind, key.name(), &mut object)?;
        }
        let mut objects = Vec::new();
        let object = match kind {
            Kind::Deployment => {
                let patched = object.pointer("/spec/replicas").filter(|patched| Some(*patched) != replicas.as_ref());
                let patched = patched.and_then(Value::as_i64);
                let deployment = self.deployment(from_value(kind, &key, object)?);
                unused.extend(patched.and_then(|patched| self.replicas_overridden(&deployment, patched)));
                objects.extend(self.disruption_budget(stage, &deployment)?);
                to_value(&deployment)?
            }
            Kind::DaemonSet => {
                if object.pointer(rollout::ROLLING_UPDATE) != rolling_update.as_ref() {
                    unused.extend(rollout::unused_update_settings(key.name(), &object));
                }
                to_value(&self.daemon_set(from_value(kind, &key, object)?))?
            }
            Kind::Secret => {
                self.managed_metadata.add_to_object(&mut object);
                let is_ca = certificates::is_ca(key.name());
                certificates::annotate_lifetime(
                    &mut object,
                    if is_ca { self.lifetimes.ca } else { self.lifetimes.leaf },
                );
                object
            }
            _ => {
                self.managed_metadata.add_to_object(&mut object);
                object
            }
        };
        objects.insert(0, InstallationObject::from_value(stage, kind, key, object));
        Ok(objects)
    }

    fn deployment(&self, mut deployment: Deployment) -> Deployment {
        let name = deployment.metadata.name.clone().unwrap_or_default();
        self.managed_metadata.add_to_metadata(&mut deployment.metadata);
        let Some(spec) = &mut deployment.spec else { return deployment };
        self.managed_metadata.add_to_template(spec.template.metadata.get_or_insert_default());
        if let Some(pod) = &mut spec.template.spec {
            placement::place(pod, self.spec.infra.as_ref(), DefaultPlacement::ControlPlane);
            let container = match name.as_str() {
                VIRT_TEMPLATE_API_SERVER => Some(template::API_SERVER_CONTAINER),
                VIRT_TEMPLATE_CONTROLLER => Some(template::CONTROLLER_CONTAINER),
                _ => None,
            };
            if let Some(container) =
                pod.containers.iter_mut().find(|candidate| Some(candidate.name.as_str()) == container)
            {
                container.args.get_or_insert_default().extend(rollout::tls_arguments(self.spec));
            }
        }
        if let Some(replicas) = self.replicas(&name) {
            spec.replicas = Some(replicas);
        }
        deployment
    }

    /// `None` keeps the replicas of the release or of a patch.
    fn replicas(&self, name: &str) -> Option<i32> {
        let of_template = [VIRT_TEMPLATE_API_SERVER, VIRT_TEMPLATE_CONTROLLER].contains(&name);
        match self.spec.infra.as_ref().and_then(|infra| infra.replicas) {
            Some(_) if of_template => None,
            Some(replicas) => i32::try_from(replicas).ok(),
            None if name == VIRT_API && !customize::sets_replicas(&self.spec.customize_components, name) => {
                Some(rollout::api_replicas(self.cluster.schedulable_nodes))
            }
            None => None,
        }
    }

    /// A patch of the replicas that another setting overrides.
    fn replicas_overridden(&self, deployment: &Deployment, patched: i64) -> Option<String> {
        let (spec, name) = (deployment.spec.as_ref()?, deployment.metadata.name.as_deref()?);
        let replicas = spec.replicas.filter(|replicas| i64::from(*replicas) != patched)?;
        let remedy = match self.spec.infra.as_ref().and_then(|infra| infra.replicas) {
            Some(_) => "spec.infra.replicas overrides it",
            None => "set spec.infra.replicas, or use a patch of type json that replaces /spec/replicas",
        };
        Some(format!(
            "spec.customizeComponents has no effect on the replicas of {name}: the patch sets {patched}, but the \
             Deployment has {replicas}; {remedy}"
        ))
    }

    fn unmatched_patches(&self, objects: &[InstallationObject]) -> Vec<String> {
        let customized = objects.iter().map(|object| (object.kind, object.key.name()));
        self.customizer
            .unmatched_patches(&customized.filter(|(kind, name)| is_customized(*kind, name)).collect::<Vec<_>>())
    }

    /// A single replica has no PodDisruptionBudget.
    fn disruption_budget(&self, stage: Stage, deployment: &Deployment) -> Result<Option<InstallationObject>, Failure> {
        let (Some(spec), Some(name)) = (&deployment.spec, &deployment.metadata.name) else { return Ok(None) };
        let available = spec.replicas.map_or(1, |replicas| replicas - 1);
        if available == 0 {
            return Ok(None);
        }
        if available < 0 {
            let message = format!(
                "spec.customizeComponents sets the replicas of {name} to 0, but KubeVirt requires {name}; set at \
                 least 1"
            );
            return Err(Failure::invalid(INVALID_CUSTOMIZATION, message));
        }
        let name = format!("{name}-pdb");
        let namespace = deployment.metadata.namespace.as_deref().unwrap_or_default();
        let mut metadata = namespaced(namespace, &name, &[(label::APP, &name)]);
        self.managed_metadata.add_to_metadata(&mut metadata);
        let budget = PodDisruptionBudget {
            metadata,
            spec: Some(PodDisruptionBudgetSpec {
                min_available: Some(IntOrString::Int(available)),
                selector: Some(spec.selector.clone()),
                ..PodDisruptionBudgetSpec::default()
            }),
            status: None,
        };
        let key = ObjectKey::namespaced(namespace, &name);
        Ok(Some(InstallationObject::from_value(stage, Kind::PodDisruptionBudget, key, to_value(&budget)?)))
    }

    fn daemon_set(&self, mut daemon_set: DaemonSet) -> DaemonSet {
        self.managed_metadata.add_to_metadata(&mut daemon_set.metadata);
        if let Some(spec) = &mut daemon_set.spec {
            self.managed_metadata.add_to_template(spec.template.metadata.get_or_insert_default());
            if let Some(pod) = &mut spec.template.spec {
                placement::place(pod, self.spec.workloads.as_ref(), DefaultPlacement::AnyNode);
            }
        }
        if daemon_set.metadata.name.as_deref() == Some(VIRT_HANDLER) {
            rollout::limit_devices(&mut daemon_set, self.spec.configuration.virtual_machine_instances_per_node);
        }
        rollout::adjust_update_strategy(&mut daemon_set);
        daemon_set
    }
}

/// KubeVirt generates the pod mutator after it customized the other webhooks.
fn is_customized(kind: Kind, name: &str) -> bool {
    Customizer::applies_to(kind) && name != webhooks::POD_MUTATOR
}

/// Unknown fields are dropped, as in upstream virt-operator. Only a patch can contain a value of a wrong type.
fn from_value<T: DeserializeOwned>(kind: Kind, key: &ObjectKey, object: Value) -> Result<T, Failure> {
    serde_json::from_value(object).map_err(|error| {
        let message = format!("spec.customizeComponents turns {} {key} into an invalid object: {error}", kind.name());
        Failure::invalid(INVALID_CUSTOMIZATION, message)
    })
}

fn to_value<T: Serialize>(object: &T) -> Result<Value, Failure> {
    Ok(Body::from_object(object)?.into_json())
}

#[cfg(test)]
mod tests;
