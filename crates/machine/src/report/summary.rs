//! Phase, condition Ready and its message. The code follows the chain from the Machine to its VM, VMI, pod and PVCs and
//! stops at the first object that explains why the machine is not running.

use vitivirt_api::{
    Body, ErrorClass, Failure, Outcome, STARTING, Stop, Target,
    machine::{Adoption, MachinePhase, PrintableStatus, condition_type, machine_reason as reason},
    troubleshooting_url,
};

use super::{
    conditions::changes_rejected,
    failures::{classify_failure, sentence_case},
    launcher,
    pending_pvcs::pending_pvcs,
};
use crate::{
    assessment::{Assessment, adoption_remedy},
    observed::{LauncherView, Observed, VmView, VmiView},
    plan::step,
    problem::ProblemKind,
    render::cloud_init::secret_name,
    resolve::{PowerState, power_state},
};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Summary {
    pub(crate) phase: MachinePhase,
    pub(crate) ready: bool,
    /// The machine is not ready because of an error, not because it is starting or stopped.
    pub(crate) error: bool,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// Advice about a machine that is ready.
    pub(crate) note: Option<String>,
}

impl Summary {
    /// The message of the condition Ready and of events.
    pub(crate) fn full_message(&self) -> String {
        match &self.note {
            Some(note) => format!("{}; {note}", self.message),
            None => self.message.clone(),
        }
    }

    /// The message of a machine that is not ready, with a link for an error.
    pub(crate) fn diagnosis(&self) -> String {
        match self.error {
            true => format!("{}; see {}", self.message, troubleshooting_url(self.reason)),
            false => self.message.clone(),
        }
    }
}

pub(super) fn not_ready(phase: MachinePhase, reason: &'static str, message: impl Into<String>) -> Summary {
    Summary {
        phase,
        ready: false,
        error: reason::ERRORS.contains(&reason),
        reason,
        message: message.into(),
        note: None,
    }
}

fn ready(phase: MachinePhase, reason: &'static str, message: &str) -> Summary {
    Summary { phase, ready: true, error: false, reason, message: message.to_owned(), note: None }
}

/// None: the status stays as it is.
pub(crate) fn summarize(observed: &Observed, assessment: &Assessment, outcome: &Outcome) -> Option<Summary> {
    if let Some(problem) = assessment.blocker() {
        let phase = match problem.kind {
            ProblemKind::Failed => MachinePhase::Failed,
            ProblemKind::Pending => MachinePhase::Pending,
            ProblemKind::Creating => MachinePhase::Creating,
        };
        return Some(keep_running_phase(observed, assessment, not_ready(phase, problem.reason, &problem.message)));
    }
    match &outcome.stop {
        Stop::NameConflict { target, live, .. } => {
            Some(keep_running_phase(observed, assessment, name_conflict(observed, target, live)))
        }
        // The machine is as desired; only an obsolete object is left.
        Stop::Failed { step: step::OBSOLETE_SECRET, failure } => {
            Some(with_cleanup_failure(observed, vm_summary(observed, assessment), failure))
        }
        Stop::Failed { failure, .. } => failed_write(observed, assessment, failure),
        Stop::Waiting { wait, .. } => Some(not_ready(MachinePhase::Creating, wait.reason, &wait.message)),
        Stop::Done => Some(vm_summary(observed, assessment)),
    }
}

/// A machine that runs keeps running, and one that is stopped stays so, whatever prevents a change.
fn keep_running_phase(observed: &Observed, assessment: &Assessment, summary: Summary) -> Summary {
    if observed.own_vm().is_none() {
        return summary;
    }
    if observed.vmi.as_ref().is_some_and(VmiView::is_running) {
        let rest = match &assessment.resolved {
            Some(_) => "until then the machine keeps running, and the operator applies the rest of the spec",
            None => "until then the machine keeps running",
        };
        let message = format!("{}; {rest}", summary.message);
        return Summary { phase: MachinePhase::Running, message, ..summary };
    }
    let is_stopped = observed.vmi.is_none() && power_of(observed) == PowerState::Stopped;
    if is_stopped { Summary { phase: MachinePhase::Stopped, ..summary } } else { summary }
}

/// The desired power state, also of an invalid spec.
fn power_of(observed: &Observed) -> PowerState {
    power_state(observed.machine.spec.power_state.as_deref()).unwrap_or(PowerState::Running)
}

fn name_conflict(observed: &Observed, target: &Target, live: &Body) -> Summary {
    let owner = live
        .json()
        .pointer("/metadata/ownerReferences/0")
        .and_then(|owner| Some(format!("{} {}", owner.get("kind")?.as_str()?, owner.get("name")?.as_str()?)));
    let (kind, name) = (&target.resource.kind, target.key.name());
    let remedy = match owner {
        None if ["PersistentVolumeClaim", "Secret"].contains(&kind.as_str()) => {
            let item = if kind == "Secret" { Adoption::secret_item(name) } else { Adoption::pvc_item(name) };
            format!(
                "is not managed by this operator; the operator does not change it; {}",
                adoption_remedy(observed, [item.as_str()])
            )
        }
        owner => {
            let owner = owner
                .map_or_else(|| "is not managed by this operator".to_owned(), |owner| format!("belongs to {owner}"));
            format!(
                "{owner}; the operator does not change it: delete the {kind}, or create this Machine under another name"
            )
        }
    };
    not_ready(MachinePhase::Failed, reason::NAME_TAKEN, format!("{kind} {name} already exists and {remedy}"))
}

/// Errors that a retry may fix are not reported.
fn with_cleanup_failure(observed: &Observed, summary: Summary, failure: &Failure) -> Summary {
    if matches!(failure.class, ErrorClass::Conflict | ErrorClass::Transient) {
        return summary;
    }
    let secret = secret_name(observed.name());
    let message = format!(
        "{}; the obsolete cloud-init Secret {secret} could not be deleted: {}",
        summary.message, failure.message
    );
    Summary { message, ..summary }
}

/// Follows what is known about a VM whose spec cannot be written.
const NOT_APPLIED: &str = "; the operator cannot apply the spec: ";

/// Errors that a retry may fix are reported only if the Machine has no condition yet, because then it is being created, and
/// if they last. The status then follows the VM that exists.
fn failed_write(observed: &Observed, assessment: &Assessment, failure: &Failure) -> Option<Summary> {
    if let Some((reason, message)) = classify_failure(failure) {
        let summary = not_ready(MachinePhase::Creating, reason, sentence_case(&message));
        return Some(keep_running_phase(observed, assessment, summary));
    }
    let lasts = failure.class == ErrorClass::Transient && failure.failing_for >= STARTING;
    if lasts && observed.own_vm().is_some() {
        let summary = vm_summary(observed, assessment);
        let message = format!("{}{NOT_APPLIED}{}; it retries automatically", summary.message, failure.message);
        return Some(Summary { message, ..summary });
    }
    let has_no_condition = observed.machine.status.as_ref().is_none_or(|status| status.conditions.is_empty());
    (has_no_condition || lasts).then(|| {
        let message = format!("Machine is being created; the last attempt failed: {}", failure.message);
        keep_running_phase(observed, assessment, not_ready(MachinePhase::Creating, reason::VM_CREATED, message))
    })
}

/// The state of the VM, if nothing blocks the Machine and everything is written.
fn vm_summary(observed: &Observed, assessment: &Assessment) -> Summary {
    let power = assessment.resolved.as_ref().map_or(PowerState::Running, |resolved| resolved.power);
    let Some(vm) = observed.own_vm() else {
        return not_ready(MachinePhase::Creating, reason::VM_CREATED, "VirtualMachine was created");
    };
    if vm.restoring {
        let message =
            "KubeVirt is restoring the VirtualMachine from a snapshot; the operator continues when it is done";
        return keep_running_phase(
            observed,
            assessment,
            not_ready(MachinePhase::Creating, reason::VM_CREATED, message),
        );
    }
    let summary = match power {
        PowerState::Stopped => stopped_summary(observed),
        PowerState::Running => running_summary(observed, assessment, vm),
    };
    match changes_rejected(assessment) {
        Some(changes) if summary.ready => {
            Summary { message: format!("{}; rejected changes: {changes}", summary.message), ..summary }
        }
        _ => summary,
    }
}

fn stopped_summary(observed: &Observed) -> Summary {
    match &observed.vmi {
        None => ready(MachinePhase::Stopped, reason::STOPPED, "Machine is stopped because powerState is Stopped"),
        Some(_) => {
            not_ready(MachinePhase::Running, reason::STOPPING, "Machine is shutting down because powerState is Stopped")
        }
    }
}

/// The scheduler's words about a pod whose volumes do not exist yet.
const UNBOUND_PVCS: &str = "unbound immediate PersistentVolumeClaims";

fn running_summary(observed: &Observed, assessment: &Assessment, vm: &VmView) -> Summary {
    let vmi = observed.vmi.as_ref();
    if let Some(vmi) = vmi.filter(|vmi| vmi.is_running()) {
        if vmi.paused {
            let (namespace, name) = (observed.namespace(), observed.name());
            let message = format!("Machine is paused; resume it with `virtctl unpause vm -n {namespace} {name}`");
            return not_ready(MachinePhase::Running, reason::PAUSED, message);
        }
        if vmi.deleting {
            let message = "Guest is shutting down; KubeVirt starts it again";
            return not_ready(MachinePhase::Running, reason::GUEST_NOT_READY, message);
        }
        if let Some(cause) = &vmi.not_ready {
            let message = format!(
                "Guest runs, but KubeVirt reports that it is not ready: {cause}; see `kubectl -n {} describe vmi {}`",
                observed.namespace(),
                observed.name()
            );
            return not_ready(MachinePhase::Running, reason::GUEST_NOT_READY, message);
        }
        let message =
            if vmi.migrating { "Machine is running and migrating to another node" } else { "Machine is running" };
        return ready(MachinePhase::Running, reason::RUNNING, message);
    }
    let pending = pending_pvcs(observed, assessment);
    if let Some(lost) = pending.as_ref().filter(|pending| pending.lost) {
        return not_ready(MachinePhase::Failed, reason::PVC_LOST, lost.message.clone());
    }
    let pending = pending.map(|pending| {
        let summary = not_ready(MachinePhase::Creating, reason::PVC_PENDING, pending.message);
        Summary { error: pending.overdue, ..summary }
    });
    if let Some(cause) = vmi.and_then(|vmi| vmi.unschedulable.as_deref()) {
        if let Some(pending) = pending.filter(|_| cause.contains(UNBOUND_PVCS)) {
            return pending;
        }
        return not_ready(
            MachinePhase::Creating,
            reason::INSUFFICIENT_RESOURCES,
            format!("No node can run the machine: {cause}; add nodes, free up resources or request fewer resources"),
        );
    }
    if let Some(cause) = vmi.and_then(|vmi| vmi.failure.as_deref()).or(vm.failure.as_deref()) {
        let (reason, remedy) = if cause.contains("exceeded quota") {
            (reason::INSUFFICIENT_RESOURCES, "raise the quota of the namespace or request fewer resources")
        } else {
            (reason::KUBEVIRT_API_ERROR, "see the events of the VirtualMachine")
        };
        let message = format!("KubeVirt could not start the machine: {cause}; {remedy}");
        return not_ready(MachinePhase::Creating, reason, message);
    }
    if vm.needs_recovery {
        let moved = vm.migration_sources.iter().map(|(volume, pvc)| format!("{volume} to PersistentVolumeClaim {pvc}"));
        let message = format!(
            "KubeVirt does not start the machine, because a migration of volumes failed and the VirtualMachine refers to \
             incomplete copies; edit the VirtualMachine and set these volumes back: {}",
            moved.collect::<Vec<_>>().join(", ")
        );
        return not_ready(MachinePhase::Failed, reason::VM_FAILED, message);
    }
    if let Some(message) = pod_problem(observed) {
        return not_ready(MachinePhase::Creating, reason::POD_NOT_STARTED, message);
    }
    if let Some(summary) = error_summary(observed, vm.printable_status) {
        return summary;
    }
    pending
        .unwrap_or_else(|| not_ready(MachinePhase::Creating, reason::VM_CREATED, starting_message(vm.printable_status)))
}

/// Why the pod does not start. If it could not be read now, the status still has the last known cause.
fn pod_problem(observed: &Observed) -> Option<String> {
    match &observed.launcher {
        LauncherView::Problem(problem) => Some(launcher::message(observed.namespace(), observed.name(), problem)),
        LauncherView::Unknown => {
            let mut conditions = observed.machine.status.iter().flat_map(|status| &status.conditions);
            let ready = conditions.find(|condition| condition.type_ == condition_type::READY)?;
            let cause = ready.message.split(NOT_APPLIED).next().filter(|_| ready.reason == reason::POD_NOT_STARTED);
            cause.map(str::to_owned)
        }
        LauncherView::NoProblem => None,
    }
}

fn starting_message(status: PrintableStatus) -> String {
    match status {
        PrintableStatus::Unset | PrintableStatus::Stopped => {
            "VirtualMachine was created and will be started".to_owned()
        }
        status => format!("VirtualMachine is {status}"),
    }
}

fn error_summary(observed: &Observed, status: PrintableStatus) -> Option<Summary> {
    let failed = |message: &str| Some(not_ready(MachinePhase::Failed, reason::VM_FAILED, message));
    match status {
        PrintableStatus::CrashLoopBackOff => Some(not_ready(
            MachinePhase::Creating,
            reason::VM_FAILED,
            format!(
                "Machine keeps crashing shortly after it starts; see `kubectl -n {} describe vmi {}` and the guest's console",
                observed.namespace(),
                observed.name()
            ),
        )),
        PrintableStatus::ErrImagePull | PrintableStatus::ImagePullBackOff => {
            failed("Disk image cannot be pulled; correct the image name or the registry credentials")
        }
        PrintableStatus::ErrorPvcNotFound => {
            failed("PersistentVolumeClaim of the machine not found; see condition StorageReady")
        }
        PrintableStatus::DataVolumeError => {
            failed("Disk could not be populated; see the events of its PersistentVolumeClaim")
        }
        PrintableStatus::ErrorUnschedulable => Some(not_ready(
            MachinePhase::Creating,
            reason::INSUFFICIENT_RESOURCES,
            "No node can run the machine; add nodes, free up resources or request fewer resources",
        )),
        _ => None,
    }
}
