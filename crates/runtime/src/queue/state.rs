//! The queue as a state machine without a clock of its own: every rule of fairness is here and can be replayed.

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

/// A key is in at most one place, and has at most one timer beside it.
#[derive(Debug)]
pub(super) struct QueueState<K> {
    ready: VecDeque<K>,
    states: HashMap<K, KeyState>,
    timers: BTreeMap<(Instant, u64), K>,
    due: HashMap<K, (Instant, u64)>,
    /// Tells timers of the same moment apart, in the order in which they were set.
    serial: u64,
}

impl<K> Default for QueueState<K> {
    fn default() -> Self {
        Self { ready: VecDeque::new(), states: HashMap::new(), timers: BTreeMap::new(), due: HashMap::new(), serial: 0 }
    }
}

impl<K: Clone + Eq + Hash> QueueState<K> {
    /// The key wants a pass. A key that is being worked on gets its turn after those that wait already.
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

    /// The key wants a pass at that time. Of two times the sooner one counts.
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

    /// The key whose turn it is, which is being worked on from now until `done`. Its timer has served its purpose:
    /// the pass sees what there is to see and says itself when it wants the next.
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

    /// Keys that wait for a worker, those whose time has not come aside.
    pub(super) fn depth(&self) -> usize {
        self.ready.len()
    }
}
