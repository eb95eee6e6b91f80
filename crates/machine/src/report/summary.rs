//! Phase, Ready and the one sentence about it: a walk from the Machine to its VM, guest, pod and PVCs that stops at the
//! first thing that explains why the machine is not running.

use vitivirt_api::machine::{machine_reason as reason, phase};
use vitivirt_api::{Body, ErrorClass, Failure, Outcome, Stop, Target};

use crate::assessment::Assessment;
use crate::observed::{Observed, VmView};
use crate::plan::step;
use crate::problem::ProblemKind;
use crate::report::conditions::pending_pvcs;
use crate::report::refusal::explain;
use crate::resolve::Power;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Summary {
    pub(crate) phase: &'static str,
    pub(crate) ready: bool,
    /// Something is wrong; otherwise it only takes its time, or is as somebody wanted it.
    pub(crate) error: bool,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

pub(super) fn not_ready(phase: &'static str, reason: &'static str, message: impl Into<String>) -> Summary {
    Summary { phase, ready: false, error: reason::ERRORS.contains(&reason), reason, message: message.into() }
}

fn ready(phase: &'static str, reason: &'static str, message: &str) -> Summary {
    Summary { phase, ready: true, error: false, reason, message: message.to_owned() }
}

/// None: nothing worth saying happened, and what was said before stays.
pub(crate) fn summarize(observed: &Observed, assessment: &Assessment, outcome: &Outcome) -> Option<Summary> {
    if let Some(problem) = &assessment.blocker {
        let phase = match problem.kind {
            ProblemKind::Failed => phase::FAILED,
            ProblemKind::Pending => phase::PENDING,
            ProblemKind::Creating => phase::CREATING,
        };
        let summary = not_ready(phase, problem.reason, &problem.message);
        return Some(if problem.kind == ProblemKind::Failed { summary } else { as_it_was(observed, summary) });
    }
    match &outcome.stop {
        Stop::NameConflict { target, live, .. } => Some(as_it_was(observed, taken(target, live))),
        // The machine is as it is wanted, but for what is left over.
        Stop::Failed { step: step::UNUSED, failure } => Some(littered(living(observed, assessment), failure)),
        Stop::Failed { failure, .. } => Some(as_it_was(observed, failed(observed, failure)?)),
        Stop::Waiting { wait, .. } => Some(not_ready(phase::CREATING, wait.reason, &wait.message)),
        Stop::Done => Some(living(observed, assessment)),
    }
}

/// What was made stays as it was made, whatever is in the way of a change.
fn as_it_was(observed: &Observed, summary: Summary) -> Summary {
    if !runs(observed) {
        return summary;
    }
    let message = format!("{}; until then the machine runs on as it was", summary.message);
    Summary { phase: phase::RUNNING, message, ..summary }
}

/// A guest of the Machine's own VM.
fn runs(observed: &Observed) -> bool {
    let own = observed.vm.as_ref().is_some_and(|vm| vm.controller_uid.as_deref() == Some(observed.uid()));
    own && observed.vmi.as_ref().is_some_and(|vmi| vmi.phase == "Running")
}

fn taken(target: &Target, live: &Body) -> Summary {
    let owner = live
        .json()
        .pointer("/metadata/ownerReferences/0")
        .and_then(|owner| Some(format!("{} {}", owner.get("kind")?.as_str()?, owner.get("name")?.as_str()?)));
    let owner = owner.unwrap_or_else(|| "nobody that this operator knows".to_owned());
    let (kind, name) = (&target.resource.kind, target.key.name());
    not_ready(
        phase::FAILED,
        reason::NAME_TAKEN,
        format!(
            "{kind} {name} exists already and belongs to {owner}; it was left as it is: rename this Machine or remove the other"
        ),
    )
}

/// What the next try may heal is not worth a word.
fn littered(summary: Summary, failure: &Failure) -> Summary {
    if matches!(failure.class, ErrorClass::Conflict | ErrorClass::Transient) {
        return summary;
    }
    let message =
        format!("{}; user data that is not wanted any more is still there: {}", summary.message, failure.message);
    Summary { message, ..summary }
}

/// A failure that the next try may heal says nothing, unless the Machine was never told of: then it is being made.
fn failed(observed: &Observed, failure: &Failure) -> Option<Summary> {
    if let Some((reason, message)) = explain(failure) {
        return Some(not_ready(phase::CREATING, reason, message));
    }
    let untold = observed.machine.status.as_ref().is_none_or(|status| status.conditions.is_empty());
    untold.then(|| {
        let message = format!("it is being made; the last try failed: {}", failure.message);
        not_ready(phase::CREATING, reason::VM_CREATED, message)
    })
}

/// Nothing is in the way and everything is written: how is the machine?
fn living(observed: &Observed, assessment: &Assessment) -> Summary {
    let power = assessment.resolved.as_ref().map_or(Power::Running, |resolved| resolved.power);
    let Some(vm) = &observed.vm else {
        return not_ready(phase::CREATING, reason::VM_CREATED, "the VirtualMachine has been created");
    };
    let summary = match power {
        Power::Stopped => stopped(observed),
        Power::Running => running(observed, assessment, vm),
    };
    match (assessment.rejected_changes.as_slice(), summary.ready) {
        ([], _) | (_, false) => summary,
        // It runs, but not as the spec says.
        (refused, true) => {
            let each: Vec<String> =
                refused.iter().map(|refusal| format!("{}: {}", refusal.field, refusal.reason)).collect();
            Summary { message: format!("{}; refused: {}", summary.message, each.join("; ")), ..summary }
        }
    }
}

fn stopped(observed: &Observed) -> Summary {
    match &observed.vmi {
        None => ready(phase::STOPPED, reason::STOPPED, "the machine is stopped, as powerState says"),
        Some(_) => {
            not_ready(phase::RUNNING, reason::STOPPING, "the machine is shutting down, because powerState is Stopped")
        }
    }
}

fn running(observed: &Observed, assessment: &Assessment, vm: &VmView) -> Summary {
    let vmi = observed.vmi.as_ref();
    if let Some(vmi) = vmi.filter(|vmi| vmi.phase == "Running") {
        if vmi.paused {
            return not_ready(
                phase::RUNNING,
                reason::PAUSED,
                "the machine is paused; `virtctl unpause vm` lets it go on",
            );
        }
        let message = if vmi.migrating {
            "the machine is running and migrating to another node"
        } else {
            "the machine is running"
        };
        return ready(phase::RUNNING, reason::RUNNING, message);
    }
    if let Some(words) = vmi.and_then(|vmi| vmi.unschedulable.as_deref()) {
        return not_ready(
            phase::CREATING,
            reason::INSUFFICIENT_RESOURCES,
            format!("no node can take the machine: {words}; add nodes, free resources, or ask for less"),
        );
    }
    if let Some(words) = vmi.and_then(|vmi| vmi.failure.as_deref()).or(vm.failure.as_deref()) {
        let (reason, what) = if words.contains("exceeded quota") {
            (reason::INSUFFICIENT_RESOURCES, "raise the namespace's quota or ask for less")
        } else {
            (reason::KUBEVIRT_API_ERROR, "see the VirtualMachine's events")
        };
        return not_ready(phase::CREATING, reason, format!("KubeVirt could not start the machine: {words}; {what}"));
    }
    if let Some(summary) = error_state(&vm.printable_status) {
        return summary;
    }
    if let Some(pending) = pending_pvcs(observed, assessment) {
        return Summary { error: pending.overdue, ..not_ready(phase::CREATING, reason::PVC_PENDING, pending.message) };
    }
    not_ready(phase::CREATING, reason::VM_CREATED, starting(&vm.printable_status))
}

fn starting(status: &str) -> String {
    match status {
        "" | "Stopped" => "the VirtualMachine has been created and will be started".to_owned(),
        status => format!("the VirtualMachine is {status}"),
    }
}

fn error_state(status: &str) -> Option<Summary> {
    let failed = |what: &str| Some(not_ready(phase::FAILED, reason::VM_FAILED, what));
    match status {
        "CrashLoopBackOff" => Some(not_ready(
            phase::CREATING,
            reason::VM_FAILED,
            "the machine fails again and again shortly after its start; see `kubectl describe vmi` and the guest's console",
        )),
        "ErrImagePull" | "ImagePullBackOff" => {
            failed("a disk's image cannot be pulled; correct the image's name or the registry's credentials")
        }
        "ErrorPvcNotFound" => failed("a PVC of the machine is gone; it is made anew if it was the machine's own"),
        "DataVolumeError" => failed("a disk could not be filled; see the events of its PVC"),
        "ErrorUnschedulable" => Some(not_ready(
            phase::CREATING,
            reason::INSUFFICIENT_RESOURCES,
            "no node can take the machine; add nodes, free resources, or ask for less",
        )),
        _ => None,
    }
}
