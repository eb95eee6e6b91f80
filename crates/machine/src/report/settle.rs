//! When a changed status is worth a write. A Machine that starts passes through states that last for a second: a status
//! write and an event for each of them would cost the API server more than they are worth to a user.
//!
//! A state in which the Machine stays is written at once: running, stopped, failed, nearly every error, the first reconcile
//! of a changed spec, and the move of a disk to another PVC. A state on the way to it is written when it has lasted for a while. The report asks for a reconcile at
//! that time, which finds the state as it is then.

use std::time::Duration;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};
use vitivirt_api::{
    Report, StatusWrite,
    machine::{MachinePhase, MachineStatus, PrintableStatus, condition_type, machine_reason},
};

use crate::{assessment::Assessed, observed::Observed, resolve::pvc_name};

/// A Machine that runs sooner than this is reported as running, and as nothing before.
const FIRST_STATUS: Duration = Duration::from_secs(2);
/// Between two states of a Machine that is on its way, and not there yet.
const PROGRESS: Duration = Duration::from_secs(60);
/// How long a guest may fit on no node. The scheduler says so of every guest whose disks are not bound yet.
const UNSCHEDULABLE: Duration = Duration::from_secs(5);
/// How long other details of the same state are collected: addresses, disks, messages. They arrive one after the other.
const DETAILS: Duration = Duration::from_secs(2);
/// A Machine whose status has not changed for this time has arrived. A change of it is written at once.
const ARRIVED: Duration = Duration::from_secs(60);

/// A report without what is not worth a write yet.
pub struct Settled {
    /// It asks for a reconcile at the time at which the rest is worth a write.
    pub report: Report<MachineStatus>,
    /// The state that waits to be written. The next call gets it.
    pub waiting: Option<WaitingState>,
}

/// A state that is not written yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingState {
    since: Timestamp,
    /// The reason of the condition Ready.
    reason: String,
}

pub fn settle(assessed: &Assessed, mut report: Report<MachineStatus>, waiting: Option<&WaitingState>) -> Settled {
    let observed = assessed.observed();
    // The report about a deletion decides by itself what is worth a write.
    let Some(status) = report.status.as_mut().filter(|status| !observed.is_deleting() && status.differs()) else {
        return Settled { report, waiting: None };
    };
    let reason = ready(&status.desired).map(|ready| ready.reason.clone()).unwrap_or_default();
    let since = waiting.filter(|waiting| waiting.reason == reason).map_or(observed.now, |waiting| waiting.since);
    let remaining = remaining(observed, status, report.error.is_some(), since);
    if remaining.is_zero() {
        return Settled { report, waiting: None };
    }
    status.desired = status.observed.clone();
    let explains_a_write = [machine_reason::POWER_STATE_RESTORED, machine_reason::REPEATED_DRIFT];
    report.events.retain(|event| explains_a_write.contains(&event.reason));
    report.requeue_after = Some(report.requeue_after.map_or(remaining, |other| other.min(remaining)));
    Settled { report, waiting: Some(WaitingState { since, reason }) }
}

/// The time until the status is worth a write.
fn remaining(observed: &Observed, status: &StatusWrite<MachineStatus>, is_error: bool, since: Timestamp) -> Duration {
    let (old, new) = (&status.observed, &status.desired);
    let is_unschedulable = is_unschedulable(observed, new);
    let Some(old_ready) = ready(old) else {
        let created = observed.machine.metadata.creation_timestamp.as_ref().map(|time| time.0);
        return match (is_unschedulable, is_on_the_way(new, is_error)) {
            (true, _) => until(created, UNSCHEDULABLE, observed.now),
            (false, true) => until(created, FIRST_STATUS, observed.now),
            (false, false) => Duration::ZERO,
        };
    };
    let updated = old.last_updated.as_deref().and_then(|time| time.parse::<Timestamp>().ok());
    let same_state = old.phase == new.phase && ready(new).is_some_and(|new| is_same_state(old_ready, new));
    if old.observed_generation != new.observed_generation || has_moved_disk(observed, old, new) {
        Duration::ZERO
    } else if is_on_the_way(old, false) && is_unschedulable {
        until(Some(since), UNSCHEDULABLE, observed.now)
    } else if is_on_the_way(old, false) && is_on_the_way(new, is_error) {
        until(updated, PROGRESS, observed.now)
    } else if same_state || (old_ready.status != "True" && is_on_the_way(new, is_error)) {
        until(Some(since), DETAILS, observed.now).min(until(updated, ARRIVED, observed.now))
    } else {
        Duration::ZERO
    }
}

/// Whether a disk is in another PVC. A new VM starts with the PVC that the status names.
fn has_moved_disk(observed: &Observed, old: &MachineStatus, new: &MachineStatus) -> bool {
    new.disks.iter().any(|disk| match old.disks.iter().find(|have| have.name == disk.name) {
        Some(have) => (&have.pvc, have.external) != (&disk.pvc, disk.external),
        None => disk.external || disk.pvc != pvc_name(observed.name(), &disk.name),
    })
}

fn ready(status: &MachineStatus) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.type_ == condition_type::READY)
}

fn is_same_state(old: &Condition, new: &Condition) -> bool {
    (&old.status, &old.reason) == (&new.status, &new.reason)
}

fn is_unschedulable(observed: &Observed, status: &MachineStatus) -> bool {
    let by_scheduler = observed.vmi.as_ref().is_some_and(|vmi| vmi.unschedulable.is_some())
        || observed.vm.as_ref().is_some_and(|vm| vm.printable_status == PrintableStatus::ErrorUnschedulable);
    by_scheduler && ready(status).is_some_and(|ready| ready.reason == machine_reason::INSUFFICIENT_RESOURCES)
}

/// Whether another state follows without a change by a user: the Machine is being created or started.
fn is_on_the_way(status: &MachineStatus, is_error: bool) -> bool {
    let waits = ready(status)
        .is_some_and(|ready| [machine_reason::VM_CREATED, machine_reason::PVC_PENDING].contains(&&*ready.reason));
    !is_error && waits && status.phase == Some(MachinePhase::Creating)
}

/// The rest of `wait` since `start`. The clock of the API server may be ahead: nothing waits for longer than `wait`, and a
/// start that is later than the end of a wait which begins now has no meaning for this clock.
pub(super) fn until(start: Option<Timestamp>, wait: Duration, now: Timestamp) -> Duration {
    let Some(start) = start else { return Duration::ZERO };
    let passed = now.duration_since(start);
    if passed.unsigned_abs() > wait {
        return Duration::ZERO;
    }
    wait.saturating_sub(Duration::try_from(passed).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_waits_again_and_again_for_a_clock_that_is_ahead() {
        let now = Timestamp::from_second(1000).unwrap();
        let rest = |start: i64| until(Timestamp::from_second(start).ok(), Duration::from_secs(5), now).as_secs();
        let cases = [(900, 0), (995, 0), (997, 2), (1000, 5), (1003, 5), (1005, 5), (1006, 0), (4600, 0)];
        assert_eq!(cases.map(|(start, _)| rest(start)), cases.map(|(_, rest)| rest));
    }
}
