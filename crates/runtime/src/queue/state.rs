//! The queue as a state machine without a clock. It contains every rule of fairness, and tests can replay it.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    hash::Hash,
};

use tokio::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyState {
    Queued,
    Running { requeue: bool },
}

/// A key has at most one state, and at most one timer in addition.
#[derive(Debug)]
pub(super) struct QueueState<K> {
    ready: VecDeque<K>,
    states: HashMap<K, KeyState>,
    timers: BTreeMap<(Instant, u64), K>,
    due: HashMap<K, (Instant, u64)>,
    /// Orders timers with the same time by when they were set.
    serial: u64,
}

impl<K> Default for QueueState<K> {
    fn default() -> Self {
        Self { ready: VecDeque::new(), states: HashMap::new(), timers: BTreeMap::new(), due: HashMap::new(), serial: 0 }
    }
}

impl<K: Clone + Eq + Hash> QueueState<K> {
    /// Enqueues a key. A running key is enqueued when it is done, behind the waiting ones.
    pub(super) fn add(&mut self, key: K) {
        match self.states.get_mut(&key) {
            Some(KeyState::Queued) => {}
            Some(KeyState::Running { requeue }) => *requeue = true,
            None => {
                self.states.insert(key.clone(), KeyState::Queued);
                self.ready.push_back(key);
            }
        }
    }

    /// Enqueues a key at a time. The earlier one of two times counts.
    pub(super) fn add_at(&mut self, key: K, at: Instant) {
        if self.states.get(&key) == Some(&KeyState::Queued) {
            return;
        }
        if let Some(timer) = self.due.get(&key) {
            if timer.0 <= at {
                return;
            }
            self.timers.remove(timer);
        }
        let timer = (at, self.serial);
        self.serial += 1;
        self.due.insert(key.clone(), timer);
        self.timers.insert(timer, key);
    }

    /// The next key, which is running from now until `done`. This removes its timer: the reconcile sees every change so
    /// far, and itself asks for the next one.
    pub(super) fn take(&mut self, now: Instant) -> Option<K> {
        while let Some(entry) = self.timers.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let key = entry.remove();
            self.due.remove(&key);
            self.add(key);
        }
        let key = self.ready.pop_front()?;
        self.states.insert(key.clone(), KeyState::Running { requeue: false });
        if let Some(timer) = self.due.remove(&key) {
            self.timers.remove(&timer);
        }
        Some(key)
    }

    pub(super) fn done(&mut self, key: &K) {
        if self.states.remove(key) == Some(KeyState::Running { requeue: true }) {
            self.add(key.clone());
        }
    }

    /// When the next timer is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.timers.first_key_value().map(|((at, _), _)| *at)
    }

    /// The number of keys that wait for a worker, without those that wait for a timer.
    pub(super) fn depth(&self) -> usize {
        self.ready.len()
    }
}
