//! The report of a reconcile: phase, conditions, versions, generations and events of a KubeVirt resource. Reasons and
//! phases are those of upstream virt-operator, because KubeVirt's other components and users' scripts read them.
//!
//! It decides what users see, not what is written to the cluster: that is `plan`. The texts of warnings are in
//! `warnings` and `validation`.

mod conditions;
mod generations;

use std::{collections::BTreeSet, time::Duration};

use k8s_openapi::jiff::Timestamp;
use vitivirt_api::{
    ErrorClass, EventKind, EventRecord, EventSubject, Failure, ObjectKey, Outcome, Plan, Report, StatusWrite, Stop,
    Target,
    kubevirt::{KubeVirt, KubeVirtStatus},
    reason::NAME_TAKEN,
    repeated_drift_message,
    text::truncate,
};

pub(crate) use self::conditions::{condition, phase, reason, remove_condition, set_condition};
use self::{
    conditions::{
        MESSAGE_LIMIT, SHORT_FAILURE, failing_pods, is_deployed, is_true, nodes_message, set_alarms,
        set_condition_times, set_deployed, set_failed, set_problems, set_progressing, waits_for_lane,
    },
    generations::{generations, record_namespaces},
};
use crate::{
    RELEASE,
    config::DeploymentConfig,
    crd_checks::refusal,
    desired::Desired,
    eligibility::ineligible_message,
    kind::Kind,
    names::{VIRT_HANDLER, event_reason},
    observed::Observed,
    order::{Lane, LaneProblem},
    orphans::orphans,
    plan::OPTIONAL_STEP,
    repairs::{Fight, fights, next_repair},
    served,
    superseded::is_announcement,
    wait,
    warnings::all_warnings,
};

/// When to reconcile again, because no watch event may arrive.
const REQUEUE: Duration = Duration::from_secs(60);
/// When to record what a complete reconcile has written.
const RECORD: Duration = Duration::from_secs(1);

/// Why this resource cannot be installed, known before any write.
pub fn problem(observed: &Observed, desired: &Desired) -> Option<String> {
    ineligible_message(observed).or_else(|| desired.invalid().map(|failure| failure.message.clone()))
}

pub fn report(observed: &Observed, desired: &Desired, plan: &Plan, outcome: &Outcome) -> Report {
    let kubevirt = &observed.kubevirt;
    let before = kubevirt.status.clone().unwrap_or_default();
    let mut status = before.clone();
    let mut events = Vec::new();
    if let Some(message) = ineligible_message(observed) {
        // Another operator in that namespace may have installed the resource. Its status belongs to that operator.
        if observed.first_kubevirt.is_none() && !before.operator_version.is_empty() {
            return Report::default();
        }
        set_condition(&mut status, condition::SYNCHRONIZED, "False", reason::EXISTING, &message);
        events.push((EventKind::Warning, event_reason::NOT_INSTALLED, message));
        return build_report(observed, desired, before, status, events);
    }
    // The cluster changed during the reconcile, and the next one follows at once: there is nothing to report yet.
    if matches!(&outcome.stop, Stop::Failed { failure, .. } if failure.class == ErrorClass::Conflict) {
        if let Some(installation) = desired.installation()
            && before.target_deployment_config != installation.config.json()
        {
            record_namespaces(&mut status, &before, installation);
        }
        return build_report(observed, desired, before, status, events);
    }
    status.operator_version = RELEASE.to_owned();
    // The next reconcile, which follows at once, reports the rest.
    if is_announcement(outcome) {
        return build_report(observed, desired, before, status, events);
    }
    status.default_architecture = default_architecture(kubevirt, &before, observed.architecture);
    if status.phase.is_empty() {
        status.phase = phase::DEPLOYING.to_owned();
    }
    if let Some(config) = desired.config() {
        set_target(&mut status, config);
    }
    let (stop, optional_problem) = without_optional_step(&outcome.stop);
    match failure(desired, &stop) {
        // A server is starting, restarts or is busy: what runs is not affected.
        Some(failure) if failure.may_end_soon() => set_progressing(&mut status, &before, &stop, observed.now),
        Some(failure) => {
            let message = format!("An error occurred during deployment: {}", failure.message);
            let available = status.conditions.iter().find(|existing| existing.condition_type == condition::AVAILABLE);
            let available = available.filter(|_| matches!(desired, Desired::Refused { .. })).cloned();
            set_failed(&mut status, &message);
            // The release that runs is kept, so it stays available.
            if let Some(available) = available {
                set_condition(
                    &mut status,
                    condition::AVAILABLE,
                    &available.status,
                    &available.reason,
                    &available.message,
                );
            }
            events.push((EventKind::Warning, event_reason::FAILED, message));
        }
        None if stop == Stop::Done => {
            let nodes = unreachable_nodes(observed, desired);
            set_deployed(&mut status, observed, &nodes);
            if let Desired::Installation { installation, up_to_date, .. } = desired {
                status.generations = generations(observed, installation, up_to_date, plan);
            }
            if before.phase != status.phase || before.observed_deployment_id != status.observed_deployment_id {
                let message = format!("KubeVirt {} is installed", status.observed_kube_virt_version);
                events.push((EventKind::Normal, event_reason::DEPLOYED, message));
            }
            if let Some(message) = nodes_message(&nodes) {
                events.push((EventKind::Warning, event_reason::NODE_NOT_READY, message));
            }
        }
        // The objects of another lane are repaired, and nothing else changes.
        None if is_deployed(&before, kubevirt) && waits_for_lane(&stop) => {}
        None => {
            set_progressing(&mut status, &before, &stop, observed.now);
            if let Some(wait) = failing_pods(&stop) {
                let stopped = wait.reason == wait::FAILING_CANARY;
                let reason = if stopped { event_reason::FAILED_UPDATE } else { event_reason::PODS_FAIL };
                events.push((EventKind::Warning, reason, wait.message.clone()));
            }
        }
    }
    let problems = lane_problems(observed, optional_problem);
    if !problems.is_empty() {
        set_problems(&mut status, &problems);
        events.extend(problems.into_iter().map(|message| (EventKind::Warning, event_reason::PROBLEM, message)));
    }
    if let Some(installation) = desired.installation() {
        let is_complete = outcome.stop == Stop::Done && observed.caches_complete;
        if !is_complete {
            record_namespaces(&mut status, &before, installation);
        }
    }
    let alarms = served::alarms(observed, &stop);
    set_alarms(&mut status, &alarms);
    for alarm in alarms {
        let reason =
            if alarm.degrades { event_reason::CERTIFICATE_REFUSED } else { event_reason::CERTIFICATE_NOT_LOADED };
        events.push((EventKind::Warning, reason, alarm.text));
    }
    status.synchronization_addresses.clone_from(&observed.synchronization_addresses);
    events.extend(warning_events(observed, desired, &before, &stop));
    let mut report = build_report(observed, desired, before, status, events);
    // These do not change the status.
    report.events.extend(fight_events(observed, plan, Lane::Components));
    // The next reconcile records what this one wrote. A patch that the API server found equal causes no event.
    let record = (outcome.stop == Stop::Done && plan.write_count() > 0).then_some(RECORD);
    let times = [next_repair(observed), observed.nodes_held_until].into_iter().flatten();
    let times = times.map(|time| time_until(time, observed.now));
    report.requeue_after = times.chain(record).chain(report.requeue_after).min();
    report
}

fn fight_events(observed: &Observed, plan: &Plan, lane: Lane) -> impl Iterator<Item = EventRecord> {
    let messages = fights(observed, plan, lane).into_iter().map(|fight| fight_message(&fight));
    messages.map(|message| event_record(observed, EventKind::Warning, event_reason::REPEATED_DRIFT, &message))
}

fn fight_message(Fight { target, managers }: &Fight) -> String {
    repeated_drift_message(target, managers, "set the value in spec.customizeComponents")
}

fn event_subject(kubevirt: &KubeVirt) -> EventSubject {
    EventSubject {
        api_version: kubevirt.types.api_version.clone(),
        kind: kubevirt.types.kind.clone(),
        key: ObjectKey::from_metadata(&kubevirt.metadata),
        uid: kubevirt.metadata.uid.clone().unwrap_or_default(),
    }
}

/// At least a second.
fn time_until(at: Timestamp, now: Timestamp) -> Duration {
    let seconds = at.as_second().saturating_sub(now.as_second()).max(1);
    Duration::from_secs(seconds.unsigned_abs())
}

/// Warnings are reported once for each generation of the resource, when it has been installed.
fn warning_events(
    observed: &Observed,
    desired: &Desired,
    before: &KubeVirtStatus,
    stop: &Stop,
) -> Vec<(EventKind, &'static str, String)> {
    let kubevirt = &observed.kubevirt;
    if *stop != Stop::Done || before.observed_generation == kubevirt.metadata.generation {
        return Vec::new();
    }
    let installation = desired.installation().map(|installation| &**installation);
    let warnings = all_warnings(kubevirt, installation, handler_nodes(observed)).into_iter();
    let mut events: Vec<_> = warnings.map(|warning| (EventKind::Warning, warning.reason, warning.message)).collect();
    if kubevirt.spec.infra.as_ref().is_some_and(|infra| infra.replicas.is_some()) {
        let message = "spec.infra.replicas is an advanced setting: it sets the number of replicas of every infrastructure \
             component";
        events.push((EventKind::Warning, event_reason::REPLICAS, message.to_owned()));
    }
    events
}

/// The nodes on which virt-handler should run.
fn handler_nodes(observed: &Observed) -> usize {
    let key = ObjectKey::namespaced(&observed.operator_namespace, VIRT_HANDLER);
    let rollout = observed.objects.get(Kind::DaemonSet, &key).and_then(|live| live.rollout).unwrap_or_default();
    usize::try_from(rollout.pods).unwrap_or_default()
}

/// The architecture of VMs that do not set one. It does not follow the leader, which may run on a node of another
/// architecture: once it is derived, it changes only with an edit of the resource. The edit may have removed the setting
/// that the reported value comes from.
fn default_architecture(kubevirt: &KubeVirt, before: &KubeVirtStatus, own: &str) -> String {
    let configured = kubevirt.spec.configuration.architecture_configuration.as_ref();
    let configured = configured.map(|architecture| architecture.default_architecture.as_str()).unwrap_or_default();
    let edited = before.observed_generation.is_some() && before.observed_generation != kubevirt.metadata.generation;
    let reported = if edited { "" } else { before.default_architecture.as_str() };
    [configured, reported].into_iter().find(|name| !name.is_empty()).unwrap_or(own).to_owned()
}

fn set_target(status: &mut KubeVirtStatus, config: &DeploymentConfig) {
    status.target_kube_virt_registry.clone_from(&config.registry);
    status.target_kube_virt_version.clone_from(&config.kube_virt_version);
    status.target_deployment_config = config.json();
    status.target_deployment_id.clone_from(&config.id);
}

/// The failure that blocks the installation. A wait is not a failure, except for one that only a user can end.
fn failure(desired: &Desired, stop: &Stop) -> Option<Failure> {
    if let Some(failure) = desired.invalid() {
        return Some(failure.clone());
    }
    refusal(stop).or_else(|| stop_failure(stop))
}

fn stop_failure(stop: &Stop) -> Option<Failure> {
    match stop {
        Stop::Failed { failure, .. } => Some(failure.clone()),
        Stop::NameConflict { target, .. } => Some(Failure::invalid(
            NAME_TAKEN,
            format!(
                "{target} already exists and is not managed by this operator; delete it; the operator retries \
                 automatically"
            ),
        )),
        Stop::Done | Stop::Waiting { .. } => None,
    }
}

/// What is wrong in a lane that only reports. `None` if it is done. The outer `None`: the next reconcile shows it,
/// because the cluster changed during this one, or the failure may end within a second.
pub fn lane_problem(stop: &Stop) -> Option<Option<LaneProblem>> {
    match stop {
        Stop::Failed { failure, .. } if failure.class == ErrorClass::Conflict => None,
        Stop::Failed { failure, .. } if failure.may_end_soon() => {
            (failure.failing_for >= SHORT_FAILURE).then(|| Some(LaneProblem::Starting(failure.message.clone())))
        }
        Stop::Waiting { wait, .. } => Some(Some(LaneProblem::Lasting(wait.message.clone()))),
        stop => Some(stop_failure(stop).map(|failure| LaneProblem::Lasting(failure.message))),
    }
}

/// A failed step that the installation does not need does not affect its conditions: the installation counts as done,
/// and the failure is returned separately.
fn without_optional_step(stop: &Stop) -> (Stop, Option<String>) {
    match stop {
        Stop::Failed { step: OPTIONAL_STEP, failure } => (Stop::Done, Some(failure.message.clone())),
        stop => (stop.clone(), None),
    }
}

fn lane_problems(observed: &Observed, optional: Option<String>) -> Vec<String> {
    let lanes = observed.lane_problems.iter().filter_map(|(lane, problem)| match problem {
        LaneProblem::Lasting(message) => Some(format!("{lane}: {message}")),
        LaneProblem::Starting(_) => None,
    });
    lanes.chain(observed.unchecked_orphans.clone()).chain(optional).collect()
}

/// The nodes that are not ready and that the installation is complete without.
fn unreachable_nodes<'a>(observed: &'a Observed, desired: &Desired) -> BTreeSet<&'a str> {
    let objects = desired.installation().into_iter().flat_map(|installation| &installation.objects);
    let daemon_sets = objects.filter(|object| object.kind == Kind::DaemonSet);
    daemon_sets.flat_map(|object| observed.pods.unreachable_nodes(object.key.name())).collect()
}

pub(crate) fn build_report(
    observed: &Observed,
    desired: &Desired,
    mut before: KubeVirtStatus,
    mut status: KubeVirtStatus,
    events: Vec<(EventKind, &'static str, String)>,
) -> Report {
    set_condition_times(&before, &mut status, observed.now);
    // Fields that other clients write to the status are not part of the patch.
    before.extra.clear();
    status.extra.clear();
    let changed = before != status;
    let waits = is_true(&status, condition::PROGRESSING);
    let orphans_kept = !observed.caches_complete && !orphans(observed, desired).is_empty();
    let invalid = desired.invalid().is_some();
    // A node that becomes ready again without its pod causes no event.
    let nodes_checked = !observed.pods.dead_nodes.is_empty();
    let unchecked = observed.unchecked_orphans.is_some();
    // The cause of a problem may end without an event.
    let has_problems = !observed.lane_problems.is_empty();
    let requeue = waits || orphans_kept || unchecked || invalid || nodes_checked || has_problems;
    let requeue = requeue.then_some(REQUEUE);
    let json = |status: &KubeVirtStatus| serde_json::to_value(status).unwrap_or_default();
    let write = StatusWrite {
        target: Target::of_kind::<KubeVirt>(ObjectKey::from_metadata(&observed.kubevirt.metadata)),
        uid: observed.kubevirt.metadata.uid.clone().unwrap_or_default(),
        observed: json(&before),
        desired: json(&status),
    };
    let event =
        |(kind, reason, message): (EventKind, &'static str, String)| event_record(observed, kind, reason, &message);
    let events = events.into_iter().map(event).collect();
    Report {
        status: Some(write),
        // If the status did not change, an earlier reconcile has recorded these events.
        events: if changed { events } else { Vec::new() },
        requeue_after: requeue.into_iter().chain(served::next_deadline(observed)).min(),
        error: None,
    }
}

/// The report of the lane `Certificates`. It writes no status. `renew_in`: the time until the next renewal.
pub fn certificate_report(observed: &Observed, plan: &Plan, outcome: &Outcome, renew_in: Option<Duration>) -> Report {
    let deleted = served::deleted_pod(observed, plan, outcome).map(served::deleted_message);
    let deleted =
        deleted.map(|message| event_record(observed, EventKind::Warning, event_reason::POD_DELETED, &message));
    let repairs = lane_report(observed, plan, Lane::Certificates);
    Report {
        events: deleted.into_iter().chain(repairs.events).collect(),
        requeue_after: renew_in.into_iter().chain(served::next_deadline(observed)).chain(repairs.requeue_after).min(),
        ..Report::default()
    }
}

/// The report of a lane that writes no status.
pub fn lane_report(observed: &Observed, plan: &Plan, lane: Lane) -> Report {
    Report {
        events: fight_events(observed, plan, lane).collect(),
        requeue_after: next_repair(observed).map(|time| time_until(time, observed.now)),
        ..Report::default()
    }
}

fn event_record(observed: &Observed, kind: EventKind, reason: &'static str, message: &str) -> EventRecord {
    let about = event_subject(&observed.kubevirt);
    EventRecord { about, kind, reason, action: "Install", message: truncate(message, MESSAGE_LIMIT).into_owned() }
}
