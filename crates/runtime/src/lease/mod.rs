//! Which replica works. One Lease object, whose holder is changed only by writes that carry its resource version, so
//! the API server admits one writer at a time.
//!
//! Three clocks are at play and only ours is trusted: whether another's lease has run out is judged by how long we
//! have seen it unchanged, never by the times written in it. A holder stops its work `renew_deadline` after the last
//! renewal *it began*, which is before `duration` after the moment anyone can have seen that renewal.
//!
//! One window remains, and only an administrator can open it: a Lease that is deleted while it is held. A replica that
//! had seen it waits for as long as it kept others out, and its holder makes it anew at its next renewal. But a replica
//! that starts in between has seen nothing, and makes it at once. The holder learns of that when its renewal finds the
//! name taken: within `retry_period` as a rule, and within `renew_deadline` if it is cut off just then. For so long two
//! may work. What they write is still decided by UIDs and resource versions. Closing the window would make the first
//! start of every cluster wait for `duration`.
//!
//! `decide` is the whole of the judgement and is pure; `elector` does what it says.

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

pub use elector::{Elector, LeaseError};

/// Log lines that tests and people look for. Each carries the fields `identity` and `lease`.
pub mod message {
    pub const ACQUIRED: &str = "leadership acquired";
    pub const LOST: &str = "leadership lost";
    pub const WORK_STOPPED: &str = "work stopped";
    pub const RELEASED: &str = "lease released";
}

/// No holder may keep others out for longer by writing a long duration into the lease.
const LONGEST_DURATION: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long an unchanged lease keeps others out.
    pub duration: Duration,
    /// How long after its last renewal a holder goes on working.
    pub renew_deadline: Duration,
    /// How often a holder renews, and how long anyone waits after a failed request.
    pub retry_period: Duration,
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

/// What we have seen of the lease, and when we saw it become so.
#[derive(Clone, Debug, Default)]
pub struct Sight {
    seen: Option<Seen>,
}

#[derive(Clone, Debug)]
struct Seen {
    /// `None`: the object does not exist.
    lease: Option<Lease>,
    /// For how long what we see keeps us out, counted from `changed_at`.
    keeps_out: Duration,
    changed_at: Instant,
}

impl Sight {
    /// Takes note of the lease as it is now. The clock starts anew only if it is not what we saw before.
    pub fn see(&mut self, lease: Option<Lease>, now: Instant, timing: &Timing) {
        let version = |lease: &Option<Lease>| lease.as_ref().and_then(|lease| lease.metadata.resource_version.clone());
        if self.seen.as_ref().is_some_and(|seen| version(&seen.lease) == version(&lease)) {
            return;
        }
        let keeps_out = match &lease {
            Some(lease) if holder(lease).is_some() => written_duration(lease).max(timing.duration),
            Some(_) => Duration::ZERO,
            // Somebody deleted a lease that was held: its holder works on until it notices.
            None => self.seen.as_ref().map_or(Duration::ZERO, |seen| seen.keeps_out),
        };
        self.seen = Some(Seen { lease, keeps_out, changed_at: now });
    }

    pub fn lease(&self) -> Option<&Lease> {
        self.seen.as_ref()?.lease.as_ref()
    }
}

/// What a replica without the lease does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing is known yet.
    Look,
    /// There is no lease: make it.
    Create,
    /// It is free, or has run out, or is ours already: write ourselves into the lease that we saw.
    Take,
    /// Somebody holds it. Unless it changes, it has run out then.
    Wait(Instant),
}

pub fn decide(sight: &Sight, now: Instant, me: &str) -> Action {
    let Some(seen) = &sight.seen else { return Action::Look };
    let ours = seen.lease.as_ref().and_then(holder) == Some(me);
    let runs_out = seen.changed_at + seen.keeps_out;
    match (&seen.lease, ours || now >= runs_out) {
        (None, true) => Action::Create,
        (Some(_), true) => Action::Take,
        (_, false) => Action::Wait(runs_out),
    }
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

fn written_duration(lease: &Lease) -> Duration {
    let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or(0);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).min(LONGEST_DURATION)
}

/// The spec that makes `me` the holder from `now` on. A renewal keeps when it was acquired; the times are for people.
fn held_by(me: &str, previous: Option<&Lease>, now: Timestamp, timing: &Timing) -> LeaseSpec {
    let spec = previous.and_then(|lease| lease.spec.clone()).unwrap_or_default();
    let renewal = previous.and_then(holder) == Some(me);
    let transitions = spec.lease_transitions.unwrap_or(0);
    LeaseSpec {
        holder_identity: Some(me.to_owned()),
        lease_duration_seconds: i32::try_from(timing.duration.as_secs()).ok(),
        acquire_time: if renewal { spec.acquire_time } else { Some(MicroTime(now)) },
        renew_time: Some(MicroTime(now)),
        lease_transitions: Some(if renewal || previous.is_none() {
            transitions
        } else {
            transitions.saturating_add(1)
        }),
        ..LeaseSpec::default()
    }
}

/// The spec that nobody holds: who watches the lease takes it at once.
fn held_by_nobody(previous: &Lease, now: Timestamp) -> LeaseSpec {
    LeaseSpec {
        holder_identity: Some(String::new()),
        lease_duration_seconds: Some(1),
        renew_time: Some(MicroTime(now)),
        ..previous.spec.clone().unwrap_or_default()
    }
}

/// Handed to the leader's work: when to stop, and whether a write may still be sent.
#[derive(Clone, Debug)]
pub struct Leadership {
    pub stop: CancellationToken,
    pub fence: Fence,
    tasks: TaskTracker,
}

impl Leadership {
    fn new(fence: Fence) -> Self {
        Self { stop: CancellationToken::new(), fence, tasks: TaskTracker::new() }
    }

    /// Work in a task of its own belongs in here: a task ends a moment after it was told to, or not at all if it blocks
    /// its thread, and until then this replica has not stopped working.
    pub fn track<F: Future>(&self, work: F) -> impl Future<Output = F::Output> + use<F> {
        self.tasks.track_future(work)
    }

    /// Returns when all tracked work has ended. Nothing new is begun by then.
    pub(crate) async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// For a program that runs without a lease: it leads until it is told to stop.
    pub fn unopposed(stop: CancellationToken) -> Self {
        Self { stop, ..Self::new(Fence::open()) }
    }
}

/// Says whether our lease still keeps others out. It closes by the clock, without anyone having to run: a process
/// that was stopped for a minute finds it closed before its next write.
#[derive(Clone, Debug)]
pub struct Fence(Arc<Mutex<Gate>>);

#[derive(Clone, Copy, Debug)]
enum Gate {
    Open,
    Until(Instant),
    Closed,
}

impl Fence {
    pub fn open() -> Self {
        Self(Arc::new(Mutex::new(Gate::Open)))
    }

    fn until(end: Instant) -> Self {
        Self(Arc::new(Mutex::new(Gate::Until(end))))
    }

    fn extend(&self, end: Instant) {
        *self.0.lock() = Gate::Until(end);
    }

    fn close(&self) {
        *self.0.lock() = Gate::Closed;
    }

    #[cfg(test)]
    pub(crate) fn close_for_test(&self) {
        self.close();
    }

    pub fn may_write(&self) -> bool {
        match *self.0.lock() {
            Gate::Open => true,
            Gate::Until(end) => Instant::now() < end,
            Gate::Closed => false,
        }
    }
}
