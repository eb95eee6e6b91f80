//! One pass over one object: observe, plan, apply, report.
//!
//! A controller supplies the four steps; this module gives them a deadline, keeps a panic to the object it belongs to,
//! and turns what happened into the time of the next try. `executor` is the apply step, `runner` takes objects from
//! the queue.

mod backoff;
mod classify;
mod executor;
mod no_op_patches;
mod runner;
#[cfg(test)]
mod tests;

use std::{any::Any, panic::AssertUnwindSafe, time::Duration};

use futures::FutureExt;
use rand::Rng;
use serde::Serialize;
use serde_json::Value;
use tokio::time::timeout;
use vitivirt_api::{ErrorClass, Failure, ObjectKey, Outcome, Plan, Report, Stop, Target, reason};

pub use self::{
    backoff::Backoff,
    classify::classify,
    executor::Executor,
    runner::{Runner, RunnerOptions},
};
use crate::{events::Recorder, lease::Fence};

pub mod message {
    pub const FAILED: &str = "reconcile failed";
}

/// The step that a failed plan is reported with.
pub const PLAN_STEP: &str = "plan";

/// The four steps of one kind of object.
pub trait Controller: Send + Sync + 'static {
    /// Everything that a pass decides on, the time included.
    type Observed: Send + Sync;

    /// The status of the object.
    type Status: Serialize + PartialEq + Send + Sync;

    /// The label `controller` of logs and metrics.
    const NAME: &'static str;

    /// From the caches; a live read only before something destructive. Nothing: the object is gone.
    fn observe(&self, key: &ObjectKey) -> impl Future<Output = Result<Option<Self::Observed>, Failure>> + Send;

    /// Pure. An error is reported like a failed write of a step named [`PLAN_STEP`].
    fn plan(&self, observed: &Self::Observed) -> Result<Plan, Failure>;

    /// Whether a live object, whose name we wanted for a new one, is ours. Pure.
    fn owns(&self, observed: &Self::Observed, target: &Target, live: &Value) -> bool;

    /// Pure.
    fn report(&self, observed: &Self::Observed, plan: &Plan, outcome: &Outcome) -> Report<Self::Status>;

    /// The fields of every log line of a pass.
    fn span(&self, key: &ObjectKey) -> tracing::Span {
        let namespace = key.namespace().unwrap_or_default();
        tracing::info_span!("reconcile", controller = Self::NAME, namespace, name = key.name())
    }
}

/// What a pass came to, and what its report calls wrong: that need not be a failure of the pass.
#[derive(Debug, PartialEq)]
pub enum ReconcileResult {
    /// Nothing failed. The pass may wait for something, and may want to look again after a time.
    Succeeded { requeue_after: Option<Duration>, condition_reason: Option<&'static str> },
    /// When it is tried again is for the failure to say, not for the report: a server that asked for peace gets it.
    Failed { failure: Failure, condition_reason: Option<&'static str> },
}

impl ReconcileResult {
    fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Succeeded { .. } => None,
            Self::Failed { failure, .. } => Some(failure),
        }
    }

    /// The type of error that the pass counts as, at most one: what is told, else what failed.
    fn error(&self) -> Option<&'static str> {
        match self {
            Self::Succeeded { condition_reason, .. } => *condition_reason,
            Self::Failed { condition_reason, failure } => condition_reason.or(Some(failure.reason)),
        }
    }
}

/// One pass, which cannot last longer than `deadline` and cannot panic.
pub async fn reconcile<C: Controller>(
    controller: &C,
    key: &ObjectKey,
    executor: &Executor,
    events: &Recorder,
    fence: &Fence,
    deadline: Duration,
) -> ReconcileResult {
    let steps = AssertUnwindSafe(reconcile_steps(controller, key, executor, events, fence)).catch_unwind();
    let failure = match timeout(deadline, steps).await {
        Ok(Ok(Ok(result))) => return result,
        Ok(Ok(Err(failure))) => failure,
        Ok(Err(panic)) => Failure::bug(reason::PANIC, format!("the pass panicked: {}", panic_message(&*panic))),
        Err(_) => {
            Failure::transient(reason::RECONCILE_DEADLINE_EXCEEDED, format!("the pass took longer than {deadline:?}"))
        }
    };
    ReconcileResult::Failed { failure, condition_reason: None }
}

async fn reconcile_steps<C: Controller>(
    controller: &C,
    key: &ObjectKey,
    executor: &Executor,
    events: &Recorder,
    fence: &Fence,
) -> Result<ReconcileResult, Failure> {
    let Some(observed) = controller.observe(key).await? else {
        return Ok(ReconcileResult::Succeeded { requeue_after: None, condition_reason: None });
    };
    let (plan, outcome) = match controller.plan(&observed) {
        Ok(plan) => {
            let outcome = executor.apply(&plan, fence, |target, live| controller.owns(&observed, target, live)).await;
            (plan, outcome)
        }
        Err(failure) => (Plan::default(), Outcome { stop: Stop::Failed { step: PLAN_STEP, failure }, written: 0 }),
    };
    // Whatever there is to tell is for the leader to tell: no event, no status.
    match &outcome.stop {
        Stop::Failed { failure, .. } if failure.reason == reason::NOT_LEADING => return Err(failure.clone()),
        _ if !fence.may_write() => {
            return Err(Failure::transient(reason::NOT_LEADING, "this replica does not lead any more"));
        }
        _ => {}
    }
    let report = controller.report(&observed, &plan, &outcome);
    for note in report.events {
        events.record(note);
    }
    let reported = match &report.status {
        Some(status) => executor.report(status, fence).await,
        None => Ok(false),
    };
    let wait = match &outcome.stop {
        Stop::Waiting { wait, .. } => wait.requeue_after,
        _ => None,
    };
    let requeue_after = sooner(report.requeue_after, wait);
    let cause = match outcome.stop {
        Stop::Failed { failure, .. } => Some(failure),
        // Nobody is woken when the other object goes away.
        Stop::NameConflict { target, .. } => {
            Some(Failure::invalid(reason::NAME_TAKEN, format!("{target} exists and belongs to somebody else")))
        }
        Stop::Done | Stop::Waiting { .. } => None,
    };
    let failure = match (cause, reported) {
        (cause, Ok(_)) => cause,
        (None, Err(status_error)) => Some(status_error),
        // What is tried seldom must at least be told: what kept us from telling it decides about the next try.
        (Some(cause), Err(status_error)) if matches!(cause.class, ErrorClass::Invalid | ErrorClass::Forbidden) => {
            Some(status_error)
        }
        // The first failure is the cause; that the status could not be told of it may be its consequence.
        (Some(cause), Err(_)) => Some(cause),
    };
    let condition_reason = report.error;
    Ok(match failure {
        None => ReconcileResult::Succeeded { requeue_after, condition_reason },
        Some(failure) => ReconcileResult::Failed { failure, condition_reason },
    })
}

fn sooner(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

/// When to try again after `failures` failures in a row before this one.
pub fn retry_delay(failure: &Failure, failures: u32, jitter: &mut impl Rng) -> Duration {
    const fn seconds(base_ms: u64, max: u64) -> Backoff {
        Backoff::new(Duration::from_millis(base_ms), Duration::from_secs(max))
    }
    let backoff = match failure.class {
        ErrorClass::Transient => seconds(250, 60),
        // The watch usually brings what we missed within milliseconds.
        ErrorClass::Conflict => seconds(20, 10),
        // A change of the object wakes us; a change of what refused it, a policy or a webhook, does not.
        ErrorClass::Invalid => seconds(30_000, 300),
        // Granting a permission wakes nobody.
        ErrorClass::Forbidden => seconds(5_000, 300),
        ErrorClass::Bug => seconds(1_000, 300),
    };
    backoff.delay(failures, jitter).max(failure.retry_after.unwrap_or_default())
}
