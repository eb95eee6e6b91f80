//! The conditions of a KubeVirt resource, and what of its status changes with them.

use std::{collections::BTreeSet, time::Duration};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use vitivirt_api::{
    Stop, Wait,
    kubevirt::{KubeVirt, KubeVirtCondition, KubeVirtStatus},
    text::truncate,
};

use crate::{names::event_reason, observed::Observed, pods, served::Alarm, wait};

pub(super) const MESSAGE_LIMIT: usize = 1024;
const ALL_READY: &str = "All components are ready.";
/// How long an installation may wait before the conditions name what it waits for.
const QUIET_PERIOD: SignedDuration = SignedDuration::from_secs(20);
/// A failure that ends within this time is not worth a status write.
pub(super) const SHORT_FAILURE: Duration = Duration::from_secs(2);

pub(crate) mod phase {
    pub(in crate::report) const DEPLOYING: &str = "Deploying";
    pub(in crate::report) const DEPLOYED: &str = "Deployed";
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
    pub(in crate::report) const CREATED: &str = "AllResourcesCreated";
    pub(in crate::report) const DEPLOYING: &str = "DeploymentInProgress";
    pub(in crate::report) const EXISTING: &str = "ExistingDeployment";
    pub(in crate::report) const FAILED: &str = "DeploymentFailed";
    pub(crate) const DELETING: &str = "DeletionInProgress";
    pub(in crate::report) const PROBLEM: &str = "PartiallySynchronized";
    pub(in crate::report) const READY: &str = "AllComponentsReady";
    pub(in crate::report) const UPDATING: &str = "UpdateInProgress";
}

/// Problems that do not affect running components: the resource is not synchronized, and that is all.
pub(super) fn set_problems(status: &mut KubeVirtStatus, problems: &[String]) {
    let existing = status.conditions.iter().find(|condition| condition.condition_type == condition::SYNCHRONIZED);
    let (reason, earlier) = match existing {
        Some(existing) => (existing.reason.clone(), Some(existing.message.clone())),
        None => (reason::PROBLEM.to_owned(), None),
    };
    let message: Vec<String> = earlier.into_iter().chain(problems.iter().cloned()).collect();
    set_condition(status, condition::SYNCHRONIZED, "False", &reason, &message.join("; "));
}

pub(super) fn waits_for_lane(stop: &Stop) -> bool {
    matches!(stop, Stop::Waiting { wait, .. } if [wait::LANE, wait::UNREACHABLE].contains(&wait.reason))
}

/// Whether the present generation of the resource is deployed and available.
pub(super) fn is_deployed(status: &KubeVirtStatus, kubevirt: &KubeVirt) -> bool {
    let is_current = status.observed_generation == kubevirt.metadata.generation;
    status.phase == phase::DEPLOYED && is_current && is_true(status, condition::AVAILABLE)
}

/// A wait for pods that fail for a reason that does not end with time.
pub(super) fn failing_pods(stop: &Stop) -> Option<&Wait> {
    match stop {
        Stop::Waiting { wait, .. } if [wait::FAILING_PODS, wait::FAILING_CANARY].contains(&wait.reason) => Some(wait),
        _ => None,
    }
}

pub(super) fn nodes_message(nodes: &BTreeSet<&str>) -> Option<String> {
    let (subject, verb, object) = if nodes.len() == 1 { ("Node", "is", "it") } else { ("Nodes", "are", "them") };
    (!nodes.is_empty()).then(|| {
        let names = pods::list(nodes.iter().copied());
        format!(
            "{subject} {names} {verb} not ready: virt-handler does not run there, and the operator does not wait for \
             {object}"
        )
    })
}

pub(super) fn set_failed(status: &mut KubeVirtStatus, message: &str) {
    for (condition, value) in [
        (condition::SYNCHRONIZED, "False"),
        (condition::AVAILABLE, "False"),
        (condition::PROGRESSING, "False"),
        (condition::DEGRADED, "True"),
    ] {
        set_condition(status, condition, value, reason::FAILED, message);
    }
}

pub(super) fn set_progressing(status: &mut KubeVirtStatus, before: &KubeVirtStatus, stop: &Stop, now: Timestamp) {
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
                || [wait::UNREACHABLE, wait::STORAGE].contains(&wait.reason) =>
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
    // Neither a write that fails, nor a strategy that is dumped again, nor objects that are stored again, nor another lane
    // affects the components that run.
    let unaffected = match stop {
        Stop::Failed { .. } => true,
        Stop::Waiting { wait, .. } => [wait::STRATEGY, wait::STORAGE].contains(&wait.reason) || waits_for_lane(stop),
        _ => false,
    };
    if !(unaffected && is_true(before, condition::AVAILABLE)) {
        set_condition(status, condition::AVAILABLE, available, reason, &message);
    }
    set_condition(status, condition::PROGRESSING, progressing, reason, &message);
    set_condition(status, condition::DEGRADED, degraded, reason, &message);
}

/// Certificates that clients refuse degrade an installation whose pods are all ready.
pub(super) fn set_alarms(status: &mut KubeVirtStatus, alarms: &[Alarm]) {
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

pub(super) fn set_deployed(status: &mut KubeVirtStatus, observed: &Observed, unreachable_nodes: &BTreeSet<&str>) {
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

pub(super) fn is_true(status: &KubeVirtStatus, condition: &str) -> bool {
    status.conditions.iter().any(|existing| existing.condition_type == condition && existing.status == "True")
}

pub(crate) fn remove_condition(status: &mut KubeVirtStatus, condition: &str) {
    status.conditions.retain(|existing| existing.condition_type != condition);
}

/// A time changes only when the condition changes.
pub(super) fn set_condition_times(before: &KubeVirtStatus, status: &mut KubeVirtStatus, now: Timestamp) {
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
