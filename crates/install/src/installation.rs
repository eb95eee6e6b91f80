//! An installation: the strategy of a release with everything laid over it that the resource and the cluster say.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use vitivirt_api::{
    Failure, ObjectKey,
    kubevirt::{KubeVirt, KubeVirtSpec},
};

use crate::{
    build::namespaced,
    certificates::{self, Certificate, Lifetimes},
    config::DeploymentConfig,
    customize::{self, Customizer, INVALID_CUSTOMIZATION},
    environment::{Cluster, Environment},
    kind::Kind,
    managed_metadata::{self, ManagedMetadata},
    names::{
        VIRT_API, VIRT_CONTROLLER, VIRT_EXPORT_PROXY, VIRT_HANDLER, VIRT_SYNCHRONIZATION_CONTROLLER,
        VIRT_TEMPLATE_API_SERVER, VIRT_TEMPLATE_CONTROLLER, annotation, gate, label,
    },
    object::{Object, Told},
    order::Stage,
    placement::{self, Usually},
    rollout,
    strategy::{Item, Strategy},
    template, validation, warnings, webhooks,
};

/// Reason of a failure: a duration in `spec.certificateRotateStrategy` cannot be read.
pub const INVALID_DURATION: &str = "InvalidCertificateDuration";

/// Reason of a failure: another release has a certificate that is not known here.
pub const UNKNOWN_CERTIFICATE: &str = "UnknownCertificate";

/// Everything that an installation consists of.
pub struct Installation {
    pub config: DeploymentConfig,
    /// In the order of their stages.
    pub objects: Vec<Object>,
    pub certificates: Vec<Certificate>,
    /// What of `spec.customizeComponents` these objects show nothing of, one sentence for each.
    pub(crate) idle: Vec<String>,
}

impl Installation {
    /// That of the release whose data this program holds.
    pub fn new(kubevirt: &KubeVirt, environment: &Environment, cluster: &Cluster) -> Result<Self, Failure> {
        let config = DeploymentConfig::new(kubevirt, environment);
        let monitor = cluster.monitor_namespace.as_deref();
        let strategy = Strategy::generate(&config, monitor, environment.runbook_url_template.as_deref())?;
        let told = Object::told(Told {
            config: config.clone(),
            monitor_namespace: cluster.monitor_namespace.clone(),
            runbook_url_template: environment.runbook_url_template.clone(),
        });
        let mut installation = Self::of(strategy, config, kubevirt, cluster)?;
        installation.objects.insert(0, told);
        Ok(installation)
    }

    /// That of another release, given the strategy that its own operator has left in a ConfigMap.
    pub fn of(
        strategy: Strategy,
        config: DeploymentConfig,
        kubevirt: &KubeVirt,
        cluster: &Cluster,
    ) -> Result<Self, Failure> {
        validation::sound(kubevirt)?;
        let lifetimes = Lifetimes::new(kubevirt.spec.self_signed())
            .map_err(|error| Failure::invalid(INVALID_DURATION, error.to_string()))?;
        let overlay = Overlay {
            spec: &kubevirt.spec,
            cluster,
            customizer: Customizer::new(&kubevirt.spec.customize_components)?,
            stamp: Arc::new(ManagedMetadata::new(kubevirt, &config)),
            lifetimes,
        };
        let (mut objects, mut idle) = (Vec::new(), Vec::new());
        for item in strategy.items {
            objects.extend(overlay.objects(item, &mut idle)?);
        }
        objects.sort_by_key(|object| object.stage);
        idle.splice(0..0, overlay.idle_patches(&objects));
        let mut certificates = certificates::certificates(&config, &overlay.lifetimes);
        // Another release may have fewer; one that is not known here cannot be issued.
        let secrets: Vec<&str> =
            objects.iter().filter(|object| object.kind == Kind::Secret).map(|object| object.key.name()).collect();
        certificates.retain(|certificate| secrets.contains(&certificate.secret.as_str()));
        if let Some(unknown) = secrets.iter().find(|name| !certificates.iter().any(|known| known.secret == **name)) {
            let message = format!(
                "KubeVirt {} has a certificate {unknown} that this operator does not know: it cannot install that release",
                config.kube_virt_version
            );
            return Err(Failure::invalid(UNKNOWN_CERTIFICATE, message));
        }
        Ok(Self { config, objects, certificates, idle })
    }

    /// What whoever wrote the resource should know, one sentence for each.
    pub fn warnings(&self, kubevirt: &KubeVirt) -> Vec<String> {
        warnings::messages(warnings::all(kubevirt, Some(self)))
    }
}

/// Where an object belongs, and whether it is wanted at all.
struct Overlay<'a> {
    spec: &'a KubeVirtSpec,
    cluster: &'a Cluster,
    customizer: Customizer,
    stamp: Arc<ManagedMetadata>,
    lifetimes: Lifetimes,
}

impl Overlay<'_> {
    fn stage(&self, kind: Kind, name: &str) -> Option<Stage> {
        let has = |gate: &str| self.spec.configuration.gates().iter().any(|enabled| enabled == gate);
        let instancetypes = self.spec.configuration.common_instancetypes_deployment.as_ref();
        let (stage, wanted) = match kind {
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
            Kind::Secret if certificates::is_authority(name) => (Stage::CaSecrets, true),
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
                // The reference installs none that it does not know by name.
                _ => (Stage::Template, false),
            },
            Kind::DaemonSet => (Stage::Handler, true),
            Kind::Instancetype | Kind::Preference => {
                (Stage::Instancetypes, instancetypes.and_then(|toggle| toggle.enabled).unwrap_or(true))
            }
            Kind::PodDisruptionBudget | Kind::Job => (Stage::Api, false),
        };
        wanted.then_some(stage)
    }

    /// `idle` learns what of the resource has no effect on it.
    fn objects(&self, item: Item, idle: &mut Vec<String>) -> Result<Vec<Object>, Failure> {
        let (kind, key) = (item.kind, item.key.clone());
        let Some(stage) = self.stage(kind, key.name()) else { return Ok(Vec::new()) };
        if item.is_packed() {
            return Ok(vec![Object::packed(stage, item, &self.stamp)]);
        }
        let mut object = item.object()?;
        let replicas = object.pointer("/spec/replicas").cloned();
        if is_customized(kind, key.name()) {
            self.customizer.apply(kind, key.name(), &mut object)?;
        }
        let mut objects = Vec::new();
        let object = match kind {
            Kind::Deployment => {
                let patched = object.pointer("/spec/replicas").filter(|patched| Some(*patched) != replicas.as_ref());
                let patched = patched.and_then(Value::as_i64);
                let deployment = self.deployment(from_value(kind, &key, object)?);
                idle.extend(patched.and_then(|patched| self.overruled(&deployment, patched)));
                objects.extend(self.budget(stage, &deployment)?);
                to_value(&deployment)?
            }
            Kind::DaemonSet => to_value(&self.daemon_set(from_value(kind, &key, object)?))?,
            Kind::Secret => {
                self.stamp.object(&mut object);
                self.annotate_lifetime(&key, &mut object);
                object
            }
            _ => {
                self.stamp.object(&mut object);
                object
            }
        };
        objects.insert(0, Object::ready(stage, kind, key, object));
        Ok(objects)
    }

    fn deployment(&self, mut deployment: Deployment) -> Deployment {
        let name = deployment.metadata.name.clone().unwrap_or_default();
        self.stamp.metadata(&mut deployment.metadata);
        let Some(spec) = &mut deployment.spec else { return deployment };
        self.stamp.template(spec.template.metadata.get_or_insert_default());
        if let Some(pod) = &mut spec.template.spec {
            placement::place(pod, self.spec.infra.as_ref(), Usually::ControlPlane);
            let container = match name.as_str() {
                VIRT_TEMPLATE_API_SERVER => Some(template::API_SERVER_CONTAINER),
                VIRT_TEMPLATE_CONTROLLER => Some(template::CONTROLLER_CONTAINER),
                _ => None,
            };
            if let Some(container) = pod.containers.iter_mut().find(|found| Some(found.name.as_str()) == container) {
                container.args.get_or_insert_default().extend(rollout::tls_arguments(self.spec));
            }
        }
        if let Some(replicas) = self.replicas(&name) {
            spec.replicas = Some(replicas);
        }
        deployment
    }

    /// `None` leaves what the release or a patch says.
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

    /// A patch of replicas that something else decides about.
    fn overruled(&self, deployment: &Deployment, patched: i64) -> Option<String> {
        let (spec, name) = (deployment.spec.as_ref()?, deployment.metadata.name.as_deref()?);
        let replicas = spec.replicas.filter(|replicas| i64::from(*replicas) != patched)?;
        let instead = match self.spec.infra.as_ref().and_then(|infra| infra.replicas) {
            Some(_) => "spec.infra.replicas decides",
            None => "only a patch of the type json that replaces /spec/replicas, or spec.infra.replicas, decides",
        };
        Some(format!(
            "spec.customizeComponents has no effect on the replicas of {name}: it asks for {patched}, and there are \
             {replicas}; {instead}"
        ))
    }

    fn idle_patches(&self, objects: &[Object]) -> Vec<String> {
        let customized = objects.iter().map(|object| (object.kind, object.key.name()));
        self.customizer.idle(&customized.filter(|(kind, name)| is_customized(*kind, name)).collect::<Vec<_>>())
    }

    /// With one replica there is nothing to keep available.
    fn budget(&self, stage: Stage, deployment: &Deployment) -> Result<Option<Object>, Failure> {
        let (Some(spec), Some(name)) = (&deployment.spec, &deployment.metadata.name) else { return Ok(None) };
        let available = spec.replicas.map_or(1, |replicas| replicas - 1);
        if available == 0 {
            return Ok(None);
        }
        if available < 0 {
            let message = format!(
                "spec.customizeComponents leaves {name} without replicas, and KubeVirt does not work without it: ask for \
                 1 or more"
            );
            return Err(Failure::invalid(INVALID_CUSTOMIZATION, message));
        }
        let name = format!("{name}-pdb");
        let namespace = deployment.metadata.namespace.as_deref().unwrap_or_default();
        let mut metadata = namespaced(namespace, &name, &[(label::APP, &name)]);
        self.stamp.metadata(&mut metadata);
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
        Ok(Some(Object::ready(stage, Kind::PodDisruptionBudget, key, to_value(&budget)?)))
    }

    fn daemon_set(&self, mut daemon_set: DaemonSet) -> DaemonSet {
        self.stamp.metadata(&mut daemon_set.metadata);
        if let Some(spec) = &mut daemon_set.spec {
            self.stamp.template(spec.template.metadata.get_or_insert_default());
            if let Some(pod) = &mut spec.template.spec {
                placement::place(pod, self.spec.workloads.as_ref(), Usually::AnyNode);
            }
        }
        if daemon_set.metadata.name.as_deref() == Some(VIRT_HANDLER) {
            rollout::limit_devices(&mut daemon_set, self.spec.configuration.virtual_machine_instances_per_node);
        }
        rollout::settle(&mut daemon_set);
        daemon_set
    }

    fn annotate_lifetime(&self, key: &ObjectKey, secret: &mut Value) {
        let lifetime =
            if certificates::is_authority(key.name()) { self.lifetimes.authority } else { self.lifetimes.leaf };
        if let Some(metadata) = secret.get_mut("metadata").and_then(Value::as_object_mut) {
            let duration = (annotation::DURATION.to_owned(), lifetime.annotation());
            managed_metadata::merge(metadata, "annotations", &[duration].into());
        }
    }
}

/// The release makes one of the webhooks anew each time, after it has customized the others.
fn is_customized(kind: Kind, name: &str) -> bool {
    Customizer::applies_to(kind) && name != webhooks::POD_MUTATOR
}

/// Fields that the type does not know are dropped, as the reference drops them; a wrong type is the customizer's.
fn from_value<T: DeserializeOwned>(kind: Kind, key: &ObjectKey, object: Value) -> Result<T, Failure> {
    serde_json::from_value(object).map_err(|error| {
        let message = format!("what spec.customizeComponents makes of {} {key} is none: {error}", kind.name());
        Failure::invalid(INVALID_CUSTOMIZATION, message)
    })
}

fn to_value<T: Serialize>(object: &T) -> Result<Value, Failure> {
    Ok(vitivirt_api::Body::of(object)?.into_json())
}

#[cfg(test)]
#[path = "installation_tests.rs"]
mod tests;
