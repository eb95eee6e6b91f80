//! The queue as a state machine without a clock. It contains every rule of fairness, and tests can replay it.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    hash::Hash,
    time::Duration,
};

use tokio::time::Instant;
use vitivirt_api::ObjectKey;

/// A key of a queue. Tenants take turns, so that one with thousands of keys does not make the others wait.
pub trait QueueKey: Clone + Eq + Hash {
    fn tenant(&self) -> &str;
}

/// The tenant is the namespace.
impl QueueKey for ObjectKey {
    fn tenant(&self) -> &str {
        self.namespace().unwrap_or_default()
    }
}

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

/// The keys of one tenant that wait or run.
#[derive(Debug)]
struct Tenant<K> {
    ready: VecDeque<K>,
    running: usize,
    /// Whether it is in `turns`.
    has_turn: bool,
}

/// A key has at most one state, and at most one timer in addition.
#[derive(Debug)]
pub(super) struct QueueState<K> {
    tenants: HashMap<Box<str>, Tenant<K>>,
    /// The tenants that a worker may serve, in the order of their turns.
    turns: VecDeque<Box<str>>,
    depth: usize,
    /// How many keys of one tenant may run at the same time.
    tenant_limit: usize,
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
            tenants: HashMap::new(),
            turns: VecDeque::new(),
            depth: 0,
            tenant_limit: usize::MAX,
            states: HashMap::new(),
            timers: BTreeMap::new(),
            due: HashMap::new(),
            held: HashMap::new(),
            serial: 0,
            added: 0,
        }
    }
}

impl<K: QueueKey> QueueState<K> {
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
        let name = key.tenant().to_owned();
        let tenant = self.tenants.entry(name.as_str().into()).or_insert_with(|| Tenant {
            ready: VecDeque::new(),
            running: 0,
            has_turn: false,
        });
        tenant.ready.push_back(key);
        self.depth += 1;
        self.added += 1;
        self.give_turn(&name);
    }

    /// Puts a tenant behind the others that wait, if a worker may serve it.
    fn give_turn(&mut self, name: &str) {
        let limit = self.tenant_limit;
        let tenant = self.tenants.get_mut(name);
        if let Some(tenant) =
            tenant.filter(|tenant| !tenant.has_turn && !tenant.ready.is_empty() && tenant.running < limit)
        {
            tenant.has_turn = true;
            self.turns.push_back(name.into());
        }
    }

    /// The next key of the tenant whose turn it is.
    fn take_turn(&mut self) -> Option<K> {
        let name = self.turns.pop_front()?;
        let tenant = self.tenants.get_mut(&name)?;
        tenant.has_turn = false;
        let key = tenant.ready.pop_front()?;
        tenant.running += 1;
        self.depth -= 1;
        self.give_turn(&name);
        Some(key)
    }

    pub(super) fn limit_tenants(&mut self, limit: usize) {
        self.tenant_limit = limit.max(1);
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
        let key = self.take_turn()?;
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
        if let Some(tenant) = self.tenants.get_mut(key.tenant()) {
            tenant.running = tenant.running.saturating_sub(1);
            if tenant.running == 0 && tenant.ready.is_empty() {
                self.tenants.remove(key.tenant());
            }
        }
        self.give_turn(key.tenant());
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
        self.depth
    }
}
