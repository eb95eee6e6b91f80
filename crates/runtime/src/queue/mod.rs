//! Which object gets the next pass. Every key once, in the order in which keys became dirty, and never two workers on
//! one key: an object that wakes itself by its own writes goes behind all who wait.
//!
//! The rules are in `state`; here they get a clock and someone to wake.

mod state;
#[cfg(test)]
mod tests;

use std::{hash::Hash, ops::Deref, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use self::state::QueueState;

/// When a key whose pass was dropped half way is tried again. Not at once: what ended the pass may end the next one too.
const ABANDONED: Duration = Duration::from_secs(1);

/// A handle to a queue; clones share it.
pub struct Queue<K>(Arc<Shared<K>>);

struct Shared<K> {
    state: Mutex<QueueState<K>>,
    changed: Notify,
    window: Duration,
}

impl<K> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: Clone + Eq + Hash> Default for Queue<K> {
    fn default() -> Self {
        Self::new(Duration::ZERO)
    }
}

impl<K: Clone + Eq + Hash> Queue<K> {
    /// `window` is how long [`Self::add_coalesced`] lets news gather.
    pub fn new(window: Duration) -> Self {
        Self(Arc::new(Shared { state: Mutex::new(QueueState::default()), changed: Notify::new(), window }))
    }

    pub fn add(&self, key: K) {
        self.0.state.lock().add(key);
        self.0.changed.notify_one();
    }

    /// Sooner wins over an earlier wish.
    pub fn add_after(&self, key: K, delay: Duration) {
        self.0.state.lock().add_at(key, Instant::now() + delay);
        self.0.changed.notify_one();
    }

    /// For news that is not urgent and comes in bursts: one pass for all that comes within the window.
    pub fn add_coalesced(&self, key: K) {
        if self.0.window.is_zero() {
            self.add(key);
        } else {
            self.add_after(key, self.0.window);
        }
    }

    /// The next key, which nobody else gets until its turn ends. Safe to drop and call again.
    pub async fn next(&self) -> WorkItem<K> {
        loop {
            let due = {
                let mut state = self.0.state.lock();
                if let Some(key) = state.take(Instant::now()) {
                    if state.depth() > 0 || state.next_due().is_some() {
                        // Another waiter takes over what this one leaves, timers included.
                        self.0.changed.notify_one();
                    }
                    drop(state);
                    return WorkItem { queue: self.clone(), key, finished: false };
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

    /// Keys that wait for a worker now.
    pub fn depth(&self) -> usize {
        self.0.state.lock().depth()
    }
}

/// The right to work on a key. A turn that is dropped before [`Self::done`] did not get to its end: the key is wanted
/// again, whatever became of the one who had it.
#[must_use = "a key whose turn is dropped comes again"]
pub struct WorkItem<K: Clone + Eq + Hash> {
    queue: Queue<K>,
    key: K,
    finished: bool,
}

impl<K: Clone + Eq + Hash> WorkItem<K> {
    /// The pass over this key has ended.
    pub fn done(mut self) {
        self.finished = true;
    }
}

impl<K: Clone + Eq + Hash> Deref for WorkItem<K> {
    type Target = K;

    fn deref(&self) -> &K {
        &self.key
    }
}

impl<K: Clone + Eq + Hash> Drop for WorkItem<K> {
    fn drop(&mut self) {
        let mut state = self.queue.0.state.lock();
        if !self.finished {
            state.add_at(self.key.clone(), Instant::now() + ABANDONED);
        }
        state.done(&self.key);
        drop(state);
        self.queue.0.changed.notify_one();
    }
}
