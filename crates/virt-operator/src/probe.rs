//! Reads the certificates that pods serve, on the leader, and compares them with the stored ones. Nothing is sent to
//! the API server: the pods and Secrets are in the caches, and a probe is a TLS handshake with a pod.
//!
//! The results are part of what a reconcile observes. `vitivirt_install::served` decides what follows from them.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{StreamExt, stream};
use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;
use tokio::{sync::Notify, time::sleep};
use vitivirt_api::ObjectKey;
use vitivirt_install::{
    Kind,
    certificates::{BUNDLE_KEY, CA},
    pods::Pod,
    served::{ENDPOINTS, Endpoint, Served, ServedCertificate, ServedState},
};
use vitivirt_runtime::tls::served_certificate;

use crate::{
    cache::{self, Caches},
    certificates::served::{TrustedCas, check, expiry, seconds_until_expiry, stored_leaf},
    desired::timestamp,
    metrics::{CertificateLabels, OperatorMetrics},
    router::EventRouter,
};

const TIMEOUT: Duration = Duration::from_secs(5);
const PROBES_AT_ONCE: usize = 4;
/// Between two rounds, if every pod serves the stored certificate.
const INTERVAL: Duration = Duration::from_secs(60);
/// Between two rounds, if a pod does not.
const OUTDATED_INTERVAL: Duration = Duration::from_secs(10);
/// Secrets, bundles and pods change together. One round follows all of these changes.
const SETTLE: Duration = Duration::from_secs(2);

pub(crate) struct CertificateProber {
    caches: Caches,
    router: Arc<EventRouter>,
    metrics: Arc<OperatorMetrics>,
    changed: Notify,
    state: Mutex<ProbeState>,
}

struct ProbeState {
    served: Served,
    /// The pods that do not serve the stored certificate, by UID and port.
    outdated: HashMap<(Box<str>, u16), Outdated>,
}

/// Since when a pod serves the same certificate instead of the stored one.
#[derive(Clone, Copy)]
struct Outdated {
    since: Timestamp,
    /// Whether clients accept the stored certificate.
    stored_is_good: bool,
    /// When the served certificate expires. It changes when the pod loads a newer one, even if that is not the newest.
    expires: Option<Timestamp>,
}

/// One pod to probe.
struct PodProbe {
    endpoint: &'static Endpoint,
    pod: ObjectKey,
    uid: Box<str>,
    address: SocketAddr,
    /// The stored certificate, in DER.
    stored: Arc<[u8]>,
}

impl CertificateProber {
    pub(crate) fn new(
        caches: &Caches,
        router: &Arc<EventRouter>,
        metrics: &Arc<OperatorMetrics>,
        reload_time: Duration,
    ) -> Arc<Self> {
        let served = Served { reload_time, ..Served::default() };
        Arc::new(Self {
            caches: caches.clone(),
            router: router.clone(),
            metrics: metrics.clone(),
            changed: Notify::new(),
            state: Mutex::new(ProbeState { served, outdated: HashMap::new() }),
        })
    }

    /// Starts a round soon after a certificate, a bundle or a pod changed.
    pub(crate) fn subscribe(self: &Arc<Self>) {
        for (kind, cache) in self.caches.installed_objects() {
            if matches!(kind, Kind::Secret | Kind::ConfigMap) {
                let prober = self.clone();
                cache.subscribe(move |change| {
                    let is_certificate = ENDPOINTS.iter().any(|endpoint| endpoint.secret == change.key.name());
                    if is_certificate || change.key.name() == CA {
                        prober.changed.notify_one();
                    }
                });
            }
        }
        for cache in [&self.caches.component_pods, &self.caches.operator_pods] {
            let prober = self.clone();
            cache.subscribe(move |change| {
                let probed = |pod: &Option<Arc<Pod>>| pod.as_ref().map(|pod| (pod.uid.clone(), pod.address, pod.ready));
                if probed(&change.old) != probed(&change.new) {
                    prober.changed.notify_one();
                }
            });
        }
    }

    pub(crate) fn served(&self) -> Served {
        self.state.lock().served.clone()
    }

    /// A pod is deleted at most once.
    pub(crate) fn remember_deleted(&self, pod: Option<&ServedCertificate>) {
        if let Some(pod) = pod {
            self.state.lock().served.deleted_pods.insert(pod.pod_uid.clone(), pod.endpoint.deployment);
        }
    }

    /// Another replica leads now.
    pub(crate) fn clear(&self) {
        let mut state = self.state.lock();
        state.served.certificates.clear();
        state.outdated.clear();
        self.metrics.set_certificate_expiry([]);
    }

    /// Probes until it is dropped.
    pub(crate) async fn run(&self) {
        let reload_time = self.served().reload_time;
        loop {
            let all_good = self.probe_all().await;
            let pause = if all_good { INTERVAL.min(reload_time) } else { OUTDATED_INTERVAL.min(reload_time / 4) };
            tokio::select! {
                () = sleep(pause) => {}
                () = self.changed.notified() => sleep(SETTLE.min(pause)).await,
            }
        }
    }

    /// Returns whether every pod that presents a certificate serves the stored one.
    async fn probe_all(&self) -> bool {
        let probes = self.probes();
        let results = stream::iter(probes).map(|probe| async move {
            let served = served_certificate(probe.address, TIMEOUT).await;
            (probe, served)
        });
        let results: Vec<(PodProbe, Option<Vec<u8>>)> = results.buffer_unordered(PROBES_AT_ONCE).collect().await;
        #[expect(clippy::disallowed_methods, reason = "certificates are compared with the current time here")]
        let now = SystemTime::now();
        self.set_metrics(&results, now);
        self.evaluate(results, now)
    }

    /// The pods that serve a certificate of which a Secret exists. None before KubeVirt is installed.
    fn probes(&self) -> Vec<PodProbe> {
        if self.caches.first_kubevirt().is_none() {
            return Vec::new();
        }
        let pods = self.caches.pods();
        let with_secret = ENDPOINTS.iter().filter_map(|endpoint| {
            let stored: Arc<[u8]> = stored_leaf(&self.caches.key_pair(endpoint.secret)?.certificate)?.into();
            Some((endpoint, stored))
        });
        let of_endpoint = |(endpoint, stored): (&'static Endpoint, Arc<[u8]>)| {
            let pods = pods.of(Kind::Deployment, endpoint.deployment);
            let pods = pods.filter(|(_, pod)| pod.deleted.is_none() && !pod.ended);
            let probes = pods.filter_map(|(key, pod)| {
                let address = SocketAddr::new(pod.address?, endpoint.port);
                Some(PodProbe { endpoint, pod: key.clone(), uid: pod.uid.clone(), address, stored: stored.clone() })
            });
            probes.collect::<Vec<_>>()
        };
        with_secret.flat_map(of_endpoint).collect()
    }

    fn set_metrics(&self, results: &[(PodProbe, Option<Vec<u8>>)], now: SystemTime) {
        let labels = |secret: &str, served| CertificateLabels { secret: secret.to_owned(), served };
        let secrets = self.caches.installed_objects().filter(|(kind, _)| *kind == Kind::Secret);
        let secrets = secrets.flat_map(|(_, cache)| cache.entries());
        let stored = secrets.filter_map(|(key, entry)| {
            let leaf = stored_leaf(&cache::certificate(&entry.value)?.certificate)?;
            Some((labels(key.name(), "false"), seconds_until_expiry(&leaf, now)?))
        });
        let mut served: BTreeMap<&str, i64> = BTreeMap::new();
        for (probe, certificate) in results {
            let seconds = certificate.as_ref().and_then(|certificate| seconds_until_expiry(certificate, now));
            if let Some(seconds) = seconds {
                let first = served.entry(probe.endpoint.secret).or_insert(seconds);
                *first = seconds.min(*first);
            }
        }
        let served = served.into_iter().map(|(secret, seconds)| (labels(secret, "true"), seconds));
        self.metrics.set_certificate_expiry(stored.chain(served));
    }

    /// Stores the results, and enqueues the resource if they changed.
    fn evaluate(&self, results: Vec<(PodProbe, Option<Vec<u8>>)>, now: SystemTime) -> bool {
        let cas = TrustedCas::from_bundle(&self.caches.bundle(CA, BUNDLE_KEY).unwrap_or_default());
        let mut state = self.state.lock();
        let ProbeState { served: known, outdated } = &mut *state;
        outdated.retain(|(uid, _), _| results.iter().any(|(probe, _)| probe.uid == *uid));
        let mut certificates = Vec::new();
        for (probe, served) in results {
            let PodProbe { endpoint, pod, uid, stored, .. } = probe;
            let stored_is_good = cas.accept(&stored, now);
            let result = check(served.as_deref(), &stored, &cas, now);
            let key = (uid.clone(), endpoint.port);
            match result {
                ServedState::Good => drop(outdated.remove(&key)),
                // It is not known whether the pod serves the stored certificate again.
                ServedState::Unreachable => {}
                ServedState::NotReloaded | ServedState::Expired | ServedState::Untrusted => {
                    let expires = served.as_deref().and_then(expiry).map(timestamp);
                    let seen = Outdated { since: timestamp(now), stored_is_good, expires };
                    let known = outdated.entry(key).or_insert(seen);
                    if (known.stored_is_good, known.expires) != (stored_is_good, expires) {
                        *known = seen;
                    }
                    let since = known.since;
                    let expires = expires.unwrap_or(since);
                    certificates.push(ServedCertificate {
                        endpoint,
                        pod,
                        pod_uid: uid,
                        state: result,
                        stored_is_good,
                        since,
                        expires,
                    });
                }
            }
        }
        certificates.sort_by(|a, b| (a.endpoint.secret, &a.pod).cmp(&(b.endpoint.secret, &b.pod)));
        let (all_good, changed) = (certificates.is_empty(), known.certificates != certificates);
        known.certificates = certificates;
        if all_good {
            known.deleted_pods.clear();
        }
        drop(state);
        if changed {
            self.router.served_certificates_changed();
        }
        all_good
    }
}
