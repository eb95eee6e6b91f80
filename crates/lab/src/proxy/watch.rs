//! The body of a watch, relayed event by event. Its rule may be added, changed and removed while the watch is open.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};

use super::{
    forward::{BrokenResponse, ForwardedBody},
    request_log::{OpenRecord, RequestOutcome},
    rule::ProxyFault,
    table::{ActiveRule, WatchRegistration},
};

/// The delay between the last event and a cut. The reset of an HTTP/2 stream discards queued data, and a body is not
/// notified when its data has been sent. Without the delay, the client could lose events that the rule lets pass.
const FLUSH: Duration = Duration::from_millis(50);

pub(super) fn relay(body: Incoming, status: u16, registration: WatchRegistration, record: OpenRecord) -> ForwardedBody {
    let relay =
        Relay { body, status, registration, record, rule: None, remaining: 0, buffered: Bytes::new(), sent: false };
    let frames = stream::unfold(Some(relay), |relay| async move {
        let mut relay = relay?;
        match relay.next().await {
            Some(Ok(frame)) => Some((Ok(frame), Some(relay))),
            Some(Err(error)) => Some((Err(error), None)),
            None => None,
        }
    });
    StreamBody::new(frames).boxed_unsync()
}

struct Relay {
    /// The first field, so that it is dropped before the API server sees the end of the watch.
    registration: WatchRegistration,
    body: Incoming,
    status: u16,
    record: OpenRecord,
    /// The current rule, and the number of events that it still lets pass.
    rule: Option<Arc<ActiveRule>>,
    remaining: usize,
    /// Data of the API server that the client has not got yet.
    buffered: Bytes,
    sent: bool,
}

impl Relay {
    async fn next(&mut self) -> Option<Result<Frame<Bytes>, BrokenResponse>> {
        loop {
            self.update_rule();
            if let Some(rule) = self.rule.clone()
                && self.remaining == 0
            {
                if let ProxyFault::CutWatch { .. } = rule.fault() {
                    if self.sent {
                        tokio::time::sleep(FLUSH).await;
                    }
                    self.record_fault(&rule);
                    return Some(Err(BrokenResponse::fault(rule.fault())));
                }
                self.record_fault(&rule);
                if self.registration.rule.changed().await.is_err() {
                    return Some(Err(BrokenResponse::stopping()));
                }
                continue;
            }
            if !self.buffered.is_empty() {
                return Some(Ok(self.pass_on()));
            }
            tokio::select! {
                biased;
                changed = self.registration.rule.changed() => if changed.is_err() {
                    return Some(Err(BrokenResponse::stopping()));
                },
                frame = self.body.frame() => match frame?.map(Frame::into_data) {
                    Ok(Ok(data)) => self.buffered = data,
                    Ok(Err(other)) => return Some(Ok(other)),
                    Err(error) => return Some(Err(BrokenResponse::upstream(error))),
                },
            }
        }
    }

    fn update_rule(&mut self) {
        let newest = self.registration.rule.borrow_and_update().clone();
        let same = match (&newest, &self.rule) {
            (Some(newest), Some(current)) => Arc::ptr_eq(newest, current),
            (None, None) => true,
            _ => false,
        };
        if !same {
            self.remaining = newest.as_ref().and_then(|rule| rule.fault().watch_events()).unwrap_or(0);
            self.rule = newest;
        }
    }

    /// The part of `buffered` that may pass. A frame contains any number of events, or a part of one. It is called only
    /// while events may pass, or without a rule.
    fn pass_on(&mut self) -> Frame<Bytes> {
        let mut passes = self.buffered.len();
        if self.rule.is_some() {
            let ends = self.buffered.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
            for (end, _) in ends {
                self.remaining -= 1;
                if self.remaining == 0 {
                    passes = end + 1;
                    break;
                }
            }
        }
        self.sent = true;
        Frame::data(self.buffered.split_to(passes))
    }

    fn record_fault(&self, rule: &ActiveRule) {
        self.record.set(RequestOutcome::Fault { fault: rule.fault().name(), committed: Some(self.status) });
        rule.hit();
    }
}
