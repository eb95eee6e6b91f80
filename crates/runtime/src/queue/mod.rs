//! The work queue. It contains every key at most once and never gives one key to two workers. Namespaces take turns.
//! Within one, keys are served in the order in which they were enqueued. An object that its own writes enqueue waits
//! behind all waiting objects of its namespace.
//!
//! `state` contains the rules. This module adds the clock and the waiting workers.

mod state;
#[cfg(test)]
mod tests;

use std::{ops::Deref, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

pub use self::state::QueueKey;
use self::state::QueueState;

/// The delay before a key is requeued whose reconcile was dropped. The reason may still exist, so it is not zero.
const REQUEUE_DROPPED_AFTER: Duration = Duration::from_secs(1);

/// A handle to a queue. Clones share it.
pub struct Queue<K>(Arc<SharedQueue<K>>);

struct SharedQueue<K> {
    state: Mutex<QueueState<K>>,
    changed: Notify,
    window: Duration,
}

impl<K> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: QueueKey> Default for Queue<K> {
    fn default() -> Self {
        Self::new(Duration::ZERO)
    }
}

impl<K: QueueKey> Queue<K> {
    /// `window` is the delay of [`Self::add_coalesced`].
    pub fn new(window: Duration) -> Self {
        Self(Arc::new(SharedQueue { state: Mutex::new(QueueState::default()), changed: Notify::new(), window }))
    }

    /// How many keys of one tenant may run at the same time.
    pub(crate) fn limit_tenants(&self, limit: usize) {
        self.0.state.lock().limit_tenants(limit);
    }

    /// For a change that may concern the key. A key that failed waits for its retry first.
    pub fn add(&self, key: K) {
        self.0.state.lock().add(key, Instant::now());
        self.0.changed.notify_one();
    }

    /// For a change of the object itself: a user waits for the result, and the change may be the fix.
    pub fn add_urgent(&self, key: K) {
        self.0.state.lock().add_urgent(key, Instant::now());
        self.0.changed.notify_one();
    }

    /// Enqueues a running key after a delay. Until then only [`Self::add_urgent`] enqueues it.
    pub(crate) fn hold(&self, key: K, delay: Duration) {
        self.0.state.lock().hold(key, Instant::now() + delay);
        self.0.changed.notify_one();
    }

    /// Ends [`Self::hold`].
    pub(crate) fn release(&self, key: &K) {
        self.0.state.lock().release(key);
    }

    /// If the key is already delayed, the earlier time wins.
    pub(crate) fn add_after(&self, key: K, delay: Duration) {
        self.0.state.lock().add_at(key, Instant::now() + delay);
        self.0.changed.notify_one();
    }

    /// For changes that are not urgent and occur in bursts: one reconcile for all changes within the window.
    pub fn add_coalesced(&self, key: K) {
        if self.0.window.is_zero() {
            self.add(key);
        } else {
            self.add_after(key, self.0.window);
        }
    }

    /// The next key, which no other worker gets until the work item is dropped. Cancel safe.
    pub async fn next(&self) -> WorkItem<K> {
        loop {
            let due = {
                let mut state = self.0.state.lock();
                if let Some(key) = state.take(Instant::now()) {
                    if state.depth() > 0 || state.next_due().is_some() {
                        // Another worker takes the remaining keys and waits for the timers.
                        self.0.changed.notify_one();
                    }
                    let waited = state.waited(&key);
                    drop(state);
                    return WorkItem { queue: self.clone(), key, waited, finished: false };
                }
                state.next_due()
            };
            match due {
                Some(at) => tokio::select! {
                    () = self.0.changed.notified() => {}
                    () = sleep_until(at) => {}
                },
                None => self.0.changed.notified().await,
            }
        }
    }

    /// The number of keys that wait for a worker, without delayed ones.
    pub fn depth(&self) -> usize {
        self.0.state.lock().depth()
    }

    /// How many keys were enqueued since the last call.
    pub(crate) fn take_added(&self) -> u64 {
        self.0.state.lock().take_added()
    }
}

/// The right to work on a key. Dropping it before [`Self::done`] requeues the key, because the work did not end.
#[must_use = "dropping a work item requeues its key"]
pub struct WorkItem<K: QueueKey> {
    queue: Queue<K>,
    key: K,
    waited: Duration,
    finished: bool,
}

impl<K: QueueKey> WorkItem<K> {
    /// How long the key has waited for a worker.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// The reconcile of this key has ended.
    pub fn done(mut self) {
        self.finished = true;
    }
}

impl<K: QueueKey> Deref for WorkItem<K> {
    type Target = K;

    fn deref(&self) -> &K {
        &self.key
    }
}

impl<K: QueueKey> Drop for WorkItem<K> {
    fn drop(&mut self) {
        let (mut state, now) = (self.queue.0.state.lock(), Instant::now());
        if !self.finished {
            state.add_at(self.key.clone(), now + REQUEUE_DROPPED_AFTER);
        }
        state.done(&self.key, now);
        drop(state);
        self.queue.0.changed.notify_one();
    }
}
