//! The report of a reconcile: phase, conditions, versions, generations and events of a KubeVirt resource. Reasons and
//! phases are those of upstream virt-operator, because KubeVirt's other components and users' scripts read them.
//!
//! It decides what users see, not what is written to the cluster: that is `plan`. The texts of warnings are in
//! `warnings` and `validation`.

use std::{collections::BTreeSet, time::Duration};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use vitivirt_api::{
    ErrorClass, EventKind, EventRecord, EventSubject, Failure, ObjectKey, Outcome, Plan, Report, StatusWrite, Stop,
    Target, Wait, Write,
    kubevirt::{Generation, KubeVirt, KubeVirtCondition, KubeVirtStatus},
    reason::NAME_TAKEN,
    text::truncate,
};

use crate::{
    RELEASE,
    config::DeploymentConfig,
    desired::{Desired, UpToDate},
    eligibility::ineligible_message,
    installation::Installation,
    kind::Kind,
    names::event_reason,
    observed::Observed,
    order::{Lane, LaneProblem},
    orphans::orphans,
    plan::{optional_step, wait},
    pods,
    record::{Record, is_recorded},
    repairs::{Fight, fights, next_repair},
    served::{self, Alarm},
    warnings::all_warnings,
};

const MESSAGE_LIMIT: usize = 1024;
const ALL_READY: &str = "All components are ready.";
/// How long an installation may wait before the conditions name what it waits for.
const QUIET_PERIOD: SignedDuration = SignedDuration::from_secs(20);
/// A failure that ends within this time is not worth a status write.
const SHORT_FAILURE: Duration = Duration::from_secs(2);
/// When to reconcile again, because no watch event may arrive.
const REQUEUE: Duration = Duration::from_secs(60);
/// When to record what a complete reconcile has written.
const RECORD: Duration = Duration::from_secs(1);

pub(crate) mod phase {
    pub(super) const DEPLOYING: &str = "Deploying";
    pub(super) const DEPLOYED: &str = "Deployed";
    pub(crate) const DELETING: &str = "Deleting";
    pub(crate) const DELETED: &str = "Deleted";
}

pub(crate) mod condition {
    pub(crate) const AVAILABLE: &str = "Available";
    pub(crate) const CREATED: &str = "Created";
    pub(crate) const DEGRADED: &str = "Degraded";
    pub(crate) const PROGRESSING: &str = "Progressing";
    pub(crate) const SYNCHRONIZED: &str = "Synchronized";
}

pub(crate) mod reason {
    pub(super) const CREATED: &str = "AllResourcesCreated";
    pub(super) const DEPLOYING: &str = "DeploymentInProgress";
    pub(super) const EXISTING: &str = "ExistingDeployment";
    pub(super) const FAILED: &str = "DeploymentFailed";
    pub(crate) const DELETING: &str = "DeletionInProgress";
    pub(super) const PROBLEM: &str = "PartiallySynchronized";
    pub(super) const READY: &str = "AllComponentsReady";
    pub(super) const UPDATING: &str = "UpdateInProgress";
}

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
        return build_report(observed, desired, before, status, events);
    }
    status.operator_version = RELEASE.to_owned();
    status.default_architecture = default_architecture(kubevirt, &before, observed.architecture);
    if status.phase.is_empty() {
        status.phase = phase::DEPLOYING.to_owned();
    }
    if let Some(config) = desired.config() {
        set_target(&mut status, config);
    }
    let (stop, optional_problem) = without_optional_steps(&outcome.stop);
    match failure(desired, &stop) {
        // It is starting, or restarts: what runs is not affected.
        Some(failure) if failure.is_not_reachable_yet() => set_progressing(&mut status, &before, &stop, observed.now),
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
    let managers = match managers.as_slice() {
        [] => "another client".to_owned(),
        managers => format!("another client ({})", managers.join(", ")),
    };
    format!(
        "{target} is changed by {managers} after each repair; the operator now repairs it once a minute; stop that \
         client, or set the value in spec.customizeComponents"
    )
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
    let warnings = all_warnings(kubevirt, desired.installation().map(|installation| &**installation)).into_iter();
    let mut events: Vec<_> = warnings.map(|warning| (EventKind::Warning, warning.reason, warning.message)).collect();
    if kubevirt.spec.infra.as_ref().is_some_and(|infra| infra.replicas.is_some()) {
        let message = "spec.infra.replicas is an advanced setting: it sets the number of replicas of every infrastructure \
             component";
        events.push((EventKind::Warning, event_reason::REPLICAS, message.to_owned()));
    }
    events
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

/// The failure that blocks the installation. A wait is not a failure.
fn failure(desired: &Desired, stop: &Stop) -> Option<Failure> {
    if let Some(failure) = desired.invalid() {
        return Some(failure.clone());
    }
    stop_failure(stop)
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
        Stop::Failed { failure, .. } if failure.is_not_reachable_yet() => {
            (failure.failing_for >= SHORT_FAILURE).then(|| Some(LaneProblem::Starting(failure.message.clone())))
        }
        Stop::Waiting { wait, .. } => Some(Some(LaneProblem::Lasting(wait.message.clone()))),
        stop => Some(stop_failure(stop).map(|failure| LaneProblem::Lasting(failure.message))),
    }
}

/// A failed step that the installation does not need does not affect its conditions: the installation counts as done,
/// and the failure is returned separately.
fn without_optional_steps(stop: &Stop) -> (Stop, Option<String>) {
    match stop {
        Stop::Failed { step: optional_step::ORPHANS | optional_step::NAMESPACE, failure } => {
            (Stop::Done, Some(failure.message.clone()))
        }
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

/// Problems that do not affect running components: the resource is not synchronized, and that is all.
fn set_problems(status: &mut KubeVirtStatus, problems: &[String]) {
    let existing = status.conditions.iter().find(|condition| condition.condition_type == condition::SYNCHRONIZED);
    let (reason, earlier) = match existing {
        Some(existing) => (existing.reason.clone(), Some(existing.message.clone())),
        None => (reason::PROBLEM.to_owned(), None),
    };
    let message: Vec<String> = earlier.into_iter().chain(problems.iter().cloned()).collect();
    set_condition(status, condition::SYNCHRONIZED, "False", &reason, &message.join("; "));
}

fn waits_for_lane(stop: &Stop) -> bool {
    matches!(stop, Stop::Waiting { wait, .. } if [wait::LANE, wait::UNREACHABLE].contains(&wait.reason))
}

/// Whether the present generation of the resource is deployed and available.
fn is_deployed(status: &KubeVirtStatus, kubevirt: &KubeVirt) -> bool {
    let is_current = status.observed_generation == kubevirt.metadata.generation;
    status.phase == phase::DEPLOYED && is_current && is_true(status, condition::AVAILABLE)
}

/// A wait for pods that fail for a reason that does not end with time.
fn failing_pods(stop: &Stop) -> Option<&Wait> {
    match stop {
        Stop::Waiting { wait, .. } if [wait::FAILING_PODS, wait::FAILING_CANARY].contains(&wait.reason) => Some(wait),
        _ => None,
    }
}

/// The nodes that are not ready and that the installation is complete without.
fn unreachable_nodes<'a>(observed: &'a Observed, desired: &Desired) -> BTreeSet<&'a str> {
    let objects = desired.installation().into_iter().flat_map(|installation| &installation.objects);
    let daemon_sets = objects.filter(|object| object.kind == Kind::DaemonSet);
    daemon_sets.flat_map(|object| observed.pods.unreachable_nodes(object.key.name())).collect()
}

fn nodes_message(nodes: &BTreeSet<&str>) -> Option<String> {
    let one_or_more = if nodes.len() == 1 { "Node" } else { "Nodes" };
    let verb = if nodes.len() == 1 { "is" } else { "are" };
    (!nodes.is_empty()).then(|| {
        let names = pods::list(nodes.iter().copied());
        format!("{one_or_more} {names} {verb} not ready: virt-handler does not run there, and the operator does not wait for it")
    })
}

fn set_failed(status: &mut KubeVirtStatus, message: &str) {
    for (condition, value) in [
        (condition::SYNCHRONIZED, "False"),
        (condition::AVAILABLE, "False"),
        (condition::PROGRESSING, "False"),
        (condition::DEGRADED, "True"),
    ] {
        set_condition(status, condition, value, reason::FAILED, message);
    }
}

fn set_progressing(status: &mut KubeVirtStatus, before: &KubeVirtStatus, stop: &Stop, now: Timestamp) {
    let updating =
        !status.observed_deployment_id.is_empty() && status.observed_deployment_id != status.target_deployment_id;
    remove_condition(status, condition::SYNCHRONIZED);
    let mut message = if updating {
        format!(
            "Transitioning from previous version {} with registry {} to target version {} using registry {}",
            status.observed_kube_virt_version,
            status.observed_kube_virt_registry,
            status.target_kube_virt_version,
            status.target_kube_virt_registry
        )
    } else {
        format!(
            "Deploying version {} with registry {}",
            status.target_kube_virt_version, status.target_kube_virt_registry
        )
    };
    // A short wait is normal and is not reported, unless the pods cannot become ready.
    let reported = before.conditions.iter().find(|condition| condition.condition_type == condition::PROGRESSING);
    let long = reported.filter(|reported| reported.status == "True").is_some_and(|reported| {
        let since = reported.last_transition_time.as_ref().or(reported.last_probe_time.as_ref());
        let quiet = since.is_some_and(|since| now.duration_since(since.0) < QUIET_PERIOD);
        // A message that already names the wait keeps naming it.
        !quiet || reported.message.len() > message.len()
    });
    let waits_for = match stop {
        Stop::Waiting { wait, .. }
            if status.phase == phase::DEPLOYED
                || long
                || failing_pods(stop).is_some()
                || wait.reason == wait::UNREACHABLE =>
        {
            Some(&wait.message)
        }
        Stop::Failed { failure, .. } if failure.failing_for >= SHORT_FAILURE || long => Some(&failure.message),
        _ => None,
    };
    if let Some(waits_for) = waits_for {
        message = format!("{message}; {waits_for}");
    }
    let (reason, [available, progressing, degraded]) = if updating {
        remove_condition(status, condition::CREATED);
        (reason::UPDATING, ["True", "True", "True"])
    } else {
        (reason::DEPLOYING, ["False", "True", "False"])
    };
    // Neither a write that fails, nor a strategy that is dumped again, nor another lane affects the components that run.
    let unaffected = match stop {
        Stop::Failed { .. } => true,
        Stop::Waiting { wait, .. } => wait.reason == wait::STRATEGY || waits_for_lane(stop),
        _ => false,
    };
    if !(unaffected && is_true(before, condition::AVAILABLE)) {
        set_condition(status, condition::AVAILABLE, available, reason, &message);
    }
    set_condition(status, condition::PROGRESSING, progressing, reason, &message);
    set_condition(status, condition::DEGRADED, degraded, reason, &message);
}

/// Certificates that clients refuse degrade an installation whose pods are all ready.
fn set_alarms(status: &mut KubeVirtStatus, alarms: &[Alarm]) {
    if alarms.is_empty() {
        return;
    }
    let texts = alarms.iter().map(|alarm| alarm.text.as_str()).collect::<Vec<_>>().join("; ");
    let degraded = status.conditions.iter().find(|existing| existing.condition_type == condition::DEGRADED).cloned();
    let (value, reason, message) = match degraded {
        Some(degraded) if degraded.status == "True" => {
            (degraded.status, degraded.reason, format!("{}; {texts}", degraded.message))
        }
        Some(degraded) if !alarms.iter().any(|alarm| alarm.degrades) => {
            (degraded.status, degraded.reason, format!("{} {texts}", degraded.message))
        }
        None if !alarms.iter().any(|alarm| alarm.degrades) => return,
        _ => ("True".to_owned(), event_reason::CERTIFICATE_REFUSED.to_owned(), texts),
    };
    set_condition(status, condition::DEGRADED, &value, &reason, &message);
}

fn set_deployed(status: &mut KubeVirtStatus, observed: &Observed, unreachable_nodes: &BTreeSet<&str>) {
    status.observed_kube_virt_registry.clone_from(&status.target_kube_virt_registry);
    status.observed_kube_virt_version.clone_from(&status.target_kube_virt_version);
    // This field names the namespaces in which the last installation had objects. `orphans` needs it until the caches
    // are complete and show which of these objects are left.
    if observed.caches_complete || status.observed_deployment_config.is_empty() {
        status.observed_deployment_config.clone_from(&status.target_deployment_config);
    }
    status.observed_deployment_id.clone_from(&status.target_deployment_id);
    status.observed_generation = observed.kubevirt.metadata.generation;
    status.phase = phase::DEPLOYED.to_owned();
    remove_condition(status, condition::SYNCHRONIZED);
    set_condition(status, condition::CREATED, "True", reason::CREATED, "All resources were created.");
    let message = match nodes_message(unreachable_nodes) {
        Some(nodes) => format!("{ALL_READY} {nodes}"),
        None => ALL_READY.to_owned(),
    };
    set_condition(status, condition::AVAILABLE, "True", reason::READY, &message);
    set_condition(status, condition::PROGRESSING, "False", reason::READY, &message);
    set_condition(status, condition::DEGRADED, "False", reason::READY, &message);
}

/// The generations and digests of the objects that match the desired state. The next reconcile records the objects that
/// this one wrote.
fn generations(
    observed: &Observed,
    installation: &Installation,
    up_to_date: &UpToDate,
    plan: &Plan,
) -> Vec<Generation> {
    let written: Vec<&Target> = plan.steps.iter().flat_map(|step| &step.writes).map(Write::target).collect();
    let mut generations: Vec<Generation> = installation
        .objects
        .iter()
        .filter_map(|object| {
            if !is_recorded(object.kind) {
                return None;
            }
            let live = observed.objects.get(object.kind, &object.key)?;
            let target = object.target();
            let group = match object.kind {
                Kind::CustomResourceDefinition => "apiextensions.k8s.io/v1",
                // Upstream virt-operator records PodDisruptionBudgets under this group too.
                Kind::PodDisruptionBudget => "apps",
                _ => &target.resource.group,
            };
            let known = up_to_date.get(&(object.kind, object.key.clone()));
            let known = known.filter(|known| known.digest == live.digest).map(|known| known.record);
            // This plan has compared neither the objects of other lanes nor those whose repair is delayed.
            let is_compared = object.stage.lane() == Lane::Components
                && !observed.repairs.are_exhausted(object.kind, &object.key, observed.now);
            if written.contains(&&target) || known.is_none() && !is_compared {
                return observed.recorded_generation(object.kind, &object.key).cloned();
            }
            // A live object that cannot be read has stopped the plan before.
            let record = known.unwrap_or_else(|| Record::new(object, live).unwrap_or_default())?;
            Some(Generation {
                group: group.to_owned(),
                resource: target.resource.plural.clone(),
                namespace: object.key.namespace().unwrap_or_default().to_owned(),
                name: object.key.name().to_owned(),
                last_generation: live.generation,
                hash: record.to_string(),
            })
        })
        .collect();
    sort_generations(&mut generations);
    generations
}

/// Until an installation is complete, the status names every object that it and the ones before it may have in other
/// namespaces. An edit may replace an installation at any time, and `orphans` finds its objects by their namespaces.
fn record_namespaces(status: &mut KubeVirtStatus, before: &KubeVirtStatus, installation: &Installation) {
    let own = ["", "kube-system", installation.config.namespace.as_str()];
    let objects = installation.objects.iter().map(|object| {
        let resource = object.kind.resource();
        Generation {
            group: resource.group,
            resource: resource.plural,
            namespace: object.key.namespace().unwrap_or_default().to_owned(),
            name: object.key.name().to_owned(),
            last_generation: 0,
            hash: String::new(),
        }
    });
    for object in before.generations.iter().cloned().chain(objects) {
        let is_same = |recorded: &Generation| {
            let identity = |of: &Generation| (of.resource.clone(), of.namespace.clone(), of.name.clone());
            identity(recorded) == identity(&object)
        };
        if !own.contains(&object.namespace.as_str()) && !status.generations.iter().any(is_same) {
            status.generations.push(object);
        }
    }
    sort_generations(&mut status.generations);
}

fn sort_generations(generations: &mut [Generation]) {
    generations.sort_by(|a, b| (&a.resource, &a.namespace, &a.name).cmp(&(&b.resource, &b.namespace, &b.name)));
}

pub(crate) fn set_condition(status: &mut KubeVirtStatus, condition: &str, value: &str, reason: &str, message: &str) {
    let message = truncate(message, MESSAGE_LIMIT);
    let desired = KubeVirtCondition {
        condition_type: condition.to_owned(),
        status: value.to_owned(),
        reason: reason.to_owned(),
        message: message.into_owned(),
        last_probe_time: None,
        last_transition_time: None,
    };
    match status.conditions.iter_mut().find(|existing| existing.condition_type == condition) {
        Some(existing) => {
            let times = (existing.last_probe_time.take(), existing.last_transition_time.take());
            *existing = desired;
            (existing.last_probe_time, existing.last_transition_time) = times;
        }
        None => status.conditions.push(desired),
    }
}

fn is_true(status: &KubeVirtStatus, condition: &str) -> bool {
    status.conditions.iter().any(|existing| existing.condition_type == condition && existing.status == "True")
}

pub(crate) fn remove_condition(status: &mut KubeVirtStatus, condition: &str) {
    status.conditions.retain(|existing| existing.condition_type != condition);
}

/// A time changes only when the condition changes.
fn set_condition_times(before: &KubeVirtStatus, status: &mut KubeVirtStatus, now: Timestamp) {
    for condition in &mut status.conditions {
        let earlier = before.conditions.iter().find(|existing| existing.condition_type == condition.condition_type);
        match earlier {
            None => condition.last_probe_time = Some(Time(now)),
            Some(earlier) => {
                let content = |condition: &KubeVirtCondition| {
                    (condition.status.clone(), condition.reason.clone(), condition.message.clone())
                };
                if content(earlier) != content(condition) {
                    condition.last_probe_time = Some(Time(now));
                    condition.last_transition_time = Some(Time(now));
                }
            }
        }
    }
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
