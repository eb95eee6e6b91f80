//! The queue as a state machine without a clock. It contains every rule of fairness, and tests can replay it.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    hash::Hash,
    time::Duration,
};

use tokio::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyState {
    Queued { since: Instant },
    Running { requeue: Requeue, waited: Duration },
}

/// What was added while the key was running.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Requeue {
    No,
    WhenReleased,
    AtOnce,
}

/// A key has at most one state, and at most one timer in addition.
#[derive(Debug)]
pub(super) struct QueueState<K> {
    ready: VecDeque<K>,
    states: HashMap<K, KeyState>,
    timers: BTreeMap<(Instant, u64), K>,
    due: HashMap<K, (Instant, u64)>,
    /// Keys that failed: only an urgent change enqueues them before this time.
    held: HashMap<K, Instant>,
    /// Orders timers with the same time by when they were set.
    serial: u64,
    /// How many keys were enqueued since the last [`Self::take_added`].
    added: u64,
}

impl<K> Default for QueueState<K> {
    fn default() -> Self {
        Self {
            ready: VecDeque::new(),
            states: HashMap::new(),
            timers: BTreeMap::new(),
            due: HashMap::new(),
            held: HashMap::new(),
            serial: 0,
            added: 0,
        }
    }
}

impl<K: Clone + Eq + Hash> QueueState<K> {
    /// Enqueues a key, or sets its timer if it is held. A running key is enqueued when it is done, behind the waiting
    /// ones.
    pub(super) fn add(&mut self, key: K, now: Instant) {
        let held = self.held.get(&key).copied().filter(|until| *until > now);
        match (self.states.get_mut(&key), held) {
            (Some(KeyState::Queued { .. }), _) => {}
            (Some(KeyState::Running { requeue, .. }), _) => *requeue = (*requeue).max(Requeue::WhenReleased),
            (None, Some(until)) => self.add_at(key, until),
            (None, None) => self.enqueue(key, now),
        }
    }

    /// Enqueues a key, even if it is held.
    pub(super) fn add_urgent(&mut self, key: K, now: Instant) {
        match self.states.get_mut(&key) {
            Some(KeyState::Queued { .. }) => {}
            Some(KeyState::Running { requeue, .. }) => *requeue = Requeue::AtOnce,
            None => self.enqueue(key, now),
        }
    }

    fn enqueue(&mut self, key: K, now: Instant) {
        self.states.insert(key.clone(), KeyState::Queued { since: now });
        self.ready.push_back(key);
        self.added += 1;
    }

    /// Enqueues a key at a time, and not before it is released. The earlier one of two times counts.
    pub(super) fn add_at(&mut self, key: K, at: Instant) {
        if matches!(self.states.get(&key), Some(KeyState::Queued { .. })) {
            return;
        }
        let at = self.held.get(&key).map_or(at, |until| at.max(*until));
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

    /// Holds a running key back until a time, at which it is enqueued.
    pub(super) fn hold(&mut self, key: K, until: Instant) {
        if let Some(timer) = self.due.remove(&key) {
            self.timers.remove(&timer);
        }
        self.held.insert(key.clone(), until);
        self.add_at(key, until);
    }

    pub(super) fn release(&mut self, key: &K) {
        self.held.remove(key);
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
            self.add(key, now);
        }
        let key = self.ready.pop_front()?;
        let waited = match self.states.get(&key) {
            Some(KeyState::Queued { since }) => now - *since,
            _ => Duration::ZERO,
        };
        self.states.insert(key.clone(), KeyState::Running { requeue: Requeue::No, waited });
        if let Some(timer) = self.due.remove(&key) {
            self.timers.remove(&timer);
        }
        Some(key)
    }

    pub(super) fn done(&mut self, key: &K, now: Instant) {
        match self.states.remove(key) {
            Some(KeyState::Running { requeue: Requeue::WhenReleased, .. }) => self.add(key.clone(), now),
            Some(KeyState::Running { requeue: Requeue::AtOnce, .. }) => self.add_urgent(key.clone(), now),
            _ => {}
        }
    }

    /// How long a running key has waited for a worker.
    pub(super) fn waited(&self, key: &K) -> Duration {
        match self.states.get(key) {
            Some(KeyState::Running { waited, .. }) => *waited,
            _ => Duration::ZERO,
        }
    }

    /// How many keys were enqueued since the last call.
    pub(super) fn take_added(&mut self) -> u64 {
        std::mem::take(&mut self.added)
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
