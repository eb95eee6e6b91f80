//! What to say about a Machine that is to go: nothing while it goes quickly, what it waits for when it does not, and at
//! once what holds it up. Only the conditions speak; the rest of the status stays as it was when there was a machine.

use std::time::Duration;

use vitivirt_api::machine::{condition_type, phase};
use vitivirt_api::{ConditionStatus, Outcome, Plan, Report, Stop, Wait, set_condition};

use super::finish;
use super::refusal::explain;
use super::summary::{Summary, not_ready};
use crate::observed::Observed;

/// A deletion that is quicker than this is not worth a write.
const VISIBLE_AFTER: Duration = Duration::from_secs(2);

pub(super) fn report(observed: &Observed, outcome: &Outcome) -> Report {
    match &outcome.stop {
        Stop::Waiting { wait, .. } => waiting(observed, wait),
        Stop::Failed { step, failure } => explain(failure).map_or_else(Report::default, |(reason, words)| {
            let message = format!("the Machine is being deleted, but the {step} is held up: {words}");
            told(observed, &not_ready(phase::CREATING, reason, message))
        }),
        Stop::Done | Stop::NameConflict { .. } => Report::default(),
    }
}

fn waiting(observed: &Observed, wait: &Wait) -> Report {
    let since = observed.machine.metadata.deletion_timestamp.as_ref().map_or(observed.now, |time| time.0);
    let waited = observed.now.duration_since(since);
    let remaining = VISIBLE_AFTER.saturating_sub(Duration::try_from(waited).unwrap_or_default());
    if !remaining.is_zero() {
        // The deletion timestamp has whole seconds: a little later is surely late enough.
        return Report { requeue_after: Some(remaining + Duration::from_millis(100)), ..Report::default() };
    }
    let message = format!("the Machine is being deleted: {}", wait.message);
    told(observed, &not_ready(phase::CREATING, wait.reason, message))
}

fn told(observed: &Observed, summary: &Summary) -> Report {
    let mut status = observed.machine.status.clone().unwrap_or_default();
    status.diagnosis = Some(summary.message.clone());
    set_condition(
        &mut status.conditions,
        condition_type::READY,
        ConditionStatus::False,
        summary.reason,
        &summary.message,
        observed.machine.metadata.generation,
        observed.now,
    );
    finish(observed, &Plan::default(), status, summary)
}
