//! Does what `decide` says: watches the lease as a standby, renews it as the holder, and sees to it that the holder's
//! work has ended before another can begin.

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

use super::{Action, Fence, Leadership, Sight, Timing, decide, held_by, held_by_nobody, holder, message};
use crate::metrics::Metrics;

/// A renewal that takes longer is given up, so that there is time for another before the deadline.
const CALL_LIMIT: Duration = Duration::from_secs(3);
/// A release is worth a short try, whatever it takes: without it others wait until the lease runs out.
const RELEASE_LIMIT: Duration = Duration::from_secs(1);
/// How long before another could begin it must be known whether our work has ended, so that the process can end if not.
const JUDGED_BEFORE: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    #[error("the leader's work did not stop in time; this process must end before another replica begins to work")]
    WorkStuck,
    #[error("the leader's work ended by itself")]
    WorkEnded,
}

pub struct Elector {
    pub client: Client,
    pub namespace: String,
    pub name: String,
    /// Unique to this process.
    pub identity: String,
    pub timing: Timing,
    /// How long the work may take to stop after a signal before it is dropped where it stands.
    pub drain: Duration,
    pub metrics: Arc<Metrics>,
}

/// Why the holder stopped.
enum End {
    Shutdown,
    Lost(String),
    WorkEnded,
}

/// What a request about the lease ended with, in the words that matter here.
enum Answer {
    Done(Box<Lease>),
    /// Somebody wrote the lease since we saw it, or made it before us.
    Conflict,
    Missing,
    Failed(String),
}

/// What became of a renewal.
enum Renewal {
    Renewed(Box<Lease>),
    /// Still ours, but not as we knew it: this is to be renewed.
    Ours(Box<Lease>),
    /// Somebody deleted it. Whoever makes it first holds it; until then nobody else does.
    Deleted,
    Lost(String),
    Failed,
}

impl Elector {
    /// Works through `lead` whenever this replica holds the lease, until `shutdown`; then gives the lease back.
    pub async fn run<F, W>(&self, shutdown: &CancellationToken, lead: F) -> Result<(), LeaseError>
    where
        F: Fn(Leadership) -> W,
        W: Future<Output = ()> + Send + 'static,
    {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.namespace);
        while let Some((lease, began)) = self.stand_by(&api, shutdown).await {
            self.hold(&api, lease, began, shutdown, &lead).await?;
        }
        Ok(())
    }

    /// Ends with the lease and the moment at which the request that took it began, or with nothing at shutdown.
    async fn stand_by(&self, api: &Api<Lease>, shutdown: &CancellationToken) -> Option<(Lease, Instant)> {
        let doubt = AtomicBool::new(false);
        let mut taking = Box::pin(self.take(api, &doubt));
        tokio::select! {
            biased;
            taken = &mut taking => return Some(taken),
            () = shutdown.cancelled() => {}
        }
        if doubt.load(Ordering::Relaxed) {
            // A request that is under way may be granted, and a lease that nobody knows he holds keeps all others out.
            let by = Instant::now() + RELEASE_LIMIT;
            match timeout_at(Instant::now() + RELEASE_LIMIT / 2, taking).await {
                Ok((lease, _)) => self.release(api, Some(lease), by).await,
                Err(_) => self.release(api, None, by).await,
            }
        }
        None
    }

    /// `doubt` is set while a request of ours may have taken the lease without our knowing.
    async fn take(&self, api: &Api<Lease>, doubt: &AtomicBool) -> (Lease, Instant) {
        let mut sight = Sight::default();
        let mut watch = LeaseWatch::new(api, &self.name);
        let mut not_before = Instant::now();
        loop {
            let now = Instant::now();
            match decide(&sight, now, &self.identity) {
                Action::Create | Action::Take if now >= not_before => {
                    doubt.store(true, Ordering::Relaxed);
                    let answer = self.attempt(api, sight.lease(), CALL_LIMIT).await;
                    doubt.store(matches!(answer, Answer::Failed(_)), Ordering::Relaxed);
                    match answer {
                        Answer::Done(lease) => return (*lease, now),
                        // Our view was old. The watch will tell in time, unless it is what is stuck.
                        Answer::Conflict => match self.read(api).await {
                            Ok(lease) => sight.see(lease, Instant::now(), &self.timing),
                            Err(error) => self.warn("the lease could not be read", &error),
                        },
                        Answer::Missing => self.warn("the lease could not be taken", "its namespace does not exist"),
                        Answer::Failed(error) => self.warn("the lease could not be taken", &error),
                    }
                    not_before = Instant::now() + self.timing.retry_period;
                }
                action => {
                    let wake = match action {
                        Action::Look => None,
                        Action::Wait(until) => Some(until.max(not_before)),
                        Action::Create | Action::Take => Some(not_before),
                    };
                    tokio::select! {
                        seen = watch.next(self.timing.retry_period) => match seen {
                            Ok(lease) => sight.see(lease, Instant::now(), &self.timing),
                            Err(error) => self.warn("the lease cannot be watched", &error),
                        },
                        () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
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
        let leadership = Leadership::new(Fence::until(began + self.timing.renew_deadline));
        tracing::info!(identity = self.identity, lease = self.name, "{}", message::ACQUIRED);
        self.metrics.set_leader(true);
        // Whoever drops this elector drops the work with it.
        let mut work = AbortOnDropHandle::new(tokio::spawn(lead(leadership.clone())));
        let mut held = Held { lease, renewed: began };

        let end = self.keep(api, &mut held, &leadership.fence, &mut work, shutdown).await;

        if let End::Lost(why) = &end {
            tracing::warn!(identity = self.identity, lease = self.name, reason = why, "{}", message::LOST);
        }
        if !matches!(end, End::Shutdown) {
            // After a signal the lease still keeps others out, and what was begun may be written to its end.
            leadership.fence.close();
        }
        leadership.stop.cancel();
        self.metrics.set_leader(false);
        let runs_out = held.renewed + self.timing.duration;
        let before = |margin: Duration| runs_out.checked_sub(margin).unwrap_or(runs_out);
        // What has not stopped by itself by then is dropped at its next await.
        let patience = match end {
            End::Shutdown => (Instant::now() + self.drain).min(before(JUDGED_BEFORE * 2)),
            End::Lost(_) => before(JUDGED_BEFORE * 2),
            End::WorkEnded => Instant::now(),
        };
        let ended = matches!(end, End::WorkEnded);
        let stopped = stop_work(work, ended, &leadership, patience, before(JUDGED_BEFORE)).await;
        leadership.fence.close();
        if !stopped {
            return Err(LeaseError::WorkStuck);
        }
        tracing::info!(identity = self.identity, lease = self.name, "{}", message::WORK_STOPPED);
        match end {
            End::Lost(_) => Ok(()),
            End::Shutdown => {
                self.release(api, Some(held.lease), Instant::now() + RELEASE_LIMIT).await;
                Ok(())
            }
            End::WorkEnded => {
                self.release(api, Some(held.lease), Instant::now() + RELEASE_LIMIT).await;
                Err(LeaseError::WorkEnded)
            }
        }
    }

    /// Renews until there is a reason to stop.
    async fn keep(
        &self,
        api: &Api<Lease>,
        held: &mut Held,
        fence: &Fence,
        work: &mut AbortOnDropHandle<()>,
        shutdown: &CancellationToken,
    ) -> End {
        let mut next = held.renewed + self.timing.retry_period;
        // What we learn is acted on at once, but only once in a row: a server that contradicts itself is not stormed.
        let mut hurried = false;
        loop {
            let deadline = held.renewed + self.timing.renew_deadline;
            let renewal = async {
                sleep_until(next).await;
                let began = Instant::now();
                (began, self.renew(api, &held.lease, deadline).await)
            };
            let (began, renewal) = tokio::select! {
                biased;
                () = shutdown.cancelled() => return End::Shutdown,
                _ = &mut *work => return End::WorkEnded,
                () = sleep_until(deadline) => return End::Lost("the lease could not be renewed in time".to_owned()),
                done = renewal => done,
            };
            next = began + self.timing.retry_period;
            let hurry = match renewal {
                Renewal::Renewed(lease) => {
                    *held = Held { lease: *lease, renewed: began };
                    fence.extend(began + self.timing.renew_deadline);
                    false
                }
                Renewal::Ours(lease) => {
                    held.lease = *lease;
                    true
                }
                Renewal::Deleted => {
                    held.lease.metadata.resource_version = None;
                    true
                }
                Renewal::Lost(why) => return End::Lost(why),
                Renewal::Failed => false,
            };
            hurried = hurry && !hurried;
            if hurried {
                next = Instant::now();
            }
        }
    }

    /// One renewal, and if the lease is not as we knew it, what it is now.
    async fn renew(&self, api: &Api<Lease>, lease: &Lease, deadline: Instant) -> Renewal {
        // The limit of a call never reaches past the deadline: a request that hangs cannot outlive it.
        let limit = CALL_LIMIT.min(deadline.saturating_duration_since(Instant::now()));
        match self.attempt(api, Some(lease), limit).await {
            Answer::Done(lease) => return Renewal::Renewed(lease),
            Answer::Conflict | Answer::Missing => {}
            Answer::Failed(error) => {
                self.warn("the lease could not be renewed", &error);
                return Renewal::Failed;
            }
        }
        match self.read(api).await {
            // A renewal whose answer was lost, or somebody's label: still ours.
            Ok(Some(lease)) if holder(&lease) == Some(&self.identity) => Renewal::Ours(Box::new(lease)),
            Ok(Some(lease)) => Renewal::Lost(format!("it is held by {:?} now", holder(&lease).unwrap_or_default())),
            Ok(None) => Renewal::Deleted,
            Err(error) => {
                self.warn("the lease could not be read", &error);
                Renewal::Failed
            }
        }
    }

    /// Writes ourselves into `previous`, or makes the lease when there is none. The resource version in it is the
    /// precondition; a lease without one has never been stored.
    async fn attempt(&self, api: &Api<Lease>, previous: Option<&Lease>, limit: Duration) -> Answer {
        let stored = previous.filter(|lease| lease.metadata.resource_version.is_some());
        let spec = Some(held_by(&self.identity, stored, Timestamp::now(), &self.timing));
        let parameters = PostParams::default();
        let by = Instant::now() + limit;
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
            Ok(Ok(lease)) => Answer::Done(Box::new(lease)),
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => Answer::Conflict,
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Answer::Missing,
            Ok(Err(error)) => Answer::Failed(error.to_string()),
            Err(_) => Answer::Failed(format!("no answer within {limit:?}")),
        }
    }

    async fn read(&self, api: &Api<Lease>) -> Result<Option<Lease>, String> {
        match timeout_at(Instant::now() + CALL_LIMIT, api.get_opt(&self.name)).await {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no answer within {CALL_LIMIT:?}")),
        }
    }

    /// Gives the lease back, if it is ours. Nothing is known of a lease whose taking was not answered: it is read.
    async fn release(&self, api: &Api<Lease>, lease: Option<Lease>, by: Instant) {
        match timeout_at(by, self.try_release(api, lease)).await {
            Ok(Ok(true)) => tracing::info!(identity = self.identity, lease = self.name, "{}", message::RELEASED),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => self.warn("the lease could not be released", &error),
            Err(_) => self.warn("the lease could not be released", "no answer"),
        }
    }

    async fn try_release(&self, api: &Api<Lease>, mut known: Option<Lease>) -> Result<bool, String> {
        for _ in 0..2 {
            let lease = match known.take() {
                Some(lease) => lease,
                // A renewal that was under way may have been stored after all.
                None => match self.read(api).await? {
                    Some(live) if holder(&live) == Some(&self.identity) => live,
                    _ => return Ok(false),
                },
            };
            let lease = Lease { spec: Some(held_by_nobody(&lease, Timestamp::now())), ..lease };
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

struct Held {
    lease: Lease,
    /// When the request began that last wrote us into the lease.
    renewed: Instant,
}

/// Whether the work, and every task that it began, has ended by `judged`. From `patience` on it is not asked any more.
async fn stop_work(
    mut work: AbortOnDropHandle<()>,
    ended: bool,
    leadership: &Leadership,
    patience: Instant,
    judged: Instant,
) -> bool {
    if !ended && timeout_at(patience, &mut work).await.is_err() {
        work.abort();
    }
    // Only work that blocks its thread is still there after this.
    let rest = async {
        if !work.is_finished() {
            let _ = work.await;
        }
        leadership.ended().await;
    };
    timeout_at(judged.max(Instant::now() + Duration::from_millis(100)), rest).await.is_ok()
}

/// The lease as it changes. Errors are told once each and followed by a pause, in which the caller's timers go on.
struct LeaseWatch {
    events: BoxStream<'static, Result<Event<Lease>, watcher::Error>>,
    found: bool,
    paused_until: Option<Instant>,
}

impl LeaseWatch {
    fn new(api: &Api<Lease>, name: &str) -> Self {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        Self { events: watcher(api.clone(), config).boxed(), found: false, paused_until: None }
    }

    /// Safe to drop and call again: nothing is taken from the stream that is not returned.
    async fn next(&mut self, pause: Duration) -> Result<Option<Lease>, String> {
        if let Some(until) = self.paused_until {
            sleep_until(until).await;
            self.paused_until = None;
        }
        loop {
            match self.events.next().await {
                Some(Ok(Event::Init)) => self.found = false,
                Some(Ok(Event::InitApply(lease) | Event::Apply(lease))) => {
                    self.found = true;
                    return Ok(Some(lease));
                }
                Some(Ok(Event::InitDone)) if self.found => {}
                Some(Ok(Event::InitDone | Event::Delete(_))) => {
                    self.found = false;
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
