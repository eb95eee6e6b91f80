//! The observe step: what the caches show of a KubeVirt resource and its installation.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::SystemTime,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{Api, Client, api::ListParams, core::DynamicObject};
use vitivirt_api::{ApiResource, ErrorClass, Failure, ObjectKey, Target, kubevirt::KubeVirt, reason};
use vitivirt_install::{
    Cluster, DeploymentConfig, Desired, Environment, HeldNodes, Kind, Lane, LaneProblem, Objects, Observed,
    names::{VIRT_API, gate::DECENTRALIZED_LIVE_MIGRATION},
    orphans,
    pods::Pods,
    served::Served,
};
use vitivirt_runtime::reconcile::classify;

use crate::{
    cache::Caches, crd_reader::CrdReader, desired::timestamp, lanes::LaneProblems,
    migration_addresses::MigrationAddresses, monitoring::MonitoringWatches, node_checks::NodeChecks,
    node_count::NodeCount, probe::CertificateProber, revisions::Revisions, storage_pages::StoragePages,
};

pub(crate) struct Observer {
    pub(crate) client: Client,
    pub(crate) caches: Caches,
    pub(crate) environment: Environment,
    /// The namespace of the operator.
    pub(crate) namespace: String,
    pub(crate) monitoring: MonitoringWatches,
    pub(crate) migration_addresses: MigrationAddresses,
    pub(crate) lane_problems: Arc<LaneProblems>,
    pub(crate) node_checks: NodeChecks,
    pub(crate) revisions: Revisions,
    pub(crate) crd_reader: CrdReader,
    pub(crate) storage_pages: StoragePages,
    pub(crate) prober: Arc<CertificateProber>,
    pub(crate) node_count: Arc<NodeCount>,
}

impl Observer {
    pub(crate) async fn observe(&self, key: &ObjectKey) -> Result<Option<Observed>, Failure> {
        let Some(kubevirt) = self.caches.kubevirts.get(key) else { return Ok(None) };
        #[expect(clippy::disallowed_methods, reason = "a reconcile observes the current time here")]
        let now = SystemTime::now();
        let first = self.caches.first_kubevirt();
        if first.as_ref().is_none_or(|first| first.metadata.uid != kubevirt.metadata.uid) {
            return Ok(self.ineligible(Arc::unwrap_or_clone(kubevirt), first.as_deref(), now));
        }
        // Before the caches are read: a cache that is incomplete now may be complete when it is read.
        let caches_complete = self.caches.are_complete();
        let objects = self.caches.objects();
        let config = DeploymentConfig::new(&kubevirt, &self.environment);
        let mut cluster = self.caches.cluster(self.schedulable_nodes().await);
        let mut lane_problems = self.lane_problems.get();
        let mut monitoring_known = true;
        let nodes = self.held_nodes(&objects, cluster.schedulable_nodes, now);
        cluster.schedulable_nodes = nodes.count;
        if cluster.service_monitors {
            match self.monitoring.namespace(&config).await {
                Ok(namespace) => cluster.monitor_namespace = namespace,
                Err(failure) => {
                    monitoring_known = false;
                    lane_problems.insert(Lane::Monitoring, LaneProblem::Lasting(failure.message));
                }
            }
        } else {
            self.monitoring.close();
        }
        Ok(Some(Observed {
            first_kubevirt: None,
            operator_namespace: self.namespace.clone(),
            architecture: architecture(),
            now: timestamp(now),
            cluster,
            objects,
            namespace: self.caches.namespace(&self.namespace),
            synchronization_addresses: self.synchronization_addresses(&kubevirt, &config).await,
            // Objects of a monitoring stack that could not be looked up are not orphans.
            caches_complete: caches_complete && monitoring_known,
            pods: self.caches.pods(),
            served: self.prober.served(),
            crd_checks: BTreeMap::new(),
            storage_page: None,
            crds_with_objects: BTreeSet::new(),
            unchecked_orphans: None,
            lane_problems,
            repairs: Arc::default(),
            nodes_held_until: nodes.until,
            kubevirt: Arc::unwrap_or_clone(kubevirt),
        }))
    }

    /// A virt-handler that is ready stands for its node as long as nodes cannot be counted: certificates and repairs do
    /// not wait for that.
    async fn schedulable_nodes(&self) -> usize {
        self.node_count.get().await.unwrap_or_else(|| self.caches.ready_handlers())
    }

    fn held_nodes(&self, objects: &Objects, nodes: usize, now: SystemTime) -> HeldNodes {
        let live_replicas = || {
            let key = ObjectKey::namespaced(&self.namespace, VIRT_API);
            objects.get(Kind::Deployment, &key)?.content()?.pointer("/spec/replicas")?.as_i64()
        };
        self.node_count.hold(timestamp(now), nodes, live_replicas)
    }

    /// A resource for which nothing is installed: its objects are not observed.
    fn ineligible(&self, kubevirt: KubeVirt, first: Option<&KubeVirt>, now: SystemTime) -> Option<Observed> {
        let first_kubevirt = if kubevirt.metadata.namespace.as_deref() == Some(&*self.namespace) {
            // Without a first resource in its namespace, this one was deleted between the two reads of the cache.
            Some(ObjectKey::from_metadata(&first?.metadata))
        } else {
            None
        };
        Some(Observed {
            first_kubevirt,
            operator_namespace: self.namespace.clone(),
            architecture: architecture(),
            now: timestamp(now),
            cluster: Cluster::default(),
            objects: Objects::default(),
            namespace: None,
            synchronization_addresses: Vec::new(),
            caches_complete: false,
            pods: Pods::default(),
            served: Served::default(),
            crd_checks: BTreeMap::new(),
            storage_page: None,
            crds_with_objects: BTreeSet::new(),
            unchecked_orphans: None,
            lane_problems: BTreeMap::new(),
            repairs: Arc::default(),
            nodes_held_until: None,
            kubevirt,
        })
    }

    /// The reported addresses stay if the present ones cannot be read.
    async fn synchronization_addresses(&self, kubevirt: &KubeVirt, config: &DeploymentConfig) -> Vec<String> {
        let gates = kubevirt.spec.configuration.feature_gates();
        if !gates.iter().any(|gate| gate == DECENTRALIZED_LIVE_MIGRATION) {
            self.migration_addresses.close();
            return Vec::new();
        }
        self.migration_addresses.addresses(config).await.unwrap_or_else(|failure| {
            tracing::warn!(error = failure.message, "addresses of virt-synchronization-controller cannot be read");
            kubevirt.status.as_ref().map(|status| status.synchronization_addresses.clone()).unwrap_or_default()
        })
    }

    /// Finds out which nodes are not ready, if a pod is not, and which pods are updated, while a rollout is in progress.
    /// Only the lane that waits for pods needs that.
    pub(crate) async fn check_rollouts(&self, observed: &mut Observed) {
        let nodes = observed.nodes_to_check();
        observed.set_dead_nodes(self.node_checks.dead_nodes(&self.client, nodes).await);
        observed.pods.current_revisions = self.revisions.current(&self.client, observed).await;
    }

    /// Before CRDs are changed. If one of them cannot be read, nothing is changed.
    pub(crate) async fn check_crds(&self, observed: &mut Observed, desired: &Desired) -> Result<(), Failure> {
        observed.crd_checks = self.crd_reader.check(&self.client, observed, desired).await?;
        observed.storage_page = self.storage_pages.read(&self.client, observed).await?;
        Ok(())
    }

    /// Before orphans are deleted: if the live check fails, they stay, and the rest of the installation goes on.
    pub(crate) async fn check_orphans(&self, observed: &mut Observed, desired: &Desired) -> Result<(), Failure> {
        let orphans = if observed.caches_complete { orphans(observed, desired) } else { Vec::new() };
        if orphans.is_empty() {
            return Ok(());
        }
        match self.live_check(observed, orphans).await {
            Err(failure) if failure.class != ErrorClass::Conflict => {
                observed.unchecked_orphans =
                    Some(format!("objects of an earlier installation are kept: {}", failure.message));
                Ok(())
            }
            result => result,
        }
    }

    /// The resource must be current, and an orphaned CRD must have no objects.
    async fn live_check(&self, observed: &mut Observed, orphans: Vec<(Kind, ObjectKey)>) -> Result<(), Failure> {
        let key = ObjectKey::from_metadata(&observed.kubevirt.metadata);
        let api: Api<KubeVirt> = Api::namespaced(self.client.clone(), &self.namespace);
        let target = Target::of_kind::<KubeVirt>(key.clone());
        let live = api.get_metadata(key.name()).await.map_err(|error| classify(&error, "get", &target))?;
        let own = &observed.kubevirt.metadata;
        if (&live.metadata.uid, live.metadata.generation) != (&own.uid, own.generation) {
            let message = format!("{target} has changed, but its watch event has not arrived yet");
            return Err(Failure::conflict(reason::OBJECT_CHANGED, message));
        }
        observed.crds_with_objects = crds_with_objects(&self.client, &orphans).await?;
        for crd in &observed.crds_with_objects {
            tracing::warn!(crd = crd.name(), "orphaned CRD kept because it still has objects");
        }
        Ok(())
    }
}

/// The CRDs among these objects that still have objects.
pub(crate) async fn crds_with_objects(
    client: &Client,
    orphans: &[(Kind, ObjectKey)],
) -> Result<BTreeSet<ObjectKey>, Failure> {
    let mut found = BTreeSet::new();
    for (_, crd) in orphans.iter().filter(|(kind, _)| *kind == Kind::CustomResourceDefinition) {
        if has_objects(client, crd).await? {
            found.insert(crd.clone());
        }
    }
    Ok(found)
}

/// The kind of a CRD, in a version in which the API server serves its objects. `None` if the CRD does not exist.
pub(crate) async fn served_resource(client: &Client, crd: &ObjectKey) -> Result<Option<ApiResource>, Failure> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let target = || Target::of_kind::<CustomResourceDefinition>(crd.clone());
    let found = match api.get_opt(crd.name()).await {
        Ok(Some(found)) => found,
        Ok(None) => return Ok(None),
        Err(error) => return Err(classify(&error, "get", &target())),
    };
    // KubeVirt's CRDs serve the version that they store. For another one, the list fails.
    let version = found.spec.versions.iter().find(|version| version.storage).map(|version| version.name.clone());
    let version = version.unwrap_or_default();
    Ok(Some(ApiResource {
        api_version: format!("{}/{version}", found.spec.group),
        group: found.spec.group,
        version,
        kind: found.spec.names.kind,
        plural: found.spec.names.plural,
    }))
}

/// Whether a CRD has objects, in any of its versions.
async fn has_objects(client: &Client, crd: &ObjectKey) -> Result<bool, Failure> {
    let Some(resource) = served_resource(client, crd).await? else { return Ok(false) };
    let objects: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    match objects.list_metadata(&ListParams::default().limit(1)).await {
        Ok(list) => Ok(!list.items.is_empty()),
        // A failed list does not prove that there are none.
        Err(error) => {
            tracing::warn!(crd = crd.name(), %error, "objects of a CRD cannot be listed");
            Ok(true)
        }
    }
}

/// The architecture of this program, as Kubernetes and Go name it.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
