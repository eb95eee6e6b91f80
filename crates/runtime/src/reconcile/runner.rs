//! Takes keys from the queue and reconciles them: several at once, and never two for one key.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use tokio::{
    task::{self, JoinError, JoinSet},
    time::{Instant, sleep_until},
};
use tracing::Instrument;
use vitivirt_api::{ErrorClass, ObjectKey};

use super::{Controller, Executor, ReconcileResult, Retry, message, min_delay, reconcile, retry::RetryState};
use crate::{
    events::Recorder,
    health::Health,
    lease::Leadership,
    metrics::{Metrics, QueueMetrics, Work},
    program::Context,
    queue::{Queue, WorkItem},
};

/// How many reconciles may be slow at the same time, for each worker.
const SLOW_PER_WORKER: usize = 9;
/// How many reconciles of one namespace may run at the same time, for each worker.
const TENANT_PER_WORKER: usize = 2;

/// The shortest time before a resync, as a part of the interval: for the objects that a new leader reconciles within the
/// first such time, and for others.
const FIRST_RESYNC: f64 = 0.05;
const LATER_RESYNC: f64 = 0.8;

#[derive(Clone, Copy, Debug)]
pub struct RunnerOptions {
    /// Reconciles that run at the same time, without slow ones.
    pub workers: usize,
    pub reconcile_deadline: Duration,
    /// The longest time between two reconciles of an object that is up to date. Such a reconcile compares caches and
    /// sends no request.
    pub resync: Option<Duration>,
    /// A reconcile that takes longer than this is slow: it waits for a server, and another one takes its place. So a
    /// webhook that does not respond in one namespace does not stop the others.
    pub slow_after: Option<Duration>,
}

impl Default for RunnerOptions {
    fn default() -> Self {
        Self { workers: 5, reconcile_deadline: Duration::from_secs(60), resync: None, slow_after: None }
    }
}

pub struct Runner<C> {
    pub controller: Arc<C>,
    pub queue: Queue<ObjectKey>,
    pub executor: Arc<Executor>,
    pub events: Recorder,
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
    pub options: RunnerOptions,
}

impl<C> Runner<C> {
    /// A runner of the operator that `context` belongs to.
    pub fn new(
        context: &Context,
        controller: Arc<C>,
        queue: Queue<ObjectKey>,
        executor: Arc<Executor>,
        options: RunnerOptions,
    ) -> Self {
        Self {
            controller,
            queue,
            executor,
            events: context.events.clone(),
            metrics: context.metrics.clone(),
            health: context.health.clone(),
            options,
        }
    }
}

impl<C: Controller> Runner<C> {
    /// Works until the leadership ends, and then until all running reconciles have ended. Dropping the future drops
    /// them at their next await. The leadership tracks when they have ended, and the queue requeues their keys.
    pub async fn run(&self, leadership: Leadership) {
        let metrics = self.metrics.queue(C::NAME, C::QUEUE);
        let began = Instant::now();
        let mut failures: HashMap<ObjectKey, RetryState> = HashMap::new();
        #[expect(clippy::disallowed_methods, reason = "the jitter of retries is random")]
        let mut jitter = SmallRng::from_os_rng();
        let mut reconciles = JoinSet::new();
        let workers = self.options.workers.max(1);
        if self.options.slow_after.is_some() {
            self.queue.limit_tenants(workers * TENANT_PER_WORKER);
        }
        // When each running reconcile becomes slow, the earliest first. One that has ended may still be in it.
        let mut slow_at: VecDeque<(task::Id, Instant)> = VecDeque::new();
        let mut fast: HashSet<task::Id> = HashSet::new();
        loop {
            metrics.observe_queue(self.queue.depth(), self.queue.take_added());
            while let Some((id, at)) = slow_at.front().copied()
                && (at <= Instant::now() || !fast.contains(&id))
            {
                slow_at.pop_front();
                fast.remove(&id);
            }
            let next_slow = slow_at.front().map(|(_, at)| *at);
            let may_start = fast.len() < workers && reconciles.len() < workers * (1 + SLOW_PER_WORKER);
            tokio::select! {
                biased;
                () = leadership.stop.cancelled() => break,
                Some(done) = reconciles.join_next_with_id(), if !reconciles.is_empty() => {
                    fast.remove(&done.as_ref().map_or_else(JoinError::id, |(id, _)| *id));
                    self.finish(done.map(|(_, done)| done), &mut failures, &mut jitter, &metrics, began);
                }
                item = self.queue.next(), if may_start => {
                    let work = metrics.start(item.waited());
                    let reconcile = leadership.track(self.reconcile_item(item, &leadership, work));
                    let id = reconciles.spawn(reconcile).id();
                    fast.insert(id);
                    slow_at.extend(self.options.slow_after.map(|after| (id, Instant::now() + after)));
                }
                () = sleep_until(next_slow.unwrap_or_else(Instant::now)), if !may_start && next_slow.is_some() => {}
            }
        }
        while let Some(done) = reconciles.join_next().await {
            self.finish(done, &mut failures, &mut jitter, &metrics, began);
        }
        // A replica on standby has no queue.
        metrics.observe_queue(0, 0);
    }

    fn reconcile_item(
        &self,
        item: WorkItem<ObjectKey>,
        leadership: &Leadership,
        work: Option<Work>,
    ) -> impl Future<Output = (WorkItem<ObjectKey>, ReconcileResult)> + Send + use<C> {
        let (controller, executor) = (self.controller.clone(), self.executor.clone());
        let (events, metrics) = (self.events.clone(), self.metrics.clone());
        let in_flight = self.health.track_reconcile(C::NAME, self.options.reconcile_deadline);
        let (deadline, fence) = (self.options.reconcile_deadline, leadership.fence.clone());
        let span = self.controller.span(&item);
        async move {
            let begin = Instant::now();
            let result = reconcile(&*controller, &item, &executor, &events, &fence, deadline).await;
            drop((in_flight, work));
            let class = result.failure().map(|failure| failure.class);
            metrics.observe_reconcile(C::NAME, begin.elapsed().as_secs_f64(), result.error_type(), class);
            log_failure(&result);
            (item, result)
        }
        .instrument(span)
    }

    fn finish(
        &self,
        done: Result<(WorkItem<ObjectKey>, ReconcileResult), JoinError>,
        failures: &mut HashMap<ObjectKey, RetryState>,
        jitter: &mut impl Rng,
        metrics: &QueueMetrics,
        began: Instant,
    ) {
        // `reconcile` catches panics. After a panic outside of it the work item was dropped, which requeues the key.
        let Ok((item, result)) = done else { return };
        let resync = self.options.resync.map(|every| {
            // At the start all objects are reconciled at once. Their first resyncs are spread, and stay so.
            let is_first = began.elapsed() < every.mul_f64(FIRST_RESYNC);
            let shortest = if is_first { FIRST_RESYNC } else { LATER_RESYNC };
            every.mul_f64(jitter.random_range(shortest..=1.0))
        });
        if result.failure().is_some() {
            metrics.count_retry();
        }
        let (requeue_after, hold) = match result {
            ReconcileResult::Succeeded { requeue_after, .. } => {
                failures.remove(&*item);
                (min_delay(requeue_after, resync), false)
            }
            // The executor holds the write back. Events may start a reconcile before: it sends the other writes.
            ReconcileResult::Failed { retry: Retry::Write { after, .. }, .. } => {
                failures.remove(&*item);
                (Some(after), false)
            }
            ReconcileResult::Failed { mut failure, retry: Retry::Backoff, .. } => {
                let now = Instant::now();
                let mut state = RetryState::after_failure(failures.get(&*item), &mut failure, now, jitter);
                // Only a change can fix an invalid object, so it is reconciled as often as one that is up to date.
                if let (ErrorClass::Invalid, Some(resync)) = (failure.class, resync) {
                    state.limit(resync);
                }
                let delay = state.not_before() - now;
                failures.insert(item.clone(), state);
                // The event that a conflict missed ends the conflict.
                (Some(delay), failure.class != ErrorClass::Conflict)
            }
        };
        match requeue_after {
            Some(delay) if hold => self.queue.hold(item.clone(), delay),
            requeue_after => {
                self.queue.release(&item);
                if let Some(delay) = requeue_after {
                    self.queue.add_after(item.clone(), delay);
                }
            }
        }
        item.done();
    }
}

fn log_failure(result: &ReconcileResult) {
    let ReconcileResult::Failed { failure, retry, .. } = result else { return };
    let (class, reason, error) = (failure.class.as_str(), failure.reason, &failure.message);
    match failure.class {
        // An earlier reconcile has logged it.
        _ if matches!(retry, Retry::Write { sent: false, .. }) => {
            tracing::debug!(class, reason, error, "{}", message::HELD);
        }
        // Conflicts are normal when several clients write the same object.
        ErrorClass::Conflict => tracing::debug!(class, reason, error, "{}", message::FAILED),
        ErrorClass::Bug => tracing::error!(class, reason, error, "{}", message::FAILED),
        _ => tracing::warn!(class, reason, error, "{}", message::FAILED),
    }
}
