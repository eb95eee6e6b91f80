//! The observe step: from the caches to everything that a pass decides on. Certificates that are missing or due are
//! issued here, because that needs keys and a clock; they count only when the plan has written them.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::SystemTime,
};

use k8s_openapi::{
    api::core::v1::ConfigMap, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kube::{Api, Client, api::ListParams, core::DynamicObject};
use parking_lot::Mutex;
use vitivirt_api::{
    ApiResource, ErrorClass, Failure, ObjectKey, Outcome, Plan, Stop, Target, kubevirt::KubeVirt, reason,
};
use vitivirt_install::{
    Cluster, DeploymentConfig, Desired, Environment, Installation, Kind, Objects, Observed, Strategy, UpToDate,
    certificates::NothingIssued,
    names::{annotation, gate::DECENTRALIZED_LIVE_MIGRATION},
};
use vitivirt_runtime::reconcile::classify;

use crate::{
    cache::{self, Caches},
    certificates::{CertificateSet, Key, StoredCertificates, StoredSecret, issue_certificates},
    migration_addresses::MigrationAddresses,
    monitoring::Monitoring,
    stored_objects::StoredObjectRecorder,
};

pub(crate) struct Observer {
    client: Client,
    caches: Caches,
    environment: Environment,
    namespace: String,
    monitoring: Monitoring,
    synchronization: MigrationAddresses,
    stored_objects: Arc<StoredObjectRecorder>,
    memory: Mutex<Memory>,
}

/// What saves work and writes, and may be forgotten.
#[derive(Default)]
struct Memory {
    /// Of everything that decides what is wanted. With another one nothing is settled.
    wanted: u64,
    /// Of what was issued. With another one nothing is settled that holds a part of it.
    issued: u64,
    up_to_date: Arc<UpToDate>,
    /// While an installation goes on it is looked at many times.
    installation: Option<(u64, Arc<Installation>)>,
}

impl Observer {
    pub(crate) fn new(
        client: Client,
        caches: Caches,
        environment: Environment,
        namespace: String,
        monitoring: Monitoring,
        synchronization: MigrationAddresses,
        stored_objects: Arc<StoredObjectRecorder>,
    ) -> Self {
        Self {
            client,
            caches,
            environment,
            namespace,
            monitoring,
            synchronization,
            stored_objects,
            memory: Mutex::default(),
        }
    }

    pub(crate) async fn observe(&self, key: &ObjectKey) -> Result<Option<Observed>, Failure> {
        let Some(kubevirt) = self.caches.kubevirts.get(key) else { return Ok(None) };
        // A pass that was dropped has left answers to what is perhaps not wanted any more.
        drop(self.stored_objects.take());
        #[expect(clippy::disallowed_methods, reason = "a reconcile observes the current time here")]
        let now = SystemTime::now();
        let first = self.caches.first_kubevirt();
        if first.as_ref().is_none_or(|first| first.metadata.uid != kubevirt.metadata.uid) {
            return Ok(Some(self.refused(Arc::unwrap_or_clone(kubevirt), first.as_deref(), now)));
        }
        // Before everything else: a cache that is incomplete now may have become complete when it is read.
        let complete = self.caches.are_complete();
        let objects = self.caches.objects();
        let config = DeploymentConfig::new(&kubevirt, &self.environment);
        let mut cluster = self.caches.cluster();
        if cluster.service_monitors {
            cluster.monitor_namespace = self.monitoring.namespace(&config).await?;
        } else {
            self.monitoring.close();
        }
        let synchronizes = kubevirt.spec.configuration.gates().iter().any(|gate| gate == DECENTRALIZED_LIVE_MIGRATION);
        let synchronization = if synchronizes {
            self.synchronization.addresses(&config).await?
        } else {
            self.synchronization.close();
            Vec::new()
        };
        let wanted = self.wanted(&kubevirt, &cluster, &config, &objects).await;
        let (wanted, issued) = match wanted.and_then(|wanted| with_certificates(wanted, &objects, now)) {
            Ok(both) => both,
            // Only a change of the resource helps; anything else is tried again.
            Err(failure) if failure.class == ErrorClass::Invalid => (Desired::Invalid(failure), None),
            Err(failure) => return Err(failure),
        };
        let renewal = issued.as_ref().and_then(|issued| issued.next);
        let up_to_date = self.up_to_date(&kubevirt, &cluster, issued.as_deref());
        let mut observed = Observed {
            earlier: None,
            operator_namespace: self.namespace.clone(),
            architecture: architecture(),
            now: timestamp(now),
            desired: wanted,
            issued: match issued {
                Some(issued) => issued,
                None => Arc::new(NothingIssued),
            },
            renewal: renewal.map(timestamp),
            objects,
            namespace: self.caches.namespace(&self.namespace),
            synchronization,
            up_to_date,
            complete,
            in_use: BTreeSet::new(),
            kubevirt: Arc::unwrap_or_clone(kubevirt),
        };
        self.look_before_deleting(&mut observed).await?;
        Ok(Some(observed))
    }

    /// A resource that is not installed: nothing of the installation is looked at for it.
    fn refused(&self, kubevirt: KubeVirt, first: Option<&KubeVirt>, now: SystemTime) -> Observed {
        let elsewhere = kubevirt.metadata.namespace.as_deref() != Some(&*self.namespace);
        let config = DeploymentConfig::new(&kubevirt, &self.environment);
        Observed {
            earlier: first.filter(|_| !elsewhere).map(|first| ObjectKey::of(&first.metadata)),
            operator_namespace: self.namespace.clone(),
            architecture: architecture(),
            now: timestamp(now),
            desired: Desired::StrategyPending(Arc::new(config)),
            issued: Arc::new(NothingIssued),
            renewal: None,
            objects: Objects::default(),
            namespace: None,
            synchronization: Vec::new(),
            up_to_date: Arc::default(),
            complete: false,
            in_use: BTreeSet::new(),
            kubevirt,
        }
    }

    /// What is no longer wanted is deleted only if the resource still does not want it, and a definition only if there
    /// is nothing of it.
    async fn look_before_deleting(&self, observed: &mut Observed) -> Result<(), Failure> {
        let obsolete = if observed.complete { vitivirt_install::obsolete(observed) } else { Vec::new() };
        if obsolete.is_empty() {
            return Ok(());
        }
        let key = ObjectKey::of(&observed.kubevirt.metadata);
        let api: Api<KubeVirt> = Api::namespaced(self.client.clone(), &self.namespace);
        let target = Target::of::<KubeVirt>(key.clone());
        let live = api.get_metadata(key.name()).await.map_err(|error| classify(&error, "get", &target))?;
        let own = &observed.kubevirt.metadata;
        if (&live.metadata.uid, live.metadata.generation) != (&own.uid, own.generation) {
            let message = format!("{target} has changed, and the watch has not told yet");
            return Err(Failure::conflict(reason::OBJECT_CHANGED, message));
        }
        let crds = obsolete.into_iter().filter(|(kind, _)| *kind == Kind::CustomResourceDefinition);
        for (_, crd) in crds {
            if self.has_objects(&crd).await? {
                tracing::warn!(
                    crd = crd.name(),
                    "no longer part of the installation, but kept with the objects that it defines"
                );
                observed.in_use.insert(crd);
            }
        }
        Ok(())
    }

    /// Whether there is anything of this definition, in any of its versions.
    async fn has_objects(&self, crd: &ObjectKey) -> Result<bool, Failure> {
        let api: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        let target = || Target::of::<CustomResourceDefinition>(crd.clone());
        let found = match api.get_opt(crd.name()).await {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(false),
            Err(error) => return Err(classify(&error, "get", &target())),
        };
        let Some(version) = found.spec.versions.iter().find(|version| version.storage && version.served) else {
            return Ok(true);
        };
        let resource = ApiResource {
            group: found.spec.group.clone(),
            version: version.name.clone(),
            api_version: format!("{}/{}", found.spec.group, version.name),
            kind: found.spec.names.kind.clone(),
            plural: found.spec.names.plural.clone(),
        };
        let objects: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        match objects.list_metadata(&ListParams::default().limit(1)).await {
            Ok(list) => Ok(!list.items.is_empty()),
            // Not known is not empty.
            Err(error) => {
                tracing::warn!(crd = crd.name(), %error, "what it defines cannot be listed");
                Ok(true)
            }
        }
    }

    async fn wanted(
        &self,
        kubevirt: &KubeVirt,
        cluster: &Cluster,
        config: &DeploymentConfig,
        objects: &Objects,
    ) -> Result<Desired, Failure> {
        let digest = digest(kubevirt, cluster);
        if let Some((of, installation)) = &self.memory.lock().installation
            && *of == digest
        {
            return Ok(Desired::Installation(installation.clone()));
        }
        let installation = if vitivirt_install::is_of_another_release(kubevirt, &self.environment) {
            let Some((key, _)) = objects.strategy(&config.id) else {
                return Desired::strategy(kubevirt, config.clone());
            };
            let strategy = self.told(key).await?;
            Installation::of(strategy, config.clone(), kubevirt, cluster)?
        } else {
            Installation::new(kubevirt, &self.environment, cluster)?
        };
        let installation = Arc::new(installation);
        self.memory.lock().installation = Some((digest, installation.clone()));
        Ok(Desired::Installation(installation))
    }

    /// What another release's operator has told. It is big, so no cache holds it.
    async fn told(&self, key: &ObjectKey) -> Result<Strategy, Failure> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), key.namespace().unwrap_or_default());
        let target = || Target::of::<ConfigMap>(key.clone());
        let map = api.get(key.name()).await.map_err(|error| classify(&error, "get", &target()))?;
        Strategy::decode(&map, |text| serde_saphyr::from_str(text).map_err(|error| error.to_string()))
    }

    fn up_to_date(&self, kubevirt: &KubeVirt, cluster: &Cluster, issued: Option<&CertificateSet>) -> Arc<UpToDate> {
        let (wanted, issued) = (digest(kubevirt, cluster), issued.map(CertificateSet::digest).unwrap_or_default());
        let mut memory = self.memory.lock();
        if memory.wanted != wanted {
            memory.up_to_date = Arc::default();
        } else if memory.issued != issued {
            Arc::make_mut(&mut memory.up_to_date).retain(|(kind, _), _| !holds_certificates(*kind));
        }
        (memory.wanted, memory.issued) = (wanted, issued);
        memory.up_to_date.clone()
    }

    /// After a pass: what it found or made to be as wanted need not be compared again.
    pub(crate) fn remember(&self, observed: &Observed, plan: &Plan, outcome: &Outcome) {
        let stored_objects = self.stored_objects.take();
        if vitivirt_install::is_refused(observed) {
            return;
        }
        let up_to_date = observed.up_to_date_after(plan, &stored_objects);
        let mut memory = self.memory.lock();
        memory.up_to_date = Arc::new(up_to_date);
        if outcome.stop == Stop::Done {
            memory.installation = None;
        }
    }
}

/// Certificates that are missing or due are issued.
pub(crate) fn with_certificates(
    wanted: Desired,
    objects: &Objects,
    now: SystemTime,
) -> Result<(Desired, Option<Arc<CertificateSet>>), Failure> {
    let Desired::Installation(installation) = &wanted else { return Ok((wanted, None)) };
    let issued =
        issue_certificates(&installation.certificates, &stored_certificates(objects), now, &mut Key::generate)?;
    Ok((wanted, Some(Arc::new(issued))))
}

fn holds_certificates(kind: Kind) -> bool {
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

/// Of what the resource and the cluster say about an installation.
fn digest(kubevirt: &KubeVirt, cluster: &Cluster) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(&kubevirt.spec).unwrap_or_default().hash(&mut hasher);
    (&kubevirt.metadata.uid, kubevirt.metadata.generation).hash(&mut hasher);
    format!("{cluster:?}").hash(&mut hasher);
    hasher.finish()
}

fn stored_certificates(objects: &Objects) -> StoredCertificates {
    let secrets = objects.of(Kind::Secret).filter_map(|(key, live)| {
        let pair = cache::certificate(live)?;
        let duration = live.annotations.get(annotation::DURATION).cloned();
        Some((key.name().to_owned(), StoredSecret { certificate: pair.certificate, key: pair.key, duration }))
    });
    let bundles = objects.of(Kind::ConfigMap).filter(|(_, live)| !live.is_strategy);
    let bundles: BTreeMap<String, String> = bundles
        .filter_map(|(key, live)| Some((key.name().to_owned(), live.data(vitivirt_install::certificates::BUNDLE_KEY)?)))
        .collect();
    StoredCertificates { secrets: secrets.collect(), bundles }
}

pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// As Kubernetes and Go name it.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
