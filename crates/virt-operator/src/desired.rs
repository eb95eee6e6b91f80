//! Computes the desired state, between observe and plan: the part that needs the API server and a memory. The crate
//! `vitivirt-install` decides what an installation contains. All lanes share the result.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::SystemTime,
};

use k8s_openapi::{api::core::v1::ConfigMap, jiff::Timestamp};
use kube::{Api, Client};
use parking_lot::Mutex;
use vitivirt_api::{Body, ErrorClass, Failure, ObjectKey, Outcome, Plan, Stop, Target};
use vitivirt_install::{
    Cluster, DeploymentConfig, Desired, Environment, InstallStrategy, Installation, Lane, Observed, Repairs,
    StoredObjects, UpToDate, api_replicas, desired_installation, is_eligible, previous_installation,
    record_certificate_repairs, record_repairs, running_installation, up_to_date_after,
};
use vitivirt_runtime::reconcile::{PLAN_STEP, classify};

use crate::certificates::CertificateSet;

pub(crate) struct DesiredStateBuilder {
    client: Client,
    environment: Environment,
    reading: tokio::sync::Mutex<()>,
    memory: Mutex<ReconcileMemory>,
}

/// Results of earlier reconciles that save work and writes. They may be lost at any time.
#[derive(Default)]
struct ReconcileMemory {
    /// The digest of everything that determines the installation. When it changes, nothing is up to date.
    input: u64,
    up_to_date: Arc<UpToDate>,
    repairs: Arc<Repairs>,
    /// Only while an installation is in progress, because it is reconciled many times then.
    installation: Option<(u64, Arc<Installation>)>,
    /// Whether the last reconcile of the lane `Components` found nothing to do.
    is_complete: bool,
    dumped: Option<DumpedStrategy>,
}

/// The install strategy of another release. Its large objects are compressed.
struct DumpedStrategy {
    /// The deployment that it was dumped for.
    deployment: String,
    /// The UID of its ConfigMap.
    uid: String,
    strategy: InstallStrategy,
}

impl DumpedStrategy {
    /// Whether it is the strategy of this deployment, which is now in the ConfigMap with this UID. A strategy whose
    /// ConfigMap was deleted is still valid.
    fn is_of(&self, deployment: &str, uid: Option<&str>) -> bool {
        self.deployment == deployment && uid.is_none_or(|uid| uid == self.uid)
    }
}

impl DesiredStateBuilder {
    pub(crate) fn new(client: Client, environment: Environment) -> Self {
        Self { client, environment, reading: tokio::sync::Mutex::default(), memory: Mutex::default() }
    }

    /// How often each object was written lately.
    pub(crate) fn repairs(&self) -> Arc<Repairs> {
        self.memory.lock().repairs.clone()
    }

    pub(crate) async fn desired(&self, observed: &Observed) -> Result<Desired, Failure> {
        if !is_eligible(observed) {
            return Ok(Desired::Nothing);
        }
        match self.build(observed).await {
            // Only a change of the resource helps. Other failures are retried.
            Err(failure) if failure.class == ErrorClass::Invalid => Ok(self.refused(observed, failure)?),
            result => result,
        }
    }

    /// What is kept of a resource that cannot be installed.
    fn refused(&self, observed: &Observed, failure: Failure) -> Result<Desired, Failure> {
        let Some(running) = running_installation(observed, &self.environment, &failure) else {
            return Ok(Desired::Invalid(failure));
        };
        let up_to_date = self.up_to_date(input_digest(observed)?);
        Ok(Desired::Refused { failure, running: Arc::new(running), up_to_date })
    }

    async fn build(&self, observed: &Observed) -> Result<Desired, Failure> {
        let digest = input_digest(observed)?;
        let Some(installation) = self.installation(observed, digest).await? else {
            let config = DeploymentConfig::new(&observed.kubevirt, &self.environment);
            let running = previous_installation(observed, &self.environment);
            let running = running.map(|running| (Arc::new(running), Arc::default()));
            return Ok(Desired::StrategyPending { config: Arc::new(config), running });
        };
        Ok(Desired::Installation { installation, up_to_date: self.up_to_date(digest) })
    }

    async fn installation(&self, observed: &Observed, digest: u64) -> Result<Option<Arc<Installation>>, Failure> {
        if let Some((installation_digest, installation)) = &self.memory.lock().installation
            && *installation_digest == digest
        {
            return Ok(Some(installation.clone()));
        }
        let dumped = self.dumped_strategy(observed).await?;
        let Some(installation) = desired_installation(observed, &self.environment, dumped)? else { return Ok(None) };
        let installation = Arc::new(installation);
        self.memory.lock().installation = Some((digest, installation.clone()));
        Ok(Some(installation))
    }

    /// The install strategy that the operator of another release has dumped, if the resource asks for another release.
    /// It is large, so no cache holds it, and it is read and parsed once.
    async fn dumped_strategy(&self, observed: &Observed) -> Result<Option<InstallStrategy>, Failure> {
        if !vitivirt_install::is_of_another_release(&observed.kubevirt, &self.environment) {
            self.memory.lock().dumped = None;
            return Ok(None);
        }
        let deployment = DeploymentConfig::new(&observed.kubevirt, &self.environment).id;
        let stored = observed.objects.strategy(&deployment);
        // One lane reads it, and the others wait for the result.
        let _reading = self.reading.lock().await;
        if let Some(dumped) = &self.memory.lock().dumped
            && dumped.is_of(&deployment, stored.map(|(_, live)| live.uid.as_str()))
        {
            return Ok(Some(dumped.strategy.clone()));
        }
        let Some((key, live)) = stored else { return Ok(None) };
        let strategy = read_strategy(&self.client, key).await?;
        let dumped = DumpedStrategy { deployment, uid: live.uid.clone(), strategy: strategy.clone() };
        self.memory.lock().dumped = Some(dumped);
        Ok(Some(strategy))
    }

    fn up_to_date(&self, input: u64) -> Arc<UpToDate> {
        let mut memory = self.memory.lock();
        if memory.input != input {
            memory.up_to_date = Arc::default();
        }
        memory.input = input;
        memory.up_to_date.clone()
    }

    /// After a reconcile of the lane `Certificates`: remembers its writes, so that repeated ones are limited.
    pub(crate) fn remember_certificates(
        &self,
        observed: &Observed,
        issued: &CertificateSet,
        plan: &Plan,
        stored_objects: &StoredObjects,
    ) {
        let mut memory = self.memory.lock();
        record_certificate_repairs(Arc::make_mut(&mut memory.repairs), observed, issued, plan, stored_objects);
    }

    /// After a reconcile of one lane: remembers the objects that match the desired state, so that they are not compared
    /// again.
    pub(crate) fn remember(
        &self,
        observed: &Observed,
        desired: &Desired,
        plan: &Plan,
        outcome: &Outcome,
        stored_objects: &StoredObjects,
        lane: Lane,
    ) {
        // Without a plan no object was compared.
        let no_plan = matches!(outcome.stop, Stop::Failed { step: PLAN_STEP, .. });
        if no_plan || !is_eligible(observed) {
            return;
        }
        let mut memory = self.memory.lock();
        record_repairs(Arc::make_mut(&mut memory.repairs), observed, desired, plan, stored_objects);
        // Another lane may have started to reconcile a newer resource.
        if input_digest(observed).is_ok_and(|digest| digest == memory.input)
            && let Some(up_to_date) = up_to_date_after(observed, desired, plan, stored_objects, lane)
        {
            memory.merge(desired, lane, &up_to_date);
        }
        if lane == Lane::Components {
            memory.is_complete = outcome.stop == Stop::Done;
        }
        if memory.is_complete {
            memory.installation = None;
        }
    }
}

impl ReconcileMemory {
    /// Replaces the objects of one lane. Other lanes may have changed theirs in the meantime.
    fn merge(&mut self, desired: &Desired, lane: Lane, of_lane: &UpToDate) {
        let Some((installation, _)) = desired.compared() else { return };
        let up_to_date = Arc::make_mut(&mut self.up_to_date);
        for object in installation.objects.iter().filter(|object| object.stage.lane() == lane) {
            let key = (object.kind, object.key.clone());
            match of_lane.get(&key) {
                Some(matching) => up_to_date.insert(key, matching.clone()),
                None => up_to_date.remove(&key),
            };
        }
    }
}

pub(crate) async fn read_strategy(client: &Client, key: &ObjectKey) -> Result<InstallStrategy, Failure> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), key.namespace().unwrap_or_default());
    let target = || Target::of_kind::<ConfigMap>(key.clone());
    let map = api.get(key.name()).await.map_err(|error| classify(&error, "get", &target()))?;
    InstallStrategy::decode(&map, |text| serde_saphyr::from_str(text).map_err(|error| error.to_string()))
}

/// A digest of everything in the KubeVirt resource and the cluster that determines the installation.
fn input_digest(observed: &Observed) -> Result<u64, Failure> {
    let Observed { kubevirt, cluster, .. } = observed;
    let mut hasher = DefaultHasher::new();
    Body::from_object(&kubevirt.spec)?.json().hash(&mut hasher);
    (&kubevirt.metadata.uid, kubevirt.metadata.generation).hash(&mut hasher);
    // The number of nodes determines only the replicas of virt-api.
    let replicas = api_replicas(cluster.schedulable_nodes);
    format!("{:?} {replicas}", Cluster { schedulable_nodes: 0, ..cluster.clone() }).hash(&mut hasher);
    Ok(hasher.finish())
}

pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strategy_is_read_again_only_for_another_deployment_or_another_config_map() {
        let strategy = InstallStrategy::default();
        let dumped = DumpedStrategy { deployment: "a".to_owned(), uid: "1".to_owned(), strategy };
        assert!(dumped.is_of("a", Some("1")));
        assert!(dumped.is_of("a", None), "its ConfigMap was deleted");
        assert!(!dumped.is_of("a", Some("2")));
        assert!(!dumped.is_of("b", Some("1")) && !dumped.is_of("b", None));
    }
}
