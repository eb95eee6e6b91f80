//! What a pass says about a KubeVirt resource: phase, conditions, versions, generations and events, in the words that
//! KubeVirt's other components, and scripts that were written for the reference, look for.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use vitivirt_api::{
    EventKind, EventRecord, EventSubject, Failure, ObjectKey, Outcome, Plan, Report, StatusWrite, Stop, Target,
    kubevirt::{Generation, KubeVirt, KubeVirtCondition, KubeVirtStatus},
};

use crate::{
    RELEASE,
    config::DeploymentConfig,
    kind::Kind,
    observed::{Desired, Observed},
    plan::obsolete,
    warnings,
};

const MESSAGE_LIMIT: usize = 1024;
const NOT_REMOVED: &str = "This version of the operator does not remove an installation: it is kept as it is, and the \
    KubeVirt resource with it. To let the resource go and be left with an installation that nobody keeps, delete the \
    ValidatingWebhookConfiguration virt-operator-validator and take the finalizer foregroundDeleteKubeVirt from it";
/// How long an installation may wait before it says for what.
const SILENCE: SignedDuration = SignedDuration::from_secs(20);
/// What may be looked at again although nobody tells.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

mod phase {
    pub(super) const DEPLOYING: &str = "Deploying";
    pub(super) const DEPLOYED: &str = "Deployed";
}

mod condition {
    pub(super) const AVAILABLE: &str = "Available";
    pub(super) const CREATED: &str = "Created";
    pub(super) const DEGRADED: &str = "Degraded";
    pub(super) const PROGRESSING: &str = "Progressing";
    pub(super) const SYNCHRONIZED: &str = "Synchronized";
}

mod reason {
    pub(super) const CREATED: &str = "AllResourcesCreated";
    pub(super) const DEPLOYING: &str = "DeploymentInProgress";
    pub(super) const EXISTING: &str = "ExistingDeployment";
    pub(super) const FAILED: &str = "DeploymentFailed";
    pub(super) const NOT_REMOVED: &str = "DeletionFailed";
    pub(super) const READY: &str = "AllComponentsReady";
    pub(super) const UPDATING: &str = "UpdateInProgress";
}

/// Reasons of events.
pub mod event {
    pub const DEPLOYED: &str = "Deployed";
    pub const FAILED: &str = "DeploymentFailed";
    pub const NOT_INSTALLED: &str = "ExistingDeployment";
    pub const NOT_REMOVED: &str = "DeletionFailed";
    pub const DEPRECATED: &str = "Deprecated";
    pub const DOUBTFUL: &str = "Doubtful";
    pub const NO_EFFECT: &str = "NoEffect";
    pub const REPLICAS: &str = "AdvancedFeatureUse";
}

/// Whether this resource is not installed at all.
pub fn is_refused(observed: &Observed) -> bool {
    refusal(observed).is_some()
}

/// Why this resource is not installed at all, if so.
pub(crate) fn refusal(observed: &Observed) -> Option<String> {
    let namespace = observed.kubevirt.metadata.namespace.as_deref().unwrap_or_default();
    if let Some(earlier) = &observed.earlier {
        return Some(format!(
            "There is an active KubeVirt deployment: {earlier} was there first, and a cluster has one. Delete this \
             KubeVirt resource, or the other one"
        ));
    }
    (namespace != observed.operator_namespace).then(|| {
        format!(
            "KubeVirt is installed only into the namespace of its operator: create this KubeVirt resource in {} instead",
            observed.operator_namespace
        )
    })
}

/// What keeps this resource from being installed, before anything was tried.
pub fn problem(observed: &Observed) -> Option<String> {
    refusal(observed).or_else(|| observed.impossible().map(|failure| failure.message.clone()))
}

pub fn report(observed: &Observed, plan: &Plan, outcome: &Outcome) -> Report {
    let kubevirt = &observed.kubevirt;
    let before = kubevirt.status.clone().unwrap_or_default();
    let mut status = before.clone();
    let mut events = Vec::new();
    if let Some(message) = refusal(observed) {
        // In another namespace there may be another operator, and what it has taken on is its own.
        if observed.earlier.is_none() && !before.operator_version.is_empty() {
            return Report::default();
        }
        set(&mut status, condition::SYNCHRONIZED, "False", reason::EXISTING, &message);
        events.push((EventKind::Warning, event::NOT_INSTALLED, message));
        return finish(observed, before, status, events);
    }
    // The world moved while we looked: there is nothing to say about it yet.
    if matches!(&outcome.stop, Stop::Failed { failure, .. } if failure.class == vitivirt_api::ErrorClass::Conflict) {
        return finish(observed, before, status, events);
    }
    status.operator_version = RELEASE.to_owned();
    status.default_architecture = architecture(kubevirt, &before, observed.architecture);
    if status.phase.is_empty() {
        status.phase = phase::DEPLOYING.to_owned();
    }
    if let Some(config) = config(observed) {
        target(&mut status, config);
    }
    match failure(observed, outcome) {
        Some(failure) => {
            let message = format!("An error occurred during deployment: {}", failure.message);
            failed(&mut status, &message);
            events.push((EventKind::Warning, event::FAILED, message));
        }
        None if outcome.stop == Stop::Done => {
            deployed(&mut status, observed);
            status.generations = generations(observed, plan, &before);
            if before.phase != status.phase || before.observed_deployment_id != status.observed_deployment_id {
                let message = format!("KubeVirt {} is installed", status.observed_kube_virt_version);
                events.push((EventKind::Normal, event::DEPLOYED, message));
            }
        }
        None => progressing(&mut status, &before, outcome, observed.now),
    }
    status.synchronization_addresses.clone_from(&observed.synchronization);
    events.extend(advice(observed, &before, outcome));
    if kubevirt.metadata.deletion_timestamp.is_some() {
        set(&mut status, condition::SYNCHRONIZED, "False", reason::NOT_REMOVED, NOT_REMOVED);
        events.push((EventKind::Warning, event::NOT_REMOVED, NOT_REMOVED.to_owned()));
    }
    finish(observed, before, status, events)
}

/// Told once for each generation of the resource, when it has been installed.
fn advice(observed: &Observed, before: &KubeVirtStatus, outcome: &Outcome) -> Vec<(EventKind, &'static str, String)> {
    let kubevirt = &observed.kubevirt;
    if outcome.stop != Stop::Done || before.observed_generation == kubevirt.metadata.generation {
        return Vec::new();
    }
    let all = warnings::all(kubevirt, observed.installation());
    let mut events: Vec<_> =
        all.into_iter().map(|advice| (EventKind::Warning, advice.reason, advice.message)).collect();
    if kubevirt.spec.infra.as_ref().is_some_and(|infra| infra.replicas.is_some()) {
        let message = "spec.infra.replicas is for special cases: all infrastructure components have this many pods";
        events.push((EventKind::Warning, event::REPLICAS, message.to_owned()));
    }
    events
}

fn config(observed: &Observed) -> Option<&DeploymentConfig> {
    match &observed.desired {
        Desired::Installation(installation) => Some(&installation.config),
        Desired::StrategyPending(config) => Some(config),
        Desired::Invalid(_) => None,
    }
}

/// What virtual machines are made for that do not say it. Once it is told it stays: the next leader may run on a node of
/// another architecture.
fn architecture(kubevirt: &KubeVirt, before: &KubeVirtStatus, own: &str) -> String {
    let asked = kubevirt.spec.configuration.architecture_configuration.as_ref();
    let asked = asked.map(|architecture| architecture.default_architecture.as_str());
    let told = [asked.unwrap_or_default(), before.default_architecture.as_str()];
    told.into_iter().find(|name| !name.is_empty()).unwrap_or(own).to_owned()
}

fn target(status: &mut KubeVirtStatus, config: &DeploymentConfig) {
    status.target_kube_virt_registry.clone_from(&config.registry);
    status.target_kube_virt_version.clone_from(&config.kube_virt_version);
    status.target_deployment_config = config.json();
    status.target_deployment_id.clone_from(&config.id);
}

/// What keeps the installation from going on, if it is more than waiting.
fn failure(observed: &Observed, outcome: &Outcome) -> Option<Failure> {
    if let Some(failure) = observed.impossible() {
        return Some(failure.clone());
    }
    match &outcome.stop {
        Stop::Failed { failure, .. } => Some(failure.clone()),
        Stop::NameConflict { target, .. } => Some(Failure::invalid(
            vitivirt_api::reason::NAME_TAKEN,
            format!(
                "{target} exists and was not made by an operator of KubeVirt, so it is left alone; delete or rename it, \
                 and the installation goes on"
            ),
        )),
        Stop::Done | Stop::Waiting { .. } => None,
    }
}

fn failed(status: &mut KubeVirtStatus, message: &str) {
    for (condition, value) in [
        (condition::SYNCHRONIZED, "False"),
        (condition::AVAILABLE, "False"),
        (condition::PROGRESSING, "False"),
        (condition::DEGRADED, "True"),
    ] {
        set(status, condition, value, reason::FAILED, message);
    }
}

fn progressing(status: &mut KubeVirtStatus, before: &KubeVirtStatus, outcome: &Outcome, now: Timestamp) {
    let updating =
        !status.observed_deployment_id.is_empty() && status.observed_deployment_id != status.target_deployment_id;
    remove(status, condition::SYNCHRONIZED);
    let mut message = match updating {
        true => format!(
            "Transitioning from previous version {} with registry {} to target version {} using registry {}",
            status.observed_kube_virt_version,
            status.observed_kube_virt_registry,
            status.target_kube_virt_version,
            status.target_kube_virt_registry
        ),
        false => format!(
            "Deploying version {} with registry {}",
            status.target_kube_virt_version, status.target_kube_virt_registry
        ),
    };
    // While it goes well nobody wants to know what is waited for.
    let told = before.conditions.iter().find(|condition| condition.condition_type == condition::PROGRESSING);
    let long = told.filter(|told| told.status == "True").is_some_and(|told| {
        let since = told.last_transition_time.as_ref().or(told.last_probe_time.as_ref());
        let silent = since.is_some_and(|since| now.duration_since(since.0) < SILENCE);
        // Whoever has begun to say it goes on.
        !silent || told.message.len() > message.len()
    });
    if let Stop::Waiting { wait, .. } = &outcome.stop
        && (status.phase == phase::DEPLOYED || long)
    {
        message = format!("{message}; {}", wait.message);
    }
    let (reason, [available, progressing, degraded]) = match updating {
        true => {
            remove(status, condition::CREATED);
            (reason::UPDATING, ["True", "True", "True"])
        }
        false => (reason::DEPLOYING, ["False", "True", "False"]),
    };
    set(status, condition::AVAILABLE, available, reason, &message);
    set(status, condition::PROGRESSING, progressing, reason, &message);
    set(status, condition::DEGRADED, degraded, reason, &message);
}

fn deployed(status: &mut KubeVirtStatus, observed: &Observed) {
    status.observed_kube_virt_registry.clone_from(&status.target_kube_virt_registry);
    status.observed_kube_virt_version.clone_from(&status.target_kube_virt_version);
    // It tells where the last installation had objects. While it is not known what of these is left, it is not forgotten.
    if observed.complete || status.observed_deployment_config.is_empty() {
        status.observed_deployment_config.clone_from(&status.target_deployment_config);
    }
    status.observed_deployment_id.clone_from(&status.target_deployment_id);
    status.observed_generation = observed.kubevirt.metadata.generation;
    status.phase = phase::DEPLOYED.to_owned();
    remove(status, condition::SYNCHRONIZED);
    set(status, condition::CREATED, "True", reason::CREATED, "All resources were created.");
    let message = "All components are ready.";
    set(status, condition::AVAILABLE, "True", reason::READY, message);
    set(status, condition::PROGRESSING, "False", reason::READY, message);
    set(status, condition::DEGRADED, "False", reason::READY, message);
}

/// The generation that an object has while it is as we want it. Of what this pass has written, the next one knows it.
fn generations(observed: &Observed, plan: &Plan, before: &KubeVirtStatus) -> Vec<Generation> {
    let Desired::Installation(installation) = &observed.desired else { return before.generations.clone() };
    let written: Vec<&Target> =
        plan.steps.iter().flat_map(|step| &step.writes).map(vitivirt_api::Write::target).collect();
    let mut generations: Vec<Generation> = installation
        .objects
        .iter()
        .filter_map(|object| {
            let group = match object.kind {
                Kind::CustomResourceDefinition => "apiextensions.k8s.io/v1",
                Kind::MutatingWebhookConfiguration | Kind::ValidatingWebhookConfiguration => {
                    "admissionregistration.k8s.io"
                }
                // The reference files them under this group.
                Kind::PodDisruptionBudget | Kind::Deployment | Kind::DaemonSet => "apps",
                _ => return None,
            };
            let live = observed.objects.get(object.kind, &object.key)?;
            let target = object.target();
            let noted = |generation: &&Generation| {
                generation.resource == target.resource.plural
                    && generation.name == object.key.name()
                    && generation.namespace == object.key.namespace().unwrap_or_default()
            };
            if written.contains(&&target) {
                return before.generations.iter().find(noted).cloned();
            }
            Some(Generation {
                group: group.to_owned(),
                resource: target.resource.plural.clone(),
                namespace: object.key.namespace().unwrap_or_default().to_owned(),
                name: object.key.name().to_owned(),
                last_generation: live.generation,
                hash: String::new(),
            })
        })
        .collect();
    generations.sort_by(|a, b| (&a.resource, &a.name).cmp(&(&b.resource, &b.name)));
    generations
}

fn set(status: &mut KubeVirtStatus, condition: &str, value: &str, reason: &str, message: &str) {
    let message = vitivirt_api::text::truncate(message, MESSAGE_LIMIT);
    let wanted = KubeVirtCondition {
        condition_type: condition.to_owned(),
        status: value.to_owned(),
        reason: reason.to_owned(),
        message: message.into_owned(),
        last_probe_time: None,
        last_transition_time: None,
    };
    match status.conditions.iter_mut().find(|have| have.condition_type == condition) {
        Some(have) => {
            let times = (have.last_probe_time.take(), have.last_transition_time.take());
            *have = wanted;
            (have.last_probe_time, have.last_transition_time) = times;
        }
        None => status.conditions.push(wanted),
    }
}

fn remove(status: &mut KubeVirtStatus, condition: &str) {
    status.conditions.retain(|have| have.condition_type != condition);
}

/// Times change with what they are about, never by themselves.
fn stamp(before: &KubeVirtStatus, status: &mut KubeVirtStatus, now: Timestamp) {
    for condition in &mut status.conditions {
        let earlier = before.conditions.iter().find(|have| have.condition_type == condition.condition_type);
        match earlier {
            None => condition.last_probe_time = Some(Time(now)),
            Some(earlier) => {
                let said = |condition: &KubeVirtCondition| {
                    (condition.status.clone(), condition.reason.clone(), condition.message.clone())
                };
                if said(earlier) != said(condition) {
                    condition.last_probe_time = Some(Time(now));
                    condition.last_transition_time = Some(Time(now));
                }
            }
        }
    }
}

fn finish(
    observed: &Observed,
    mut before: KubeVirtStatus,
    mut status: KubeVirtStatus,
    events: Vec<(EventKind, &'static str, String)>,
) -> Report {
    let metadata = &observed.kubevirt.metadata;
    let key = ObjectKey::of(metadata);
    stamp(&before, &mut status, observed.now);
    // Others write there too; what they write is not ours to write.
    before.extra.clear();
    status.extra.clear();
    let about = EventSubject {
        api_version: observed.kubevirt.types.api_version.clone(),
        kind: observed.kubevirt.types.kind.clone(),
        key: key.clone(),
        uid: metadata.uid.clone().unwrap_or_default(),
    };
    let changed = before != status;
    let waits = status
        .conditions
        .iter()
        .any(|condition| condition.condition_type == condition::PROGRESSING && condition.status == "True");
    let unsure = !observed.complete && !obsolete(observed).is_empty();
    let impossible = observed.impossible().is_some();
    let look_again = (waits || unsure || impossible).then_some(LOOK_AGAIN);
    let note = |(kind, reason, message): (EventKind, &'static str, String)| EventRecord {
        about: about.clone(),
        kind,
        reason,
        action: "Install",
        message: vitivirt_api::text::truncate(&message, MESSAGE_LIMIT).into_owned(),
    };
    let json = |status: &KubeVirtStatus| serde_json::to_value(status).unwrap_or_default();
    let write = StatusWrite {
        target: Target::of::<KubeVirt>(key),
        uid: about.uid.clone(),
        observed: json(&before),
        desired: json(&status),
    };
    let wait_for = |at: Timestamp| {
        let seconds = at.as_second().saturating_sub(observed.now.as_second()).max(1);
        Duration::from_secs(seconds.unsigned_abs())
    };
    Report {
        status: Some(write),
        // What was said before need not be said again.
        events: if changed { events.into_iter().map(note).collect() } else { Vec::new() },
        requeue_after: [observed.renewal.map(wait_for), look_again].into_iter().flatten().min(),
        error: None,
    }
}
