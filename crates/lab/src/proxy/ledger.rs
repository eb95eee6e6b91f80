//! What went through the proxy, as tests ask for it. The audit log tells what the API server saw; this also tells what
//! it never saw, and what became of answers on their way back.

use std::{collections::VecDeque, sync::Arc, time::SystemTime};

use http::{Method, Uri};
use parking_lot::Mutex;

use super::rule::Caller;

/// Enough for any test of behaviour, small enough to forget about in a test of scale.
const CAPACITY: usize = 10_000;

/// One request that reached the proxy.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// Counts requests from 0 without gaps: the first record's number tells how many older ones were forgotten.
    pub number: u64,
    pub at: SystemTime,
    pub method: Method,
    pub uri: Uri,
    pub caller: Arc<Caller>,
    pub outcome: Outcome,
}

/// What became of a request, as far as is known by now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Neither answered nor struck yet.
    Pending,
    /// The API server's status, passed on. The body may have broken later.
    Status(u16),
    /// A fault took effect. `committed` is the API server's status, where it was asked at all.
    Fault { fault: &'static str, committed: Option<u16> },
    /// The API server could not be reached, or broke off before it answered.
    Unreachable,
    /// The proxy refused it itself (an upgrade).
    Refused,
    /// The client went away before any of the above.
    Abandoned,
}

#[derive(Default)]
struct State {
    next: u64,
    records: VecDeque<RequestRecord>,
}

#[derive(Default)]
pub(super) struct Ledger {
    state: Mutex<State>,
}

impl Ledger {
    pub(super) fn open(self: &Arc<Self>, method: &Method, uri: &Uri, caller: &Arc<Caller>) -> OpenRecord {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        if state.records.len() == CAPACITY {
            state.records.pop_front();
        }
        state.records.push_back(RequestRecord {
            number,
            at: SystemTime::now(),
            method: method.clone(),
            uri: uri.clone(),
            caller: Arc::clone(caller),
            outcome: Outcome::Pending,
        });
        OpenRecord { number, ledger: Arc::clone(self) }
    }

    pub(super) fn records(&self) -> Vec<RequestRecord> {
        self.state.lock().records.iter().cloned().collect()
    }

    fn update(&self, number: u64, change: impl FnOnce(&mut Outcome)) {
        let mut state = self.state.lock();
        let first = state.next.saturating_sub(u64::try_from(state.records.len()).unwrap_or(u64::MAX));
        let index = number.checked_sub(first).and_then(|index| usize::try_from(index).ok());
        if let Some(record) = index.and_then(|index| state.records.get_mut(index)) {
            change(&mut record.outcome);
        }
    }
}

/// A request under way. Dropped without an outcome, the request was abandoned.
pub(super) struct OpenRecord {
    number: u64,
    ledger: Arc<Ledger>,
}

impl OpenRecord {
    pub(super) fn set(&self, outcome: Outcome) {
        self.ledger.update(self.number, |current| *current = outcome);
    }
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        self.ledger.update(self.number, |current| {
            if *current == Outcome::Pending {
                *current = Outcome::Abandoned;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{super::request::RequestInfo, *};

    fn open(ledger: &Arc<Ledger>, path: &str) -> OpenRecord {
        let (method, uri) = (Method::GET, path.parse().unwrap());
        let info = RequestInfo::parse(&method, &uri);
        ledger.open(&method, &uri, &Arc::new(Caller { user_agent: String::new(), info }))
    }

    #[test]
    fn forgets_the_oldest_and_survives_their_late_outcomes() {
        let ledger = Arc::new(Ledger::default());
        let oldest = open(&ledger, "/oldest");
        for _ in 1..CAPACITY {
            open(&ledger, "/some").set(Outcome::Status(200));
        }
        let newest = open(&ledger, "/newest");
        newest.set(Outcome::Status(201));
        oldest.set(Outcome::Status(500));

        let records = ledger.records();
        assert_eq!(records.len(), CAPACITY);
        assert_eq!(records[0].number, 1);
        assert_eq!(records[0].outcome, Outcome::Status(200));
        assert_eq!(records[CAPACITY - 1].uri.path(), "/newest");
        assert_eq!(records[CAPACITY - 1].outcome, Outcome::Status(201));
    }

    #[test]
    fn what_is_dropped_without_an_outcome_was_abandoned() {
        let ledger = Arc::new(Ledger::default());
        let held = open(&ledger, "/held");
        assert_eq!(ledger.records()[0].outcome, Outcome::Pending);
        drop(held);
        assert_eq!(ledger.records()[0].outcome, Outcome::Abandoned);
    }
}
