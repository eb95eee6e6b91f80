//! One request through the proxy: admitted by the rules, struck or forwarded, answered or cut.

use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version, header};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::body::{Body as _, Incoming};
use tokio::sync::watch;

use super::{
    Partition,
    ledger::{Ledger, OpenRecord, Outcome},
    request::RequestInfo,
    rule::{Caller, Fault, Then},
    server::ClientLink,
    status,
    table::{ActiveRule, Admission, RuleTable},
    upstream::{NoResponse, Upstream},
    watch::relay,
};

pub(super) type AnswerBody = UnsyncBoxBody<Bytes, Broken>;

/// An answer that the client does not get. Handed to hyper, it ends an HTTP/1.1 connection and resets an HTTP/2 stream,
/// before the head or in the middle of the body: the client always sees an error.
#[derive(Debug)]
pub(super) struct Broken(String);

impl Broken {
    pub(super) fn fault(fault: &Fault) -> Self {
        Self(format!("cut by the fault {fault:?}"))
    }

    pub(super) fn stopping() -> Self {
        Self("the proxy is stopping".to_owned())
    }

    pub(super) fn upstream(error: impl Into<anyhow::Error>) -> Self {
        Self(format!("the API server broke off: {:#}", error.into()))
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// No source on purpose: hyper would take the code of a stream reset from it, and a client may repeat some by itself.
impl std::error::Error for Broken {}

/// What all connections share.
pub(super) struct Core {
    pub(super) table: Arc<RuleTable>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) upstream: Upstream,
    pub(super) partition: watch::Sender<Partition>,
}

/// A request under way, with what it needs to end in any of its ways.
struct Exchange<'a> {
    core: &'a Core,
    client: &'a ClientLink,
    record: OpenRecord,
    version: Version,
}

impl Core {
    pub(super) async fn answer(
        &self,
        client: &ClientLink,
        request: Request<Incoming>,
    ) -> Result<Response<AnswerBody>, Broken> {
        let caller = Arc::new(Caller {
            user_agent: user_agent(request.headers()),
            info: RequestInfo::parse(request.method(), request.uri()),
        });
        let record = self.ledger.open(request.method(), request.uri(), &caller);
        if request.method() == Method::CONNECT || request.headers().contains_key(header::UPGRADE) {
            record.set(Outcome::Refused);
            return Ok(status::no_upgrades(&caller.info));
        }
        let Admission { rule, watch } = self.table.admit(&caller);
        let exchange = Exchange { core: self, client, record, version: request.version() };
        let delay = match &rule {
            Some(rule) => match rule.fault() {
                Fault::Delay(time) => Some((rule, *time)),
                _ => {
                    drop(watch);
                    return exchange.strike(rule, &caller.info, request).await;
                }
            },
            None => None,
        };
        if let Some((rule, time)) = delay {
            rule.hit();
            rule.removed.run_until_cancelled(tokio::time::sleep(time)).await;
        }
        let response = exchange.forward(request).await?;
        if let Some((rule, _)) = delay {
            exchange.struck(rule.fault(), Some(response.status()));
        }
        match watch {
            Some(slot) if response.status() == StatusCode::OK => {
                let status = response.status().as_u16();
                Ok(response.map(|body| relay(body, status, slot, exchange.record)))
            }
            _ => Ok(response.map(streamed)),
        }
    }
}

impl Exchange<'_> {
    async fn strike(
        self,
        rule: &ActiveRule,
        info: &RequestInfo,
        request: Request<Incoming>,
    ) -> Result<Response<AnswerBody>, Broken> {
        let fault = rule.fault();
        match fault {
            Fault::Drop => {
                swallow(request.into_body()).await;
                self.struck(fault, None);
                rule.hit();
                rule.removed.cancelled().await;
                Err(self.cut(fault))
            }
            Fault::Cut => {
                self.struck(fault, None);
                rule.hit();
                Err(self.cut(fault))
            }
            Fault::CutAfter => {
                let response = self.commit(request).await?;
                self.struck(fault, Some(response.status()));
                rule.hit();
                Err(self.cut(fault))
            }
            Fault::AfterCommit(callback) => {
                let response = self.commit(request).await?;
                let then = callback();
                self.struck(fault, Some(response.status()));
                rule.hit();
                match then {
                    Then::Deliver => Ok(response),
                    Then::Cut => Err(self.cut(fault)),
                }
            }
            Fault::Answer { status, retry_after } => {
                swallow(request.into_body()).await;
                self.struck(fault, None);
                rule.hit();
                let code = StatusCode::from_u16(*status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                Ok(status::failure(code, info, *retry_after))
            }
            // These let the request pass: the caller delays it, and the table gives the others to the watch.
            Fault::Delay(_) | Fault::StallWatch { .. } | Fault::CutWatch { .. } => {
                Ok(self.forward(request).await?.map(streamed))
            }
        }
    }

    /// The whole response: only its end tells that the API server is done with the request.
    async fn commit(&self, request: Request<Incoming>) -> Result<Response<AnswerBody>, Broken> {
        let (parts, body) = self.forward(request).await?.into_parts();
        let body = match body.collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) => return Err(self.broken(Broken::upstream(error))),
        };
        Ok(Response::from_parts(parts, Full::new(body).map_err(|never| match never {}).boxed_unsync()))
    }

    async fn forward(&self, request: Request<Incoming>) -> Result<Response<Incoming>, Broken> {
        // Requests that were read before a partition began must not slip through it.
        let mut partition = self.core.partition.subscribe();
        let _ = partition.wait_for(|partition| *partition == Partition::None).await;
        if self.client.is_gone() {
            return Err(Broken::stopping());
        }
        match self.core.upstream.send(request).await {
            Ok(response) => {
                self.record.set(Outcome::Status(response.status().as_u16()));
                Ok(response)
            }
            Err(NoResponse::Unreachable(error)) => {
                tracing::debug!(error = format!("{error:#}"), "the API server cannot be reached");
                self.record.set(Outcome::Unreachable);
                self.client.reset();
                // Ends with the connection. An error would reach an HTTP/2 client before, as a stream reset, which only
                // a living server sends.
                std::future::pending().await
            }
            Err(NoResponse::Broken(error)) => Err(self.broken(Broken::upstream(error))),
        }
    }

    fn struck(&self, fault: &Fault, committed: Option<StatusCode>) {
        self.record.set(Outcome::Fault { fault: fault.name(), committed: committed.map(|code| code.as_u16()) });
    }

    fn broken(&self, error: Broken) -> Broken {
        self.record.set(Outcome::Unreachable);
        self.reset();
        error
    }

    fn cut(&self, fault: &Fault) -> Broken {
        self.reset();
        Broken::fault(fault)
    }

    /// An HTTP/2 connection carries other requests, which are none of this fault's business.
    fn reset(&self) {
        if self.version < Version::HTTP_2 {
            self.client.reset();
        }
    }
}

fn streamed(body: Incoming) -> AnswerBody {
    body.map_err(Broken::upstream).boxed_unsync()
}

fn user_agent(headers: &HeaderMap) -> String {
    let value = headers.get(header::USER_AGENT).map(|value| String::from_utf8_lossy(value.as_bytes()));
    value.unwrap_or_default().into_owned()
}

/// Reads a body to its end. An HTTP/1.1 connection with unread bytes can neither be used again nor seen to close.
async fn swallow(mut body: Incoming) {
    while !body.is_end_stream() {
        if !matches!(body.frame().await, Some(Ok(_))) {
            return;
        }
    }
}
