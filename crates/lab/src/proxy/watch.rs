//! The body of a watch, relayed event by event under a rule that may come, change and go while it is open.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};

use super::{
    forward::{BrokenResponse, ResponseBody},
    request_log::{OpenRecord, RequestOutcome},
    rule::ProxyFault,
    table::{ActiveRule, WatchRegistration},
};

/// Between the last event and a cut. Resetting an HTTP/2 stream discards what is still queued for it, and nothing tells
/// a body that its data has left; without this the client would lose events that the rule lets pass.
const FLUSH: Duration = Duration::from_millis(50);

pub(super) fn relay(body: Incoming, status: u16, registration: WatchRegistration, record: OpenRecord) -> ResponseBody {
    let relay = Relay { body, status, registration, record, order: None, left: 0, carry: Bytes::new(), sent: false };
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
    /// First, so that it is given up before the API server sees the watch end.
    registration: WatchRegistration,
    body: Incoming,
    status: u16,
    record: OpenRecord,
    /// The rule in force, and the events that it still lets pass.
    order: Option<Arc<ActiveRule>>,
    left: usize,
    /// Read from the API server, and not for the client yet.
    carry: Bytes,
    sent: bool,
}

impl Relay {
    async fn next(&mut self) -> Option<Result<Frame<Bytes>, BrokenResponse>> {
        loop {
            self.obey_newest_order();
            if let Some(rule) = self.order.clone()
                && self.left == 0
            {
                if let ProxyFault::CutWatch { .. } = rule.fault() {
                    if self.sent {
                        tokio::time::sleep(FLUSH).await;
                    }
                    self.struck(&rule);
                    return Some(Err(BrokenResponse::fault(rule.fault())));
                }
                self.struck(&rule);
                if self.registration.order.changed().await.is_err() {
                    return Some(Err(BrokenResponse::stopping()));
                }
                continue;
            }
            if !self.carry.is_empty() {
                return Some(Ok(self.pass_on()));
            }
            tokio::select! {
                biased;
                changed = self.registration.order.changed() => if changed.is_err() {
                    return Some(Err(BrokenResponse::stopping()));
                },
                frame = self.body.frame() => match frame?.map(Frame::into_data) {
                    Ok(Ok(data)) => self.carry = data,
                    Ok(Err(other)) => return Some(Ok(other)),
                    Err(error) => return Some(Err(BrokenResponse::upstream(error))),
                },
            }
        }
    }

    fn obey_newest_order(&mut self) {
        let newest = self.registration.order.borrow_and_update().clone();
        let same = match (&newest, &self.order) {
            (Some(newest), Some(current)) => Arc::ptr_eq(newest, current),
            (None, None) => true,
            _ => false,
        };
        if !same {
            self.left = newest.as_ref().and_then(|rule| rule.fault().watch_events()).unwrap_or(0);
            self.order = newest;
        }
    }

    /// The part of `carry` that may pass. A frame holds any number of events, or a part of one. Called only while some
    /// event may pass, or there is no order.
    fn pass_on(&mut self) -> Frame<Bytes> {
        let mut passes = self.carry.len();
        if self.order.is_some() {
            let ends = self.carry.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
            for (end, _) in ends {
                self.left -= 1;
                if self.left == 0 {
                    passes = end + 1;
                    break;
                }
            }
        }
        self.sent = true;
        Frame::data(self.carry.split_to(passes))
    }

    fn struck(&self, rule: &ActiveRule) {
        self.record.set(RequestOutcome::Fault { fault: rule.fault().name(), committed: Some(self.status) });
        rule.hit();
    }
}
