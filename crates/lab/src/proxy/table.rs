//! The rules in force, and the watches that are open. One lock holds both, so a watch is counted exactly once by every
//! rule: either when it is admitted, or when a rule is added while it is open.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use anyhow::ensure;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    request::RequestVerb,
    rule::{Caller, ProxyFault, ProxyRule},
};

/// A rule that was added, with its counter. What it strikes keeps it alive, beyond its removal if need be.
pub(super) struct ActiveRule {
    rule: ProxyRule,
    hits: watch::Sender<u64>,
    pub(super) removed: CancellationToken,
}

impl ActiveRule {
    pub(super) fn fault(&self) -> &ProxyFault {
        &self.rule.fault
    }

    /// Called when the fault takes effect, which for some is long after the request was admitted.
    pub(super) fn hit(&self) {
        self.hits.send_modify(|hits| *hits += 1);
    }
}

struct RuleEntry {
    rule: Arc<ActiveRule>,
    /// Requests that the rule has meant so far, whether or not it struck them.
    count: u64,
}

impl RuleEntry {
    fn strikes(&mut self, caller: &Caller) -> bool {
        let ProxyRule { matcher, when, fault } = &self.rule.rule;
        if !fault.fits(caller.info.verb) || !matcher.accepts(caller) {
            return false;
        }
        self.count += 1;
        when.strikes(self.count)
    }
}

/// The rule that an open watch obeys. It changes while the watch is open.
type WatchRule = Option<Arc<ActiveRule>>;

struct OpenWatch {
    caller: Arc<Caller>,
    order: watch::Sender<WatchRule>,
}

#[derive(Default)]
struct TableState {
    rules: Vec<RuleEntry>,
    /// By the order in which they were opened.
    watches: BTreeMap<u64, OpenWatch>,
    watches_opened: u64,
}

#[derive(Default)]
pub(super) struct RuleTable {
    state: Mutex<TableState>,
}

/// What a request has to expect.
pub(super) struct Admission {
    /// The rule that strikes the request itself.
    pub(super) rule: Option<Arc<ActiveRule>>,
    /// Present for every watch, struck or not: a rule may strike it later.
    pub(super) watch: Option<WatchRegistration>,
}

/// An open watch's place in the table; given up when dropped.
pub(super) struct WatchRegistration {
    id: u64,
    table: Arc<RuleTable>,
    pub(super) order: watch::Receiver<WatchRule>,
}

impl Drop for WatchRegistration {
    fn drop(&mut self) {
        self.table.state.lock().watches.remove(&self.id);
    }
}

impl RuleTable {
    pub(super) fn add(self: &Arc<Self>, rule: ProxyRule) -> RuleHandle {
        let rule = Arc::new(ActiveRule { rule, hits: watch::Sender::new(0), removed: CancellationToken::new() });
        let mut entry = RuleEntry { rule: Arc::clone(&rule), count: 0 };
        let mut state = self.state.lock();
        if rule.fault().watch_events().is_some() {
            for open in state.watches.values() {
                // The newest order holds, so that a stalled watch can be cut in the end, as real ones are.
                if entry.strikes(&open.caller) {
                    open.order.send_replace(Some(Arc::clone(&rule)));
                }
            }
        }
        state.rules.push(entry);
        drop(state);
        RuleHandle { rule, table: Arc::downgrade(self) }
    }

    /// Every rule that means the request counts it; the first that strikes has it.
    pub(super) fn admit(self: &Arc<Self>, caller: &Arc<Caller>) -> Admission {
        let mut state = self.state.lock();
        let mut struck = None;
        for entry in &mut state.rules {
            if entry.strikes(caller) && struck.is_none() {
                struck = Some(Arc::clone(&entry.rule));
            }
        }
        if caller.info.verb != RequestVerb::Watch {
            return Admission { rule: struck, watch: None };
        }
        let (order, rule) = match struck {
            Some(rule) if rule.fault().watch_events().is_some() => (Some(rule), None),
            other => (None, other),
        };
        let (sender, receiver) = watch::channel(order);
        state.watches_opened += 1;
        let id = state.watches_opened;
        state.watches.insert(id, OpenWatch { caller: Arc::clone(caller), order: sender });
        Admission { rule, watch: Some(WatchRegistration { id, table: Arc::clone(self), order: receiver }) }
    }

    pub(super) fn clear(&self) {
        self.retain(|_| false);
    }

    fn retain(&self, keep: impl Fn(&Arc<ActiveRule>) -> bool) {
        let mut state = self.state.lock();
        let TableState { rules, watches, .. } = &mut *state;
        rules.retain(|entry| {
            let kept = keep(&entry.rule);
            if !kept {
                entry.rule.removed.cancel();
            }
            kept
        });
        for open in watches.values() {
            open.order.send_if_modified(|order| {
                let lifted = order.as_ref().is_some_and(|rule| rule.removed.is_cancelled());
                if lifted {
                    *order = None;
                }
                lifted
            });
        }
    }
}

/// A rule in force. It ends when this is dropped.
#[must_use = "a rule ends when its handle is dropped"]
pub struct RuleHandle {
    rule: Arc<ActiveRule>,
    table: Weak<RuleTable>,
}

impl RuleHandle {
    /// How often the fault has taken effect: a request was held, cut or answered, a watch fell silent.
    pub fn hits(&self) -> u64 {
        *self.rule.hits.borrow()
    }

    /// Waits until the fault has taken effect `n` times. Fails when the rule is removed before, which
    /// [`super::FaultProxy::clear`] does. Has no deadline of its own.
    pub async fn wait_hit(&self, n: u64) -> anyhow::Result<()> {
        let mut hits = self.rule.hits.subscribe();
        let reached = self.rule.removed.run_until_cancelled(hits.wait_for(|hits| *hits >= n)).await.is_some();
        ensure!(reached || self.hits() >= n, "the rule was removed after {} of {n} hits", self.hits());
        Ok(())
    }

    /// Ends the rule. Delayed requests go on, held ones are cut, stalled watches continue.
    pub fn remove(self) {
        drop(self);
    }
}

impl Drop for RuleHandle {
    fn drop(&mut self) {
        if let Some(table) = self.table.upgrade() {
            table.retain(|rule| !Arc::ptr_eq(rule, &self.rule));
        }
    }
}
