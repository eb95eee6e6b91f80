//! The active rules and the open watches. One lock protects both, so that every rule counts a watch exactly once:
//! either when the watch is opened, or when the rule is added while the watch is open.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    request::RequestVerb,
    rule::{Caller, ProxyFault, ProxyRule},
};

/// A rule that was added, with its counter. Affected requests keep it alive, even after its removal.
pub(super) struct ActiveRule {
    rule: ProxyRule,
    hits: watch::Sender<u64>,
    pub(super) removed: CancellationToken,
}

impl ActiveRule {
    pub(super) fn fault(&self) -> &ProxyFault {
        &self.rule.fault
    }

    /// Called when the fault takes effect. For some faults that is long after the request arrived.
    pub(super) fn hit(&self) {
        self.hits.send_modify(|hits| *hits += 1);
    }
}

struct RuleEntry {
    rule: Arc<ActiveRule>,
    /// The requests that matched so far, whether or not the rule affected them.
    count: u64,
}

impl RuleEntry {
    /// Counts the request if it matches, and returns whether the rule affects it.
    fn count_and_check(&mut self, caller: &Caller) -> bool {
        let ProxyRule { matcher, when, fault } = &self.rule.rule;
        if !fault.supports(caller.info.verb) || !matcher.accepts(caller) {
            return false;
        }
        self.count += 1;
        when.applies_to(self.count)
    }
}

/// The rule that applies to an open watch. It may change while the watch is open.
type WatchRule = Option<Arc<ActiveRule>>;

struct OpenWatch {
    caller: Arc<Caller>,
    rule: watch::Sender<WatchRule>,
}

#[derive(Default)]
struct TableState {
    rules: Vec<RuleEntry>,
    /// By number, in the order in which they were opened.
    watches: BTreeMap<u64, OpenWatch>,
    watches_opened: u64,
}

#[derive(Default)]
pub(super) struct RuleTable {
    state: Mutex<TableState>,
}

/// The rules that apply to a request.
pub(super) struct Admission {
    /// The rule for the request itself.
    pub(super) rule: Option<Arc<ActiveRule>>,
    /// Present for every watch, even without a rule: a rule that is added later may apply to it.
    pub(super) watch: Option<WatchRegistration>,
}

/// The registration of an open watch in the table. Dropping it removes the watch.
pub(super) struct WatchRegistration {
    id: u64,
    table: Arc<RuleTable>,
    pub(super) rule: watch::Receiver<WatchRule>,
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
                // The newest rule wins, so that a test can cut a stalled watch.
                if entry.count_and_check(&open.caller) {
                    open.rule.send_replace(Some(Arc::clone(&rule)));
                }
            }
        }
        state.rules.push(entry);
        drop(state);
        RuleHandle { rule, table: Arc::downgrade(self) }
    }

    /// Every rule that matches the request counts it. The first rule that applies is used.
    pub(super) fn admit(self: &Arc<Self>, caller: &Arc<Caller>) -> Admission {
        let mut state = self.state.lock();
        let mut applied = None;
        for entry in &mut state.rules {
            if entry.count_and_check(caller) && applied.is_none() {
                applied = Some(Arc::clone(&entry.rule));
            }
        }
        if caller.info.verb != RequestVerb::Watch {
            return Admission { rule: applied, watch: None };
        }
        let (watch_rule, rule) = match applied {
            Some(rule) if rule.fault().watch_events().is_some() => (Some(rule), None),
            other => (None, other),
        };
        let (sender, receiver) = watch::channel(watch_rule);
        state.watches_opened += 1;
        let id = state.watches_opened;
        state.watches.insert(id, OpenWatch { caller: Arc::clone(caller), rule: sender });
        Admission { rule, watch: Some(WatchRegistration { id, table: Arc::clone(self), rule: receiver }) }
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
            open.rule.send_if_modified(|rule| {
                let removed = rule.as_ref().is_some_and(|rule| rule.removed.is_cancelled());
                if removed {
                    *rule = None;
                }
                removed
            });
        }
    }
}

/// An active rule. Dropping the handle removes it.
#[must_use = "a rule is removed when its handle is dropped"]
pub struct RuleHandle {
    rule: Arc<ActiveRule>,
    table: Weak<RuleTable>,
}

impl RuleHandle {
    /// How often the fault has taken effect: a request was held, cut or answered, or a watch was stalled or cut.
    pub fn hits(&self) -> u64 {
        *self.rule.hits.borrow()
    }

    /// Waits until the fault has taken effect `n` times. Fails if the rule is removed before (see
    /// [`super::FaultProxy::clear`]). It has no timeout.
    #[cfg(test)]
    pub(super) async fn wait_hit(&self, n: u64) -> anyhow::Result<()> {
        let mut hits = self.rule.hits.subscribe();
        let reached = self.rule.removed.run_until_cancelled(hits.wait_for(|hits| *hits >= n)).await.is_some();
        anyhow::ensure!(reached || self.hits() >= n, "the rule was removed after {} of {n} hits", self.hits());
        Ok(())
    }

    /// Removes the rule. Delayed requests are forwarded, held requests are cut, stalled watches continue.
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
