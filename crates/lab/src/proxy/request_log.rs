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
    pub outcome: RequestOutcome,
}

/// What became of a request, as far as is known by now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
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
struct LogState {
    next: u64,
    records: VecDeque<RequestRecord>,
}

#[derive(Default)]
pub(super) struct RequestLog {
    state: Mutex<LogState>,
}

impl RequestLog {
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
            outcome: RequestOutcome::Pending,
        });
        OpenRecord { number, request_log: Arc::clone(self) }
    }

    pub(super) fn records(&self) -> Vec<RequestRecord> {
        self.state.lock().records.iter().cloned().collect()
    }

    fn update(&self, number: u64, change: impl FnOnce(&mut RequestOutcome)) {
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
    request_log: Arc<RequestLog>,
}

impl OpenRecord {
    pub(super) fn set(&self, outcome: RequestOutcome) {
        self.request_log.update(self.number, |current| *current = outcome);
    }
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        self.request_log.update(self.number, |current| {
            if *current == RequestOutcome::Pending {
                *current = RequestOutcome::Abandoned;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{super::request::RequestInfo, *};

    fn open(request_log: &Arc<RequestLog>, path: &str) -> OpenRecord {
        let (method, uri) = (Method::GET, path.parse().unwrap());
        let info = RequestInfo::parse(&method, &uri);
        request_log.open(&method, &uri, &Arc::new(Caller { user_agent: String::new(), info }))
    }

    #[test]
    fn forgets_the_oldest_and_survives_their_late_outcomes() {
        let request_log = Arc::new(RequestLog::default());
        let oldest = open(&request_log, "/oldest");
        for _ in 1..CAPACITY {
            open(&request_log, "/some").set(RequestOutcome::Status(200));
        }
        let newest = open(&request_log, "/newest");
        newest.set(RequestOutcome::Status(201));
        oldest.set(RequestOutcome::Status(500));

        let records = request_log.records();
        assert_eq!(records.len(), CAPACITY);
        assert_eq!(records[0].number, 1);
        assert_eq!(records[0].outcome, RequestOutcome::Status(200));
        assert_eq!(records[CAPACITY - 1].uri.path(), "/newest");
        assert_eq!(records[CAPACITY - 1].outcome, RequestOutcome::Status(201));
    }

    #[test]
    fn what_is_dropped_without_an_outcome_was_abandoned() {
        let request_log = Arc::new(RequestLog::default());
        let held = open(&request_log, "/held");
        assert_eq!(request_log.records()[0].outcome, RequestOutcome::Pending);
        drop(held);
        assert_eq!(request_log.records()[0].outcome, RequestOutcome::Abandoned);
    }
}
