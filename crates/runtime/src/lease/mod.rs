//! Leader election with one Lease object. Every write of its holder carries the resource version, so the API server
//! accepts one writer at a time.
//!
//! A replica trusts only its own clock. Another replica's lease has expired when this replica has seen it unchanged for
//! the lease duration; the times in the Lease do not matter. A leader stops its work `renew_deadline` after the start
//! of its last successful renewal. No other replica saw that renewal earlier than it began, and each waits at least
//! `duration` after it saw it, so the leader stops first.
//!
//! Two leaders are possible in one case, which only an administrator can cause: a Lease that is deleted while it is
//! held. A replica that saw the Lease waits for its duration, and the holder creates it again at its next renewal. But
//! a replica that starts in between has seen nothing and creates the Lease at once. The holder notices when its renewal
//! finds that the name already exists: usually within `retry_period`, and within `renew_deadline` if its connection
//! fails at that moment. Until then both replicas work. UIDs and resource versions still protect their writes. Avoiding
//! this case would delay the first start in every cluster by `duration`.
//!
//! This module decides, with pure functions; `elector` sends the requests. `program` runs the work of the leader.

mod elector;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub(crate) use elector::Elector;

/// Log lines that tests search for. Each has the fields `identity` and `lease`.
pub mod message {
    pub const ACQUIRED: &str = "leadership acquired";
    pub const LOST: &str = "leadership lost";
    pub const WORK_STOPPED: &str = "work stopped";
    pub const RELEASED: &str = "lease released";
}

/// The upper limit for the duration in a Lease that another client wrote.
const MAX_LEASE_DURATION: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timing {
    /// How long an unchanged lease is valid.
    pub(crate) duration: Duration,
    /// How long after its last renewal a leader continues to work.
    pub(crate) renew_deadline: Duration,
    /// The time between two renewals, and the delay after a failed request.
    pub(crate) retry_period: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }
}

/// What this replica knows of the Lease, and since when.
#[derive(Clone, Debug, Default)]
struct LeaseView {
    observed: Option<ObservedLease>,
}

#[derive(Clone, Debug)]
struct ObservedLease {
    /// `None`: the object does not exist.
    lease: Option<Lease>,
    /// How long after `changed_at` this replica may acquire the lease.
    expires_after: Duration,
    changed_at: Instant,
}

impl LeaseView {
    /// Records the Lease as it is now. The time until it expires starts again only if the Lease has changed.
    fn observe(&mut self, lease: Option<Lease>, now: Instant, timing: &Timing) {
        let version = |lease: &Option<Lease>| lease.as_ref().and_then(|lease| lease.metadata.resource_version.clone());
        if self.observed.as_ref().is_some_and(|observed| version(&observed.lease) == version(&lease)) {
            return;
        }
        let expires_after = match &lease {
            Some(lease) if holder(lease).is_some() => spec_duration(lease).max(timing.duration),
            Some(_) => Duration::ZERO,
            // Another client deleted a Lease that was held. Its holder continues to work until it notices.
            None => self.observed.as_ref().map_or(Duration::ZERO, |observed| observed.expires_after),
        };
        self.observed = Some(ObservedLease { lease, expires_after, changed_at: now });
    }

    fn lease(&self) -> Option<&Lease> {
        self.observed.as_ref()?.lease.as_ref()
    }
}

/// What a replica that does not hold the lease does next.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LeaseAction {
    /// The Lease has not been read yet.
    WaitForView,
    /// The Lease does not exist: create it.
    Create,
    /// The lease is free, has expired, or already names this replica: write this replica into it as the holder.
    Acquire,
    /// Another replica holds the lease. Unless the Lease changes, it expires at this time.
    WaitUntil(Instant),
}

fn decide(view: &LeaseView, now: Instant, identity: &str) -> LeaseAction {
    let Some(observed) = &view.observed else { return LeaseAction::WaitForView };
    let is_ours = observed.lease.as_ref().and_then(holder) == Some(identity);
    let expires_at = observed.changed_at + observed.expires_after;
    match (&observed.lease, is_ours || now >= expires_at) {
        (None, true) => LeaseAction::Create,
        (Some(_), true) => LeaseAction::Acquire,
        (_, false) => LeaseAction::WaitUntil(expires_at),
    }
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

fn spec_duration(lease: &Lease) -> Duration {
    let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or(0);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).min(MAX_LEASE_DURATION)
}

/// The spec with `identity` as the holder from `now` on. A renewal keeps the acquire time. The times are informative:
/// no replica decides by them.
fn held_spec(identity: &str, previous: Option<&Lease>, now: Timestamp, timing: &Timing) -> LeaseSpec {
    let spec = previous.and_then(|lease| lease.spec.clone()).unwrap_or_default();
    let is_renewal = previous.and_then(holder) == Some(identity);
    let transitions = spec.lease_transitions.unwrap_or(0);
    LeaseSpec {
        holder_identity: Some(identity.to_owned()),
        lease_duration_seconds: i32::try_from(timing.duration.as_secs()).ok(),
        acquire_time: if is_renewal { spec.acquire_time } else { Some(MicroTime(now)) },
        renew_time: Some(MicroTime(now)),
        lease_transitions: Some(if is_renewal || previous.is_none() {
            transitions
        } else {
            transitions.saturating_add(1)
        }),
        ..LeaseSpec::default()
    }
}

/// The spec without a holder: a replica that watches the Lease acquires it at once.
fn released_spec(previous: &Lease, now: Timestamp) -> LeaseSpec {
    LeaseSpec {
        holder_identity: Some(String::new()),
        lease_duration_seconds: Some(1),
        renew_time: Some(MicroTime(now)),
        ..previous.spec.clone().unwrap_or_default()
    }
}

/// The identity of the replica that holds the lease, as far as this replica knows. Clones share it. It is for people; no
/// decision reads it.
#[derive(Clone, Debug, Default)]
pub struct CurrentLeader(Arc<Mutex<Option<String>>>);

impl CurrentLeader {
    pub fn get(&self) -> Option<String> {
        self.0.lock().clone()
    }

    pub(crate) fn set(&self, identity: Option<&str>) {
        let mut current = self.0.lock();
        if current.as_deref() != identity {
            *current = identity.map(ToOwned::to_owned);
        }
    }
}

/// Handed to the leader's work: it signals when to stop, and whether a write may still be sent.
#[derive(Clone, Debug)]
pub struct Leadership {
    pub stop: CancellationToken,
    pub fence: WriteFence,
    tasks: TaskTracker,
}

impl Leadership {
    fn new(fence: WriteFence) -> Self {
        Self { stop: CancellationToken::new(), fence, tasks: TaskTracker::new() }
    }

    /// Every spawned task of the leader's work must be tracked. A task ends some time after it is cancelled, or never
    /// if it blocks its thread, and until then this replica has not stopped working.
    pub(crate) fn track<F: Future>(&self, work: F) -> impl Future<Output = F::Output> + use<F> {
        self.tasks.track_future(work)
    }

    /// Returns when all tracked tasks have ended.
    pub(crate) async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// The leadership of a program that runs without a lease: it leads until `stop`.
    pub(crate) fn without_lease(stop: CancellationToken) -> Self {
        Self { stop, ..Self::new(WriteFence::open()) }
    }
}

/// Whether this replica's lease is still valid, so that it may send a write. It closes by the clock, without any task: a
/// process that was stopped for a minute (SIGSTOP) finds it closed before its next write.
///
/// It does not recall a write that was sent before it closed. The server executes such a write within the deadline of a
/// request, which the write names, or not at all. The clock does not count the time in which the whole machine was
/// suspended, so after that the fence may stay open until the next renewal, which fails. UIDs and resource versions protect the objects in both cases.
#[derive(Clone, Debug)]
pub struct WriteFence(Arc<Mutex<FenceState>>);

#[derive(Clone, Copy, Debug)]
enum FenceState {
    Open,
    Until(Instant),
    Closed,
}

impl WriteFence {
    pub(crate) fn open() -> Self {
        Self(Arc::new(Mutex::new(FenceState::Open)))
    }

    fn until(end: Instant) -> Self {
        Self(Arc::new(Mutex::new(FenceState::Until(end))))
    }

    fn extend(&self, end: Instant) {
        *self.0.lock() = FenceState::Until(end);
    }

    fn close(&self) {
        *self.0.lock() = FenceState::Closed;
    }

    #[cfg(test)]
    pub(crate) fn close_for_test(&self) {
        self.close();
    }

    pub(crate) fn may_write(&self) -> bool {
        match *self.0.lock() {
            FenceState::Open => true,
            FenceState::Until(end) => Instant::now() < end,
            FenceState::Closed => false,
        }
    }
}
