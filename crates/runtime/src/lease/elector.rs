//! Executes the decisions of `decide`: watches the Lease on standby, renews it as the holder, and ensures that the
//! holder's work has ended before another replica can begin.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt, stream::BoxStream};
use k8s_openapi::{api::coordination::v1::Lease, apimachinery::pkg::apis::meta::v1::ObjectMeta, jiff::Timestamp};
use kube::{
    Api, Client,
    api::PostParams,
    runtime::watcher::{self, Event, watcher},
};
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::{
    CurrentLeader, Leadership, LeaseAction, LeaseView, Timing, WriteFence, decide, held_spec, holder, message,
    released_spec,
};
use crate::metrics::Metrics;

/// A request that takes longer is given up, so that there is time for another one before the renew deadline.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// Without a release the other replicas wait until the lease expires, so one short attempt is worth its time.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long before the lease expires it must be known whether the work has ended, so that the process can exit if not.
const STOP_MARGIN: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub(crate) enum LeaseError {
    #[error("the leader's work did not stop in time; this process must exit before another replica begins to work")]
    WorkStuck,
    #[error("the leader's work ended unexpectedly")]
    WorkEnded,
}

pub(crate) struct Elector {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Unique to this process.
    pub(crate) identity: String,
    pub(crate) timing: Timing,
    /// How long the work may take to stop after a signal before it is aborted.
    pub(crate) drain: Duration,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) leader: CurrentLeader,
}

/// Why the holder stopped.
enum StopReason {
    Shutdown,
    /// The lease was not renewed in time. No other replica can hold it before it expires.
    NotRenewed,
    /// Another replica holds the lease, and may work already.
    Replaced(String),
    WorkEnded,
}

/// The result of a write of the Lease.
enum LeaseWriteResult {
    Done(Box<Lease>),
    /// Another client changed or created the Lease since this replica read it.
    Conflict,
    NotFound,
    Failed(String),
}

/// The result of a renewal.
enum Renewal {
    Renewed(Box<Lease>),
    /// This replica still holds the lease, but the object has changed: renew this version.
    Changed(Box<Lease>),
    /// Another client deleted the Lease. The replica that creates it first holds it.
    Deleted,
    Lost(String),
    Failed,
}

impl Elector {
    /// Runs `lead` whenever this replica holds the lease, until `shutdown`. Then it releases the lease.
    pub(crate) async fn run<F, W>(&self, shutdown: &CancellationToken, lead: F) -> Result<(), LeaseError>
    where
        F: Fn(Leadership) -> W,
        W: Future<Output = ()> + Send + 'static,
    {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.namespace);
        while let Some((lease, began)) = self.wait_for_lease(&api, shutdown).await {
            self.hold(&api, lease, began, shutdown, &lead).await?;
        }
        Ok(())
    }

    /// Returns the lease and the time at which the request that acquired it began, or `None` at shutdown.
    async fn wait_for_lease(&self, api: &Api<Lease>, shutdown: &CancellationToken) -> Option<(Lease, Instant)> {
        let maybe_acquired = AtomicBool::new(false);
        let mut acquiring = Box::pin(self.acquire(api, &maybe_acquired));
        tokio::select! {
            biased;
            acquired = &mut acquiring => return Some(acquired),
            () = shutdown.cancelled() => {}
        }
        if maybe_acquired.load(Ordering::Relaxed) {
            // A request in flight may still succeed. Without a release the other replicas would wait until the lease
            // expires.
            let by = Instant::now() + RELEASE_TIMEOUT;
            match timeout_at(Instant::now() + RELEASE_TIMEOUT / 2, acquiring).await {
                Ok((lease, _)) => self.release(api, Some(lease), by).await,
                Err(_) => self.release(api, None, by).await,
            }
        }
        None
    }

    /// `maybe_acquired` is set while a request may have acquired the lease and its result is unknown.
    async fn acquire(&self, api: &Api<Lease>, maybe_acquired: &AtomicBool) -> (Lease, Instant) {
        let mut view = LeaseView::default();
        let mut watch = LeaseWatch::new(api, &self.name);
        let mut not_before = Instant::now();
        loop {
            let now = Instant::now();
            self.leader.set(view.lease().and_then(holder));
            match decide(&view, now, &self.identity) {
                LeaseAction::Create | LeaseAction::Acquire if now >= not_before => {
                    maybe_acquired.store(true, Ordering::Relaxed);
                    let result = self.write_holder(api, view.lease(), REQUEST_TIMEOUT).await;
                    maybe_acquired.store(matches!(result, LeaseWriteResult::Failed(_)), Ordering::Relaxed);
                    match result {
                        LeaseWriteResult::Done(lease) => return (*lease, now),
                        // The view is outdated. The watch usually delivers the change, but it may be stuck.
                        LeaseWriteResult::Conflict => match self.read_lease(api).await {
                            Ok(lease) => view.observe(lease, Instant::now(), &self.timing),
                            Err(error) => self.warn("cannot read the lease", &error),
                        },
                        LeaseWriteResult::NotFound => self.warn("cannot acquire the lease", "namespace not found"),
                        LeaseWriteResult::Failed(error) => self.warn("cannot acquire the lease", &error),
                    }
                    not_before = Instant::now() + self.timing.retry_period;
                }
                action => {
                    let decide_again_at = match action {
                        LeaseAction::WaitForView => None,
                        LeaseAction::WaitUntil(until) => Some(until.max(not_before)),
                        LeaseAction::Create | LeaseAction::Acquire => Some(not_before),
                    };
                    tokio::select! {
                        observed = watch.next(self.timing.retry_period) => match observed {
                            Ok(lease) => view.observe(lease, Instant::now(), &self.timing),
                            Err(error) => self.warn("cannot watch the lease", &error),
                        },
                        () = sleep_until(decide_again_at.unwrap_or_else(Instant::now)), if decide_again_at.is_some() => {}
                    }
                }
            }
        }
    }

    async fn hold<F, W>(
        &self,
        api: &Api<Lease>,
        lease: Lease,
        began: Instant,
        shutdown: &CancellationToken,
        lead: &F,
    ) -> Result<(), LeaseError>
    where
        F: Fn(Leadership) -> W,
        W: Future<Output = ()> + Send + 'static,
    {
        let leadership = Leadership::new(WriteFence::until(began + self.timing.renew_deadline));
        tracing::info!(identity = self.identity, lease = self.name, "{}", message::ACQUIRED);
        self.metrics.set_leader(true);
        self.leader.set(Some(&self.identity));
        // Dropping this elector also aborts the work.
        let mut work = AbortOnDropHandle::new(tokio::spawn(lead(leadership.clone())));
        let mut held = HeldLease { lease, renewed: began };

        let stop_reason = self.renew_loop(api, &mut held, &leadership.fence, &mut work, shutdown).await;

        let why = match &stop_reason {
            StopReason::NotRenewed => Some("the lease was not renewed in time"),
            StopReason::Replaced(why) => Some(why.as_str()),
            StopReason::Shutdown | StopReason::WorkEnded => None,
        };
        if let Some(why) = why {
            tracing::warn!(identity = self.identity, lease = self.name, reason = why, "{}", message::LOST);
        }
        if !matches!(stop_reason, StopReason::Shutdown) {
            // After a signal this replica still holds the lease, so running reconciles may finish their writes.
            leadership.fence.close();
        }
        leadership.stop.cancel();
        self.metrics.set_leader(false);
        self.leader.set(None);
        let expires_at = held.renewed + self.timing.duration;
        let before_expiry = |margin: Duration| expires_at.checked_sub(margin).unwrap_or(expires_at);
        // Work that has not stopped by then is aborted at its next await.
        let abort_at = match stop_reason {
            StopReason::Shutdown => (Instant::now() + self.drain).min(before_expiry(STOP_MARGIN * 2)),
            StopReason::NotRenewed => before_expiry(STOP_MARGIN * 2),
            StopReason::Replaced(_) | StopReason::WorkEnded => Instant::now(),
        };
        let ended = matches!(stop_reason, StopReason::WorkEnded);
        let stopped = stop_work(work, ended, &leadership, abort_at, before_expiry(STOP_MARGIN)).await;
        leadership.fence.close();
        if !stopped {
            return Err(LeaseError::WorkStuck);
        }
        tracing::info!(identity = self.identity, lease = self.name, "{}", message::WORK_STOPPED);
        match stop_reason {
            StopReason::NotRenewed | StopReason::Replaced(_) => Ok(()),
            StopReason::Shutdown => {
                self.release(api, Some(held.lease), Instant::now() + RELEASE_TIMEOUT).await;
                Ok(())
            }
            StopReason::WorkEnded => {
                self.release(api, Some(held.lease), Instant::now() + RELEASE_TIMEOUT).await;
                Err(LeaseError::WorkEnded)
            }
        }
    }

    /// Renews the lease until there is a reason to stop.
    async fn renew_loop(
        &self,
        api: &Api<Lease>,
        held: &mut HeldLease,
        fence: &WriteFence,
        work: &mut AbortOnDropHandle<()>,
        shutdown: &CancellationToken,
    ) -> StopReason {
        let mut next = held.renewed + self.timing.retry_period;
        // A Lease that was changed or deleted is renewed again at once, but only once in a row: a server that keeps
        // contradicting itself must not cause a request storm.
        let mut retried_immediately = false;
        loop {
            let deadline = held.renewed + self.timing.renew_deadline;
            let renewal = async {
                sleep_until(next).await;
                let began = Instant::now();
                (began, self.renew(api, &held.lease, deadline).await)
            };
            let (began, renewal) = tokio::select! {
                biased;
                () = shutdown.cancelled() => return StopReason::Shutdown,
                _ = &mut *work => return StopReason::WorkEnded,
                () = sleep_until(deadline) => return StopReason::NotRenewed,
                done = renewal => done,
            };
            next = began + self.timing.retry_period;
            let retry_immediately = match renewal {
                Renewal::Renewed(lease) => {
                    *held = HeldLease { lease: *lease, renewed: began };
                    fence.extend(began + self.timing.renew_deadline);
                    false
                }
                Renewal::Changed(lease) => {
                    held.lease = *lease;
                    true
                }
                Renewal::Deleted => {
                    held.lease.metadata.resource_version = None;
                    true
                }
                Renewal::Lost(why) => return StopReason::Replaced(why),
                Renewal::Failed => false,
            };
            retried_immediately = retry_immediately && !retried_immediately;
            if retried_immediately {
                next = Instant::now();
            }
        }
    }

    /// Renews the lease once. If the Lease has changed, it reads the current one.
    async fn renew(&self, api: &Api<Lease>, lease: &Lease, deadline: Instant) -> Renewal {
        // The timeout ends at the deadline at the latest.
        let timeout = REQUEST_TIMEOUT.min(deadline.saturating_duration_since(Instant::now()));
        match self.write_holder(api, Some(lease), timeout).await {
            LeaseWriteResult::Done(lease) => return Renewal::Renewed(lease),
            LeaseWriteResult::Conflict | LeaseWriteResult::NotFound => {}
            LeaseWriteResult::Failed(error) => {
                self.warn("cannot renew the lease", &error);
                return Renewal::Failed;
            }
        }
        match self.read_lease(api).await {
            // The response to a renewal was lost, or another client changed a label. The holder is the same.
            Ok(Some(lease)) if holder(&lease) == Some(&self.identity) => Renewal::Changed(Box::new(lease)),
            Ok(Some(lease)) => Renewal::Lost(format!("the holder is now {:?}", holder(&lease).unwrap_or_default())),
            Ok(None) => Renewal::Deleted,
            Err(error) => {
                self.warn("cannot read the lease", &error);
                Renewal::Failed
            }
        }
    }

    /// Makes this replica the holder of `previous`, or creates the Lease if there is none. The resource version of
    /// `previous` is the precondition. A Lease without one is not stored on the server.
    #[expect(clippy::disallowed_methods, reason = "the times in the Lease are informative; no decision reads them")]
    async fn write_holder(&self, api: &Api<Lease>, previous: Option<&Lease>, timeout: Duration) -> LeaseWriteResult {
        let stored = previous.filter(|lease| lease.metadata.resource_version.is_some());
        let spec = Some(held_spec(&self.identity, stored, Timestamp::now(), &self.timing));
        let parameters = PostParams::default();
        let by = Instant::now() + timeout;
        let result = match stored {
            Some(lease) => {
                let lease = Lease { spec, ..lease.clone() };
                timeout_at(by, api.replace(&self.name, &parameters, &lease)).await
            }
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                timeout_at(by, api.create(&parameters, &Lease { metadata, spec })).await
            }
        };
        match result {
            Ok(Ok(lease)) => LeaseWriteResult::Done(Box::new(lease)),
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => LeaseWriteResult::Conflict,
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => LeaseWriteResult::NotFound,
            Ok(Err(error)) => LeaseWriteResult::Failed(error.to_string()),
            Err(_) => LeaseWriteResult::Failed(format!("no response within {timeout:?}")),
        }
    }

    async fn read_lease(&self, api: &Api<Lease>) -> Result<Option<Lease>, String> {
        match timeout_at(Instant::now() + REQUEST_TIMEOUT, api.get_opt(&self.name)).await {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no response within {REQUEST_TIMEOUT:?}")),
        }
    }

    /// Releases the lease if this replica holds it. If `lease` is unknown, it reads the Lease first.
    async fn release(&self, api: &Api<Lease>, lease: Option<Lease>, by: Instant) {
        match timeout_at(by, self.try_release(api, lease)).await {
            Ok(Ok(true)) => tracing::info!(identity = self.identity, lease = self.name, "{}", message::RELEASED),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => self.warn("cannot release the lease", &error),
            Err(_) => self.warn("cannot release the lease", "no response"),
        }
    }

    #[expect(clippy::disallowed_methods, reason = "the times in the Lease are informative; no decision reads them")]
    async fn try_release(&self, api: &Api<Lease>, mut last_read: Option<Lease>) -> Result<bool, String> {
        for _ in 0..2 {
            let lease = match last_read.take() {
                Some(lease) => lease,
                // The server may have stored a renewal whose response did not arrive.
                None => match self.read_lease(api).await? {
                    Some(live) if holder(&live) == Some(&self.identity) => live,
                    _ => return Ok(false),
                },
            };
            let lease = Lease { spec: Some(released_spec(&lease, Timestamp::now())), ..lease };
            match api.replace(&self.name, &PostParams::default(), &lease).await {
                Ok(_) => return Ok(true),
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(false)
    }

    fn warn(&self, what: &'static str, error: &str) {
        tracing::warn!(identity = self.identity, lease = self.name, error, "{what}");
    }
}

struct HeldLease {
    lease: Lease,
    /// When the last successful renewal began.
    renewed: Instant,
}

/// Aborts the work at `abort_at`. Returns whether it and every task that it tracks have ended by `deadline`.
async fn stop_work(
    mut work: AbortOnDropHandle<()>,
    ended: bool,
    leadership: &Leadership,
    abort_at: Instant,
    deadline: Instant,
) -> bool {
    if !ended && timeout_at(abort_at, &mut work).await.is_err() {
        work.abort();
    }
    // Only a task that blocks its thread is still running after this.
    let rest = async {
        if !work.is_finished() {
            let _ = work.await;
        }
        leadership.ended().await;
    };
    timeout_at(deadline.max(Instant::now() + Duration::from_millis(100)), rest).await.is_ok()
}

/// The changes of the Lease. After each error the watch pauses, while the caller's timers continue.
struct LeaseWatch {
    events: BoxStream<'static, Result<Event<Lease>, watcher::Error>>,
    lease_exists: bool,
    paused_until: Option<Instant>,
}

impl LeaseWatch {
    fn new(api: &Api<Lease>, name: &str) -> Self {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        Self { events: watcher(api.clone(), config).boxed(), lease_exists: false, paused_until: None }
    }

    /// Cancel safe: it returns every event that it takes from the stream.
    async fn next(&mut self, pause: Duration) -> Result<Option<Lease>, String> {
        if let Some(until) = self.paused_until {
            sleep_until(until).await;
            self.paused_until = None;
        }
        loop {
            match self.events.next().await {
                Some(Ok(Event::Init)) => self.lease_exists = false,
                Some(Ok(Event::InitApply(lease) | Event::Apply(lease))) => {
                    self.lease_exists = true;
                    return Ok(Some(lease));
                }
                Some(Ok(Event::InitDone)) if self.lease_exists => {}
                Some(Ok(Event::InitDone | Event::Delete(_))) => {
                    self.lease_exists = false;
                    return Ok(None);
                }
                Some(Err(error)) => {
                    self.paused_until = Some(Instant::now() + pause);
                    return Err(error.to_string());
                }
                // A watcher never ends.
                None => std::future::pending().await,
            }
        }
    }
}
