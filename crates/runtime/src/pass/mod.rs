//! One pass over one object: observe, plan, apply, report.
//!
//! A controller supplies the four steps; this module gives them a deadline, keeps a panic to the object it belongs to,
//! and turns what happened into the time of the next try. `executor` is the apply step, `runner` takes objects from
//! the queue.

mod backoff;
mod classify;
mod executor;
mod runner;
#[cfg(test)]
mod tests;

use std::{any::Any, panic::AssertUnwindSafe, time::Duration};

use api::{Class, Failure, ObjectKey, Outcome, Plan, Report, Stop, Target, reason};
use futures::FutureExt;
use rand::Rng;
use serde_json::Value;
use tokio::time::timeout;

pub use self::{
    backoff::Backoff,
    classify::classify,
    executor::Executor,
    runner::{Runner, RunnerOptions},
};
use crate::{events::Recorder, lease::Fence};

pub mod message {
    pub const FAILED: &str = "pass failed";
}

/// The four steps of one kind of object.
pub trait Controller: Send + Sync + 'static {
    /// Everything that a pass decides on, the time included.
    type Observed: Send + Sync;

    /// The label `controller` of logs and metrics.
    const NAME: &'static str;

    /// From the caches; a live read only before something destructive. Nothing: the object is gone.
    fn observe(&self, key: &ObjectKey) -> impl Future<Output = Result<Option<Self::Observed>, Failure>> + Send;

    /// Pure.
    fn plan(&self, observed: &Self::Observed) -> Plan;

    /// Whether a live object, whose name we wanted for a new one, is ours. Pure.
    fn owns(&self, observed: &Self::Observed, target: &Target, live: &Value) -> bool;

    /// Pure.
    fn report(&self, observed: &Self::Observed, plan: &Plan, outcome: &Outcome) -> Report;

    /// The fields of every log line of a pass.
    fn span(&self, key: &ObjectKey) -> tracing::Span {
        let namespace = key.namespace().unwrap_or_default();
        tracing::info_span!("pass", controller = Self::NAME, namespace, name = key.name())
    }
}

/// What a pass came to.
#[derive(Debug, PartialEq)]
pub enum Passed {
    /// Nothing failed. The pass may wait for something, and may want to look again after a time.
    Settled {
        wake_after: Option<Duration>,
    },
    Failed {
        failure: Failure,
        wake_after: Option<Duration>,
    },
}

/// One pass, which cannot last longer than `deadline` and cannot panic.
pub async fn pass<C: Controller>(
    controller: &C,
    key: &ObjectKey,
    executor: &Executor,
    events: &Recorder,
    fence: &Fence,
    deadline: Duration,
) -> Passed {
    let steps = AssertUnwindSafe(steps(controller, key, executor, events, fence)).catch_unwind();
    let failure = match timeout(deadline, steps).await {
        Ok(Ok(Ok(passed))) => return passed,
        Ok(Ok(Err(failure))) => failure,
        Ok(Err(panic)) => Failure::bug(reason::PANIC, format!("the pass panicked: {}", panic_message(&*panic))),
        Err(_) => Failure::transient(reason::PASS_DEADLINE_EXCEEDED, format!("the pass took longer than {deadline:?}")),
    };
    Passed::Failed { failure, wake_after: None }
}

async fn steps<C: Controller>(
    controller: &C,
    key: &ObjectKey,
    executor: &Executor,
    events: &Recorder,
    fence: &Fence,
) -> Result<Passed, Failure> {
    let Some(observed) = controller.observe(key).await? else {
        return Ok(Passed::Settled { wake_after: None });
    };
    let plan = controller.plan(&observed);
    let outcome = executor.apply(&plan, fence, |target, live| controller.owns(&observed, target, live)).await;
    let report = controller.report(&observed, &plan, &outcome);
    for note in report.events {
        events.record(note);
    }
    let reported = match &report.status {
        Some(status) => executor.report(status, fence).await,
        None => Ok(false),
    };
    let wait = match &outcome.stop {
        Stop::Waiting { wait, .. } => wait.wake_after,
        _ => None,
    };
    let wake_after = sooner(report.wake_after, wait);
    // The first failure is the cause; that the status could not be told of it may be its consequence.
    match (outcome.stop, reported) {
        (Stop::Failed { failure, .. }, _) | (_, Err(failure)) => Ok(Passed::Failed { failure, wake_after }),
        (Stop::Done | Stop::Waiting { .. } | Stop::Taken { .. }, Ok(_)) => Ok(Passed::Settled { wake_after }),
    }
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

/// When to try again after `failures` failures in a row before this one. Nothing: only a change can help.
pub fn retry_delay(failure: &Failure, failures: u32, jitter: &mut impl Rng) -> Option<Duration> {
    const fn seconds(base_ms: u64, max: u64) -> Backoff {
        Backoff::new(Duration::from_millis(base_ms), Duration::from_secs(max))
    }
    let backoff = match failure.class {
        Class::Transient => seconds(250, 60),
        // The watch usually brings what we missed within milliseconds.
        Class::Conflict => seconds(20, 10),
        Class::Invalid => return None,
        // Granting a permission wakes nobody.
        Class::Forbidden => seconds(5_000, 300),
        Class::Bug => seconds(1_000, 300),
    };
    Some(backoff.delay(failures, jitter).max(failure.retry_after.unwrap_or_default()))
}
