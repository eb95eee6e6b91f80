//! The requests that reached the proxy. The audit log contains the requests that the API server received; this log also
//! contains the requests that never reached it, and whether the client got the response.

use std::{collections::VecDeque, sync::Arc, time::SystemTime};

use http::{Method, Uri};
use parking_lot::Mutex;

use super::rule::Caller;

/// Enough for any test of behaviour, and small enough for benchmarks.
const CAPACITY: usize = 10_000;

/// One request that reached the proxy.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// Counts requests from 0 without gaps: the number of the first record is the count of removed records.
    pub number: u64,
    pub at: SystemTime,
    pub method: Method,
    pub uri: Uri,
    pub caller: Arc<Caller>,
    pub outcome: RequestOutcome,
}

/// The outcome of a request so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// Neither a response nor a fault yet.
    Pending,
    /// The proxy returned the API server's status. The body may have been interrupted later.
    Status(u16),
    /// A fault was injected. `committed` is the API server's status, if the request was forwarded.
    Fault { fault: &'static str, committed: Option<u16> },
    /// The API server was unreachable, or closed the connection before it answered.
    Unreachable,
    /// The proxy rejected the request itself (an upgrade).
    Refused,
    /// The client disconnected before any other outcome.
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

/// The record of a request in progress. If it is dropped without an outcome, the request was abandoned.
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
    fn the_oldest_records_are_removed_and_their_late_outcomes_ignored() {
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
    fn a_record_dropped_without_an_outcome_is_abandoned() {
        let request_log = Arc::new(RequestLog::default());
        let held = open(&request_log, "/held");
        assert_eq!(request_log.records()[0].outcome, RequestOutcome::Pending);
        drop(held);
        assert_eq!(request_log.records()[0].outcome, RequestOutcome::Abandoned);
    }
}
