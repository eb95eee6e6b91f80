//! Computes the desired state, between observe and plan: the part that needs keys, a clock and the API server. The
//! crate `vitivirt-install` decides what an installation contains. Certificates that are missing or due are issued
//! here. They take effect only when the plan has written them.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::SystemTime,
};

use k8s_openapi::{api::core::v1::ConfigMap, jiff::Timestamp};
use kube::{Api, Client};
use parking_lot::Mutex;
use vitivirt_api::{Body, ErrorClass, Failure, ObjectKey, Outcome, Plan, Stop, Target};
use vitivirt_install::{
    DeploymentConfig, Desired, Environment, InstallStrategy, Installation, Kind, Objects, Observed, Repairs, UpToDate,
    certificates::BUNDLE_KEY, desired_installation, is_eligible, names::annotation, repairs_after, up_to_date_after,
};
use vitivirt_runtime::reconcile::{PLAN_STEP, classify};

use crate::{
    cache,
    certificates::{CertificateSet, Key, StoredCertificates, StoredSecret, issue_certificates},
    stored_objects::StoredObjectRecorder,
};

pub(crate) struct DesiredStateBuilder {
    client: Client,
    environment: Environment,
    stored_objects: Arc<StoredObjectRecorder>,
    memory: Mutex<ReconcileMemory>,
}

/// Results of earlier reconciles that save work and writes. They may be lost at any time.
#[derive(Default)]
struct ReconcileMemory {
    /// The digest of everything that determines the installation. When it changes, nothing is up to date.
    input: u64,
    /// The digest of the certificates. When it changes, no object that contains a certificate is up to date.
    certificates: u64,
    up_to_date: Arc<UpToDate>,
    repairs: Arc<Repairs>,
    /// Only while an installation is in progress, because it is reconciled many times then.
    installation: Option<(u64, Arc<Installation>)>,
}

impl DesiredStateBuilder {
    pub(crate) fn new(client: Client, environment: Environment, stored_objects: Arc<StoredObjectRecorder>) -> Self {
        Self { client, environment, stored_objects, memory: Mutex::default() }
    }

    /// How often each object was written lately.
    pub(crate) fn repairs(&self) -> Arc<Repairs> {
        self.memory.lock().repairs.clone()
    }

    pub(crate) async fn desired(&self, observed: &Observed) -> Result<Desired, Failure> {
        // A cancelled reconcile may have left stored objects of an earlier desired state.
        drop(self.stored_objects.take());
        if !is_eligible(observed) {
            return Ok(Desired::Nothing);
        }
        match self.build(observed).await {
            // Only a change of the resource helps. Other failures are retried.
            Err(failure) if failure.class == ErrorClass::Invalid => Ok(Desired::Invalid(failure)),
            result => result,
        }
    }

    async fn build(&self, observed: &Observed) -> Result<Desired, Failure> {
        let digest = input_digest(observed)?;
        let Some(installation) = self.installation(observed, digest).await? else {
            let config = DeploymentConfig::new(&observed.kubevirt, &self.environment);
            return Ok(Desired::StrategyPending(Arc::new(config)));
        };
        let certificates = renew_certificates(&installation, observed)?;
        let up_to_date = self.up_to_date(digest, certificates.digest());
        Ok(with_certificates(installation, certificates, up_to_date))
    }

    async fn installation(&self, observed: &Observed, digest: u64) -> Result<Option<Arc<Installation>>, Failure> {
        if let Some((installation_digest, installation)) = &self.memory.lock().installation
            && *installation_digest == digest
        {
            return Ok(Some(installation.clone()));
        }
        let dumped = if vitivirt_install::is_of_another_release(&observed.kubevirt, &self.environment) {
            let config = DeploymentConfig::new(&observed.kubevirt, &self.environment);
            match observed.objects.strategy(&config.id) {
                Some((key, _)) => Some(self.dumped_strategy(key).await?),
                None => None,
            }
        } else {
            None
        };
        let Some(installation) = desired_installation(observed, &self.environment, dumped)? else { return Ok(None) };
        let installation = Arc::new(installation);
        self.memory.lock().installation = Some((digest, installation.clone()));
        Ok(Some(installation))
    }

    /// The install strategy that the operator of another release has dumped. It is large, so no cache holds it.
    async fn dumped_strategy(&self, key: &ObjectKey) -> Result<InstallStrategy, Failure> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), key.namespace().unwrap_or_default());
        let target = || Target::of_kind::<ConfigMap>(key.clone());
        let map = api.get(key.name()).await.map_err(|error| classify(&error, "get", &target()))?;
        InstallStrategy::decode(&map, |text| serde_saphyr::from_str(text).map_err(|error| error.to_string()))
    }

    fn up_to_date(&self, input: u64, certificates: u64) -> Arc<UpToDate> {
        let mut memory = self.memory.lock();
        if memory.input != input {
            memory.up_to_date = Arc::default();
        } else if memory.certificates != certificates {
            Arc::make_mut(&mut memory.up_to_date).retain(|(kind, _), _| !contains_certificates(*kind));
        }
        (memory.input, memory.certificates) = (input, certificates);
        memory.up_to_date.clone()
    }

    /// After a reconcile: remembers the objects that match the desired state, so that they are not compared again.
    pub(crate) fn remember(&self, observed: &Observed, desired: &Desired, plan: &Plan, outcome: &Outcome) {
        let stored_objects = self.stored_objects.take();
        // Without a plan no object was compared.
        let no_plan = matches!(outcome.stop, Stop::Failed { step: PLAN_STEP, .. });
        if no_plan || !is_eligible(observed) {
            return;
        }
        let up_to_date = up_to_date_after(observed, desired, plan, &stored_objects);
        let repairs = repairs_after(observed, desired, plan, &stored_objects);
        let mut memory = self.memory.lock();
        memory.repairs = Arc::new(repairs);
        if let Some(up_to_date) = up_to_date {
            memory.up_to_date = Arc::new(up_to_date);
        }
        if outcome.stop == Stop::Done {
            memory.installation = None;
        }
    }
}

/// Issues the certificates that are missing or due; the others are kept.
pub(crate) fn renew_certificates(installation: &Installation, observed: &Observed) -> Result<CertificateSet, Failure> {
    let held = stored_certificates(&observed.objects);
    issue_certificates(&installation.certificates, &held, SystemTime::from(observed.now), &mut Key::generate)
}

pub(crate) fn with_certificates(
    installation: Arc<Installation>,
    certificates: CertificateSet,
    up_to_date: Arc<UpToDate>,
) -> Desired {
    let renew_at = certificates.next.map(timestamp);
    Desired::Installation { installation, certificates: Arc::new(certificates), renew_at, up_to_date }
}

fn contains_certificates(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Secret
            | Kind::ConfigMap
            | Kind::ValidatingWebhookConfiguration
            | Kind::MutatingWebhookConfiguration
            | Kind::ApiService
            | Kind::Route
    )
}

/// A digest of everything in the KubeVirt resource and the cluster that determines the installation.
fn input_digest(observed: &Observed) -> Result<u64, Failure> {
    let Observed { kubevirt, cluster, .. } = observed;
    let mut hasher = DefaultHasher::new();
    Body::from_object(&kubevirt.spec)?.json().hash(&mut hasher);
    (&kubevirt.metadata.uid, kubevirt.metadata.generation).hash(&mut hasher);
    format!("{cluster:?}").hash(&mut hasher);
    Ok(hasher.finish())
}

fn stored_certificates(objects: &Objects) -> StoredCertificates {
    let secrets = objects.recognized(Kind::Secret).filter_map(|(key, live)| {
        let pair = cache::certificate(live)?;
        let duration = live.annotations.get(annotation::DURATION).cloned();
        Some((key.name().to_owned(), StoredSecret { certificate: pair.certificate, key: pair.key, duration }))
    });
    let bundles = objects.recognized(Kind::ConfigMap).filter(|(_, live)| !live.is_strategy);
    let bundles: BTreeMap<String, String> =
        bundles.filter_map(|(key, live)| Some((key.name().to_owned(), live.data(BUNDLE_KEY)?))).collect();
    StoredCertificates { secrets: secrets.collect(), bundles }
}

pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH)
}
