//! The certificates that pods serve. virt-operator reads them over TLS and compares them with the stored ones; this
//! module decides what is reported, and which pod is deleted because it does not load a new certificate.
//!
//! A kubelet needs more than a minute until a changed Secret is in the files of its pods, so nothing happens before
//! `reload_time` has passed.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::{
    api::core::v1::Pod as KubernetesPod,
    jiff::{SignedDuration, Timestamp},
};
use vitivirt_api::{ObjectKey, Outcome, Plan, Step, Stop, Target, Write};

use crate::{
    certificates,
    kind::Kind,
    live::Rollout,
    names::{VIRT_API, VIRT_EXPORT_PROXY, VIRT_OPERATOR, VIRT_TEMPLATE_API_SERVER, VIRT_TEMPLATE_CONTROLLER},
    observed::Observed,
    pods::{Pod, examples},
};

pub use crate::observed::{Endpoint, Served, ServedCertificate, ServedState};

const STEP: &str = "pods without a valid certificate";

/// What the API server and users connect to.
pub static ENDPOINTS: [Endpoint; 5] = [
    Endpoint { deployment: VIRT_API, port: 8443, secret: certificates::VIRT_API },
    Endpoint { deployment: VIRT_OPERATOR, port: 8444, secret: certificates::VIRT_OPERATOR },
    Endpoint { deployment: VIRT_EXPORT_PROXY, port: 8443, secret: certificates::VIRT_EXPORT_PROXY },
    Endpoint { deployment: VIRT_TEMPLATE_API_SERVER, port: 9443, secret: certificates::TEMPLATE_API },
    Endpoint { deployment: VIRT_TEMPLATE_CONTROLLER, port: 9443, secret: certificates::TEMPLATE_WEBHOOK },
];

impl ServedState {
    fn is_refused(self) -> bool {
        matches!(self, Self::Expired | Self::Untrusted)
    }
}

impl Default for Served {
    fn default() -> Self {
        Self { certificates: Vec::new(), reload_time: Self::RELOAD_TIME, deleted_pods: BTreeMap::new() }
    }
}

impl Served {
    /// A kubelet needs up to 90 s for the files, and a component some seconds to read them.
    pub const RELOAD_TIME: Duration = Duration::from_secs(120);

    fn alarm_after(&self) -> SignedDuration {
        SignedDuration::try_from(self.reload_time).unwrap_or(SignedDuration::MAX)
    }

    /// Later than the alarm, so that a pod that is only slow is not deleted.
    fn delete_after(&self) -> SignedDuration {
        SignedDuration::try_from(self.reload_time.saturating_mul(3) / 2).unwrap_or(SignedDuration::MAX)
    }

    /// How long before its certificate expires a pod that has not loaded the new one is deleted: enough for several
    /// pods, one after the other.
    fn replace_before_expiry(&self) -> SignedDuration {
        SignedDuration::try_from(self.reload_time.saturating_mul(5)).unwrap_or(SignedDuration::MAX)
    }

    /// When a pod is deleted because of its certificate. `None` if a new pod would not help.
    fn deleted_at(&self, certificate: &ServedCertificate) -> Option<Timestamp> {
        // The operator's own pods load their certificate from the cache and not from files, so a new pod would serve
        // the same.
        if !certificate.stored_is_good || certificate.endpoint.deployment == VIRT_OPERATOR {
            return None;
        }
        let earliest = certificate.since + self.delete_after();
        match certificate.state {
            ServedState::Expired | ServedState::Untrusted => Some(earliest),
            // Clients still accept it, so there is time: the pod may only be slow.
            ServedState::NotReloaded => Some(earliest.max(certificate.expires - self.replace_before_expiry())),
            ServedState::Good | ServedState::Unreachable => None,
        }
    }
}

/// When the next result has lasted long enough to be reported or acted on.
pub(crate) fn next_deadline(observed: &Observed) -> Option<Duration> {
    let served = &observed.served;
    let outdated = served.certificates.iter().filter(|certificate| certificate.is_outdated());
    let certificates = outdated.flat_map(|certificate| {
        [Some(certificate.since + served.alarm_after()), served.deleted_at(certificate)].into_iter().flatten()
    });
    let apis = observed.objects.of_kind(Kind::ApiService);
    let apis = apis.filter_map(|(_, live)| Some(live.unavailable.as_ref()?.since? + served.alarm_after()));
    // No event reports that the kubelet of a pod does not answer.
    let endpoints = ENDPOINTS.iter().filter(|endpoint| {
        served
            .certificates
            .iter()
            .any(|served| served.is_outdated() && served.endpoint.deployment == endpoint.deployment)
    });
    let pods = endpoints.flat_map(|endpoint| observed.pods.of(Kind::Deployment, endpoint.deployment));
    let overdue = pods.filter_map(|(_, pod)| pod.overdue_from());
    let left = certificates.chain(apis).chain(overdue).map(|deadline| deadline.duration_since(observed.now));
    let left = left.filter(SignedDuration::is_positive).filter_map(|left| Duration::try_from(left).ok()).min();
    // Timers and clocks are not exact, and a reconcile before the deadline would have no effect.
    left.map(|left| left + Duration::from_millis(100))
}

impl ServedCertificate {
    fn is_outdated(&self) -> bool {
        !matches!(self.state, ServedState::Good | ServedState::Unreachable)
    }

    fn lasts(&self, limit: SignedDuration, now: Timestamp) -> bool {
        now.duration_since(self.since) >= limit
    }

    /// The pod, if it still exists.
    fn pod<'a>(&self, observed: &'a Observed) -> Option<&'a Pod> {
        let mut pods = observed.pods.of(Kind::Deployment, self.endpoint.deployment);
        pods.find(|(_, pod)| pod.uid == self.pod_uid && pod.deleted.is_none()).map(|(_, pod)| &**pod)
    }
}

/// A sentence for a condition.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Alarm {
    pub(crate) text: String,
    /// Whether clients are refused now.
    pub(crate) degrades: bool,
}

/// Certificates that have not been as they should for longer than a pod needs to load them.
pub(crate) fn alarms(observed: &Observed, stop: &Stop) -> Vec<Alarm> {
    let served = &observed.served;
    let mut groups: BTreeMap<(&str, ServedState, bool), Vec<&ServedCertificate>> = BTreeMap::new();
    for certificate in &served.certificates {
        let lasts = certificate.lasts(served.alarm_after(), observed.now);
        if certificate.is_outdated() && lasts && certificate.pod(observed).is_some() {
            let key = (certificate.endpoint.deployment, certificate.state, certificate.stored_is_good);
            groups.entry(key).or_default().push(certificate);
        }
    }
    let mut alarms: Vec<Alarm> = groups.into_values().filter_map(|group| alarm(&group)).collect();
    // While components start, their own state explains why an API is not available.
    if *stop == Stop::Done {
        alarms.extend(unavailable_apis(observed));
    }
    alarms
}

fn alarm(group: &[&ServedCertificate]) -> Option<Alarm> {
    let first = group.first()?;
    let Endpoint { deployment, secret, .. } = first.endpoint;
    let pods = examples(group.iter().map(|served| format!("pod {}", served.pod.name())));
    let what = match first.state {
        ServedState::Expired => format!("{deployment} serves an expired certificate ({pods})"),
        ServedState::Untrusted => {
            format!("{deployment} serves a certificate that is not signed by a CA in kubevirt-ca ({pods})")
        }
        _ => format!("{deployment} does not serve the certificate in Secret {secret} ({pods})"),
    };
    let remedy = match (first.state.is_refused(), first.stored_is_good, *deployment) {
        (false, true, VIRT_OPERATOR) | (false, false, _) => {
            "the pod has not loaded it; delete the pod before its certificate expires".to_owned()
        }
        (false, true, _) => {
            "the pod has not loaded it; the operator deletes the pod before its certificate expires".to_owned()
        }
        (true, false, _) => format!("Secret {secret} has no valid certificate either; the operator issues a new one"),
        (true, true, VIRT_OPERATOR) => format!("Secret {secret} has a valid one; delete the pod"),
        (true, true, _) => {
            format!("Secret {secret} has a valid one; the operator deletes such pods, one at a time")
        }
    };
    Some(Alarm { text: format!("{what}: {remedy}"), degrades: first.state.is_refused() })
}

/// The API server's own result for the APIs that virt-api and virt-template serve.
fn unavailable_apis(observed: &Observed) -> impl Iterator<Item = Alarm> {
    let limit = observed.served.alarm_after();
    observed.objects.of_kind(Kind::ApiService).filter_map(move |(key, live)| {
        let unavailable = live.unavailable.as_ref()?;
        let lasts = unavailable.since.is_some_and(|since| observed.now.duration_since(since) >= limit);
        lasts.then(|| Alarm {
            text: format!("APIService {} is not available: {}", key.name(), unavailable.message),
            degrades: true,
        })
    })
}

/// Deletes one pod that serves a certificate that clients refuse or will soon refuse, although its Secret has had a
/// valid one for longer than the pod needs to load it. Users report such pods: an installation without working webhooks
/// for days.
pub(crate) fn delete_pod(observed: &Observed) -> Option<Step> {
    let served = &observed.served;
    // The next pod follows when the last deleted one was replaced.
    let exists = |deployment: &str| {
        let key = ObjectKey::namespaced(&observed.operator_namespace, deployment);
        observed.objects.get(Kind::Deployment, &key).is_some()
    };
    let mut deployments = served.deleted_pods.values().filter(|deployment| exists(deployment));
    if !deployments.all(|deployment| is_complete(observed, deployment, None)) {
        return None;
    }
    let certificate = served.certificates.iter().find(|certificate| {
        let Endpoint { deployment, .. } = certificate.endpoint;
        served.deleted_at(certificate).is_some_and(|at| at <= observed.now)
            && !served.deleted_pods.contains_key(&certificate.pod_uid)
            && certificate.pod(observed).is_some()
            && is_complete(observed, deployment, Some(&certificate.pod_uid))
    })?;
    let target = Target::of_kind::<KubernetesPod>(certificate.pod.clone());
    Some(Step::new(STEP).independent(true).write(Write::Delete {
        target,
        uid: certificate.pod_uid.to_string(),
        resource_version: None,
    }))
}

/// Whether a Deployment of this installation has all its pods, and all of them are ready, except perhaps one. A pod that is
/// being deleted on a node that does not answer stays for as long as the node. Its Deployment has replaced it already.
fn is_complete(observed: &Observed, deployment: &str, except: Option<&str>) -> bool {
    let key = ObjectKey::namespaced(&observed.operator_namespace, deployment);
    let rollout = observed.objects.get(Kind::Deployment, &key).and_then(|live| live.rollout);
    let Some(Rollout { current: true, pods, updated, .. }) = rollout else { return false };
    let own = observed
        .pods
        .of(Kind::Deployment, deployment)
        .map(|(_, pod)| pod)
        .filter(|pod| !pod.ended && !pod.is_overdue(observed.now));
    let own: Vec<_> = own.collect();
    !own.is_empty()
        && i64::try_from(own.len()) == Ok(pods)
        && updated >= pods
        && own.iter().all(|pod| pod.deleted.is_none() && (pod.ready || except == Some(&*pod.uid)))
}

/// The pod that a plan deletes because of its certificate, if the request was sent.
pub fn deleted_pod<'a>(observed: &'a Observed, plan: &Plan, outcome: &Outcome) -> Option<&'a ServedCertificate> {
    let step = plan.steps.iter().find(|step| step.name == STEP)?;
    // If a step failed, the next observation shows whether the pod is being deleted.
    if !matches!(&outcome.stop, Stop::Done | Stop::Waiting { .. }) {
        return None;
    }
    let Some(Write::Delete { uid, .. }) = step.writes.first() else { return None };
    observed.served.certificates.iter().find(|served| *served.pod_uid == **uid)
}

/// The message of the event about a deleted pod.
pub(crate) fn deleted_message(served: &ServedCertificate) -> String {
    let what = match served.state {
        ServedState::Expired => "an expired certificate",
        ServedState::NotReloaded => "a certificate that is about to expire",
        _ => "an untrusted certificate",
    };
    let Endpoint { secret, deployment, .. } = served.endpoint;
    format!(
        "Pod {} was deleted because it serves {what}, although Secret {secret} has a valid one; Deployment {deployment} \
         replaces it",
        served.pod.name()
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::{live::LiveObject, observed::Objects, pods::Pods};

    const NOW: i64 = 1_800_000_000;
    const BAD: ServedState = ServedState::Expired;

    fn now() -> Timestamp {
        Timestamp::from_second(NOW).unwrap()
    }

    fn key(name: &str) -> ObjectKey {
        ObjectKey::namespaced("kubevirt", name)
    }

    /// A pod of a Deployment: its name and UID, and whether it is ready.
    fn pod(deployment: &str, name: &str, ready: bool) -> (ObjectKey, Arc<Pod>) {
        let owner = format!("{deployment}-5f");
        let ready = if ready { "True" } else { "False" };
        let pod = json!({
            "metadata": {"name": name, "namespace": "kubevirt", "uid": name, "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": "o", "controller": true},
            ]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]},
        });
        (key(name), Arc::new(Pod::new(serde_json::from_value(pod).unwrap())))
    }

    fn deployment(name: &str, replicas: i64) -> LiveObject {
        let annotations = json!({
            "kubevirt.io/install-strategy-version": "v", "kubevirt.io/install-strategy-registry": "r",
        });
        let metadata = json!({"name": name, "uid": name, "generation": 1, "annotations": annotations});
        let data = json!({
            "spec": {"template": {"spec": {"containers": []}}},
            "status": {"observedGeneration": 1, "replicas": replicas, "updatedReplicas": replicas,
                "readyReplicas": replicas},
        });
        LiveObject::new(&serde_json::from_value(metadata).unwrap(), data)
    }

    fn certificate(endpoint: usize, pod: &str, state: ServedState, seconds: i64) -> ServedCertificate {
        ServedCertificate {
            endpoint: &ENDPOINTS[endpoint],
            pod: key(pod),
            pod_uid: pod.into(),
            state,
            stored_is_good: true,
            since: Timestamp::from_second(NOW - seconds).unwrap(),
            expires: Timestamp::from_second(NOW + 4 * 3600).unwrap(),
        }
    }

    fn observed(certificates: Vec<ServedCertificate>, pods: Vec<(ObjectKey, Arc<Pod>)>) -> Observed {
        let mut objects = Objects::default();
        for name in [VIRT_API, VIRT_EXPORT_PROXY, VIRT_OPERATOR, VIRT_TEMPLATE_API_SERVER] {
            let live = deployment(name, if [VIRT_API, VIRT_OPERATOR].contains(&name) { 2 } else { 1 });
            objects.insert(Kind::Deployment, key(name), Arc::new(live));
        }
        Observed {
            kubevirt: serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
                "metadata": {"name": "kubevirt", "namespace": "kubevirt"}, "spec": {},
            }))
            .unwrap(),
            first_kubevirt: None,
            operator_namespace: "kubevirt".to_owned(),
            architecture: "amd64",
            now: now(),
            cluster: Default::default(),
            objects,
            namespace: None,
            synchronization_addresses: Vec::new(),
            caches_complete: true,
            pods: Pods::from_iter(pods),
            served: Served { certificates, ..Served::default() },
            crd_checks: BTreeMap::new(),
            storage_page: None,
            crds_with_objects: Default::default(),
            unchecked_orphans: None,
            lane_problems: BTreeMap::new(),
            repairs: Arc::default(),
            nodes_held_until: None,
        }
    }

    fn two_api_pods() -> Vec<(ObjectKey, Arc<Pod>)> {
        vec![pod(VIRT_API, "api-1", true), pod(VIRT_API, "api-2", true)]
    }

    fn deletes(observed: &Observed) -> Option<String> {
        let step = delete_pod(observed)?;
        assert_eq!(step.writes.len(), 1);
        match &step.writes[0] {
            Write::Delete { target, uid, .. } => {
                assert_eq!((target.resource.kind.as_str(), target.key.name()), ("Pod", uid.as_str()));
                Some(uid.clone())
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pod_with_a_refused_certificate_is_deleted_when_its_time_is_over() {
        for (state, seconds, expected) in [
            (ServedState::Expired, 180, true),
            (ServedState::Untrusted, 180, true),
            (ServedState::Expired, 179, false),
            (ServedState::NotReloaded, 1000, false),
            (ServedState::Unreachable, 1000, false),
            (ServedState::Good, 1000, false),
        ] {
            let observed = observed(vec![certificate(0, "api-1", state, seconds)], two_api_pods());
            assert_eq!(deletes(&observed).is_some(), expected, "{state:?} for {seconds} s");
        }
    }

    /// Upstream virt-operator leaves the pod alone: when the certificate that it has in memory expires, its APIs are
    /// unavailable, and namespaces cannot be deleted.
    #[test]
    fn fault_1_a_pod_that_never_loads_its_new_certificate_is_replaced_before_the_old_one_expires() {
        let template = ENDPOINTS.iter().position(|endpoint| endpoint.deployment == VIRT_TEMPLATE_API_SERVER).unwrap();
        for (endpoint, deployment, replicas) in
            [(0, VIRT_API, 2), (2, VIRT_EXPORT_PROXY, 1), (template, VIRT_TEMPLATE_API_SERVER, 1)]
        {
            let pods: Vec<_> = (1..=replicas).map(|number| pod(deployment, &format!("pod-{number}"), true)).collect();
            let mut observed =
                observed(vec![certificate(endpoint, "pod-1", ServedState::NotReloaded, 1000)], pods.clone());
            assert_eq!(deletes(&observed), None, "{deployment}: its certificate is valid for hours");
            // The report asks for a reconcile at that time.
            let left = next_deadline(&observed).unwrap();
            assert_eq!(left.as_secs(), 4 * 3600 - 600, "{deployment}");
            observed.now += SignedDuration::try_from(left).unwrap();
            assert!(observed.now < observed.served.certificates[0].expires);
            assert_eq!(deletes(&observed).as_deref(), Some("pod-1"), "{deployment}");
            let message = deleted_message(&observed.served.certificates[0]);
            assert!(message.contains("about to expire") && message.contains(deployment), "{message}");
        }
    }

    #[test]
    fn a_pod_is_not_deleted_when_a_new_one_would_serve_the_same() {
        let mut bad_secret = certificate(0, "api-1", BAD, 1000);
        bad_secret.stored_is_good = false;
        assert_eq!(deletes(&observed(vec![bad_secret], two_api_pods())), None);
        let operator = vec![pod(VIRT_OPERATOR, "operator-1", true), pod(VIRT_OPERATOR, "operator-2", true)];
        assert_eq!(deletes(&observed(vec![certificate(1, "operator-1", BAD, 1000)], operator)), None);
    }

    #[test]
    fn one_pod_is_deleted_at_a_time_and_each_only_once() {
        let both = vec![certificate(0, "api-1", BAD, 1000), certificate(0, "api-2", BAD, 1000)];
        let mut all = observed(both.clone(), two_api_pods());
        assert_eq!(deletes(&all).as_deref(), Some("api-1"));
        all.served.deleted_pods.insert("api-1".into(), VIRT_API);
        let with = |pods: Vec<(ObjectKey, Arc<Pod>)>| {
            let mut observed = observed(both.clone(), pods);
            observed.served.deleted_pods.insert("api-1".into(), VIRT_API);
            deletes(&observed)
        };
        assert_eq!(with(vec![pod(VIRT_API, "api-2", true)]), None, "its pod is not replaced yet");
        let starting = vec![pod(VIRT_API, "api-2", true), pod(VIRT_API, "api-3", false)];
        assert_eq!(with(starting), None, "the new pod is not ready");
        let replaced = vec![pod(VIRT_API, "api-2", true), pod(VIRT_API, "api-3", true)];
        assert_eq!(with(replaced).as_deref(), Some("api-2"));
        assert_eq!(with(vec![pod(VIRT_API, "api-1", true), pod(VIRT_API, "api-3", true)]), None, "never twice");
    }

    /// The kubelet of a dead node never ends its pods.
    #[test]
    fn a_pod_that_is_stuck_on_a_dead_node_does_not_keep_others_from_being_replaced() {
        let stuck = |seconds: i64| {
            let (key, mut pod) = pod(VIRT_API, "api-0", false);
            Arc::make_mut(&mut pod).deleted = Some(Timestamp::from_second(NOW - seconds).unwrap());
            (key, pod)
        };
        let with = |pods: Vec<(ObjectKey, Arc<Pod>)>, seconds: i64| {
            let both = vec![certificate(0, "api-1", BAD, 1000), certificate(0, "api-2", BAD, 1000)];
            let mut observed = observed(both, pods.into_iter().chain([stuck(seconds)]).collect());
            observed.served.deleted_pods.insert("api-0".into(), VIRT_API);
            deletes(&observed)
        };
        assert_eq!(with(two_api_pods(), -10), None, "it may still end");
        assert_eq!(with(two_api_pods(), 100).as_deref(), Some("api-1"));
        assert_eq!(with(vec![pod(VIRT_API, "api-1", true)], 100), None, "it is not replaced yet");
        let starting = vec![pod(VIRT_API, "api-1", true), pod(VIRT_API, "api-2", false)];
        assert_eq!(with(starting, 100), None, "its replacement is not ready");
    }

    #[test]
    fn a_pod_of_another_component_waits_too() {
        let proxy = pod(VIRT_EXPORT_PROXY, "proxy-1", true);
        let mut starting = observed(
            vec![certificate(2, "proxy-1", BAD, 1000)],
            vec![pod(VIRT_API, "api-2", true), pod(VIRT_API, "api-3", false), proxy],
        );
        assert_eq!(deletes(&starting).as_deref(), Some("proxy-1"), "virt-api is none of its business");
        starting.served.deleted_pods.insert("api-1".into(), VIRT_API);
        assert_eq!(deletes(&starting), None, "the replacement of the last deleted pod is not ready");
    }

    #[test]
    fn a_refused_certificate_degrades_and_another_one_is_only_named() {
        let text = |state: ServedState, seconds: i64| {
            let found = alarms(&observed(vec![certificate(0, "api-1", state, seconds)], two_api_pods()), &Stop::Done);
            found.into_iter().map(|alarm| (alarm.degrades, alarm.text)).next()
        };
        assert_eq!(text(ServedState::Expired, 119), None);
        assert_eq!(
            text(ServedState::Expired, 120),
            Some((
                true,
                "virt-api serves an expired certificate (pod api-1): Secret kubevirt-virt-api-certs has a valid one; the \
                 operator deletes such pods, one at a time"
                    .to_owned()
            ))
        );
        assert_eq!(text(ServedState::NotReloaded, 120).map(|(degrades, _)| degrades), Some(false));
        assert_eq!(text(ServedState::Unreachable, 1000), None);
    }

    #[test]
    fn the_next_deadline_is_in_the_future() {
        let after = |seconds: i64| next_deadline(&observed(vec![certificate(0, "a", BAD, seconds)], vec![]));
        for (seconds, expected) in [(0, Some(120)), (100, Some(20)), (130, Some(50)), (500, None)] {
            assert_eq!(after(seconds).map(|left| left.as_secs()), expected, "{seconds}");
        }
        let (key, mut pod) = pod(VIRT_API, "api-0", false);
        Arc::make_mut(&mut pod).deleted = Some(now() + SignedDuration::from_secs(20));
        let waits = observed(vec![certificate(0, "api-1", BAD, 500)], vec![(key, pod)]);
        assert_eq!(next_deadline(&waits).map(|left| left.as_secs()), Some(30));
    }
}
