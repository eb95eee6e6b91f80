//! One reconcile of one object: observe, plan, apply, report.
//!
//! A controller supplies the steps. This module gives them a deadline, limits a panic to the object that caused it, and
//! decides when the next attempt takes place. `executor` is the apply step, `runner` takes objects from the queue.

mod breaker;
mod classify;
mod executor;
mod no_op_patches;
mod retry;
mod runner;
mod status_fields;
#[cfg(test)]
mod tests;
mod write_backoff;

use std::{any::Any, panic::AssertUnwindSafe, time::Duration};

use futures::FutureExt;
use serde::Serialize;
use serde_json::Value;
use tokio::time::timeout;
use vitivirt_api::{ErrorClass, Failure, ObjectKey, Outcome, Plan, Report, Stop, Target, reason};

use self::executor::Applied;
pub use self::{
    classify::classify,
    executor::Executor,
    runner::{Runner, RunnerOptions},
};
use crate::{events::Recorder, lease::WriteFence};

mod message {
    pub(super) const FAILED: &str = "reconcile failed";
    pub(super) const HELD: &str = "failed write is not sent again yet";
}

/// The step that a failed plan is reported with.
pub const PLAN_STEP: &str = "plan";

/// The steps of a reconcile for one kind of object. `reconcile` runs them in this order:
///
/// 1. [`observe`](Self::observe) collects what the reconcile decides on (client required).
/// 2. [`plan`](Self::plan) compares it with the desired state and lists the writes (pure).
/// 3. [`Executor::apply`] sends the writes (client required). It calls [`owns`](Self::owns) (pure) when the name of a
///    new object already exists.
/// 4. [`report`](Self::report) describes the outcome as a status and events (pure). [`Executor::report`] sends the
///    status (client required).
pub trait Controller: Send + Sync + 'static {
    /// Everything that a reconcile decides on, including the current time.
    type Observed: Send + Sync;

    /// The status of the object.
    type Status: Serialize + PartialEq + Send + Sync;

    /// The label `controller` of logs and metrics.
    const NAME: &'static str;

    /// The label `name` of the metrics that have KubeVirt's names.
    const QUEUE: &'static str = Self::NAME;

    /// Reads from the caches, and from the API server only before a destructive step. `None`: the object does not
    /// exist.
    fn observe(&self, key: &ObjectKey) -> impl Future<Output = Result<Option<Self::Observed>, Failure>> + Send;

    /// Pure. An error is reported like a failed write of a step named `plan`.
    fn plan(&self, observed: &Self::Observed) -> Result<Plan, Failure>;

    /// Whether a live object that has the name of a planned one belongs to the observed object. Pure.
    fn owns(&self, observed: &Self::Observed, target: &Target, live: &Value) -> bool;

    /// Pure.
    fn report(&self, observed: &Self::Observed, plan: &Plan, outcome: &Outcome) -> Report<Self::Status>;

    /// The fields of every log line of a reconcile.
    fn span(&self, key: &ObjectKey) -> tracing::Span {
        let namespace = key.namespace().unwrap_or_default();
        tracing::info_span!("reconcile", controller = Self::NAME, namespace, name = key.name())
    }
}

/// The result of a reconcile. `condition_reason` is the error that the report shows to users, which exists without a
/// failure too, for example for an invalid spec.
#[derive(Debug, PartialEq)]
enum ReconcileResult {
    /// No step failed. The reconcile may wait for something, and may ask to be repeated after a delay.
    Succeeded { requeue_after: Option<Duration>, condition_reason: Option<&'static str> },
    /// The failure alone decides when to retry. The report cannot shorten the delay that a server asked for.
    Failed { failure: Failure, retry: Retry, condition_reason: Option<&'static str> },
}

/// What decides when to retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retry {
    /// The executor holds a write back for this time. `sent`: a write failed in this reconcile, and not only earlier.
    Write { after: Duration, sent: bool },
    /// The runner, by the failures of the object in a row.
    Backoff,
}

impl ReconcileResult {
    fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Succeeded { .. } => None,
            Self::Failed { failure, .. } => Some(failure),
        }
    }

    /// The error type that metrics count, at most one per reconcile: the condition's reason, else the failure's.
    fn error_type(&self) -> Option<&'static str> {
        match self {
            Self::Succeeded { condition_reason, .. } => *condition_reason,
            Self::Failed { condition_reason, failure, .. } => condition_reason.or(Some(failure.reason)),
        }
    }
}

/// One reconcile. It ends by `deadline`, and a panic in a step becomes a failure.
async fn reconcile<C: Controller>(
    controller: &C,
    key: &ObjectKey,
    executor: &Executor,
    events: &Recorder,
    fence: &WriteFence,
    deadline: Duration,
) -> ReconcileResult {
    let steps = AssertUnwindSafe(reconcile_steps(controller, key, executor, events, fence)).catch_unwind();
    let failure = match timeout(deadline, steps).await {
        Ok(Ok(Ok(result))) => return result,
        Ok(Ok(Err(failure))) => failure,
        Ok(Err(panic)) => Failure::bug(reason::PANIC, format!("reconcile panicked: {}", panic_message(&*panic))),
        Err(_) => {
            Failure::transient(reason::RECONCILE_DEADLINE_EXCEEDED, format!("reconcile took longer than {deadline:?}"))
        }
    };
    ReconcileResult::Failed { failure, retry: Retry::Backoff, condition_reason: None }
}

async fn reconcile_steps<C: Controller>(
    controller: &C,
    key: &ObjectKey,
    executor: &Executor,
    events: &Recorder,
    fence: &WriteFence,
) -> Result<ReconcileResult, Failure> {
    // 1. Observe (client required).
    let Some(observed) = controller.observe(key).await? else {
        return Ok(ReconcileResult::Succeeded { requeue_after: None, condition_reason: None });
    };

    // 2. Plan (pure) and 3. apply (client required).
    let (plan, Applied { outcome, retry }) = match controller.plan(&observed) {
        Ok(plan) => {
            let applied = executor.apply(&plan, fence, |target, live| controller.owns(&observed, target, live)).await;
            (plan, applied)
        }
        Err(failure) => {
            let outcome = Outcome { stop: Stop::Failed { step: PLAN_STEP, failure }, written: 0 };
            (Plan::default(), Applied { outcome, retry: Retry::Backoff })
        }
    };
    require_leadership(&outcome.stop, fence)?;

    // 4. Report (pure), then record the events and send the status (client required).
    let report = controller.report(&observed, &plan, &outcome);
    report.events.into_iter().for_each(|event| events.record(event));
    let status_error = match &report.status {
        Some(status) => executor.report(status, fence).await.err(),
        None => None,
    };

    let (requeue_after, condition_reason) =
        (min_delay(report.requeue_after, outcome_wait(&outcome.stop)), report.error);
    let cause = outcome_failure(outcome.stop).map(|failure| (failure, retry));
    Ok(match resolve_failure(cause, status_error) {
        None => ReconcileResult::Succeeded { requeue_after, condition_reason },
        Some((failure, retry)) => ReconcileResult::Failed { failure, retry, condition_reason },
    })
}

/// Only the leader reports: a replica that lost the lease records no event and sends no status.
fn require_leadership(stop: &Stop, fence: &WriteFence) -> Result<(), Failure> {
    match stop {
        Stop::Failed { failure, .. } if failure.reason == reason::NOT_LEADING => Err(failure.clone()),
        _ if !fence.may_write() => Err(Failure::transient(reason::NOT_LEADING, "this replica is no longer the leader")),
        _ => Ok(()),
    }
}

fn outcome_wait(stop: &Stop) -> Option<Duration> {
    match stop {
        Stop::Waiting { wait, .. } => wait.requeue_after,
        _ => None,
    }
}

fn outcome_failure(stop: Stop) -> Option<Failure> {
    match stop {
        Stop::Failed { failure, .. } => Some(failure),
        // Deleting the conflicting object triggers no reconcile, so the conflict is retried like a failure.
        Stop::NameConflict { target, .. } => {
            let message = format!("{target} already exists and is not managed by this operator");
            Some(Failure::invalid(reason::NAME_TAKEN, message))
        }
        Stop::Done | Stop::Waiting { .. } => None,
    }
}

/// The failure that a reconcile ends with: `cause` stopped the plan, `status_error` kept the status from being sent.
fn resolve_failure(cause: Option<(Failure, Retry)>, status_error: Option<Failure>) -> Option<(Failure, Retry)> {
    match (cause, status_error) {
        (cause, None) => cause,
        // Invalid and Forbidden errors retry slowly, so the condition must be visible: if the status write failed,
        // retry on that error's schedule.
        (Some((cause, retry)), Some(_)) if !matches!(cause.class, ErrorClass::Invalid | ErrorClass::Forbidden) => {
            // The first failure is the cause. The failed status write may be its consequence.
            Some((cause, retry))
        }
        (_, Some(status_error)) => Some((status_error, Retry::Backoff)),
    }
}

fn min_delay(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
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
        .unwrap_or("no panic message")
}
