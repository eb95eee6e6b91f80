//! One request through the proxy: the rules decide whether the proxy forwards it or injects a fault.

use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version, header};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::body::{Body as _, Incoming};
use tokio::sync::watch;

use super::{
    Partition,
    request::RequestInfo,
    request_log::{OpenRecord, RequestLog, RequestOutcome},
    rule::{Caller, ProxyFault, Then},
    server::ClientLink,
    status,
    table::{ActiveRule, Admission, RuleTable},
    upstream::{NoResponse, Upstream},
    watch::relay,
};

pub(super) type ForwardedBody = UnsyncBoxBody<Bytes, BrokenResponse>;

/// A response that the client does not get. Returned to hyper, it closes an HTTP/1.1 connection or resets an HTTP/2
/// stream, before the head or in the middle of the body: the client always gets an error.
#[derive(Debug)]
pub(super) struct BrokenResponse(String);

impl BrokenResponse {
    pub(super) fn fault(fault: &ProxyFault) -> Self {
        Self(format!("cut by the fault {fault:?}"))
    }

    pub(super) fn stopping() -> Self {
        Self("the proxy is stopping".to_owned())
    }

    pub(super) fn upstream(error: impl Into<anyhow::Error>) -> Self {
        Self(format!("the API server closed the connection: {:#}", error.into()))
    }
}

impl fmt::Display for BrokenResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// It has no source: hyper would take the code of a stream reset from it, and clients retry some codes automatically.
impl std::error::Error for BrokenResponse {}

/// The state that all connections share.
pub(super) struct Core {
    pub(super) table: Arc<RuleTable>,
    pub(super) request_log: Arc<RequestLog>,
    pub(super) upstream: Upstream,
    pub(super) partition: watch::Sender<Partition>,
}

/// A request in progress.
struct Exchange<'a> {
    core: &'a Core,
    client: &'a ClientLink,
    record: OpenRecord,
    version: Version,
}

impl Core {
    pub(super) async fn handle(
        &self,
        client: &ClientLink,
        request: Request<Incoming>,
    ) -> Result<Response<ForwardedBody>, BrokenResponse> {
        let caller = Arc::new(Caller {
            user_agent: user_agent(request.headers()),
            info: RequestInfo::parse(request.method(), request.uri()),
        });
        let record = self.request_log.open(request.method(), request.uri(), &caller);
        if request.method() == Method::CONNECT || request.headers().contains_key(header::UPGRADE) {
            record.set(RequestOutcome::Refused);
            return Ok(status::no_upgrades(&caller.info));
        }
        let Admission { rule, watch } = self.table.admit(&caller);
        let exchange = Exchange { core: self, client, record, version: request.version() };
        let delay = match &rule {
            Some(rule) => match rule.fault() {
                ProxyFault::Delay(time) => Some((rule, *time)),
                _ => {
                    drop(watch);
                    return exchange.inject(rule, &caller.info, request).await;
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
            exchange.record_fault(rule.fault(), Some(response.status()));
        }
        match watch {
            Some(registration) if response.status() == StatusCode::OK => {
                let status = response.status().as_u16();
                Ok(response.map(|body| relay(body, status, registration, exchange.record)))
            }
            _ => Ok(response.map(streamed)),
        }
    }
}

impl Exchange<'_> {
    async fn inject(
        self,
        rule: &ActiveRule,
        info: &RequestInfo,
        request: Request<Incoming>,
    ) -> Result<Response<ForwardedBody>, BrokenResponse> {
        let fault = rule.fault();
        match fault {
            ProxyFault::Drop => {
                drain(request.into_body()).await;
                self.record_fault(fault, None);
                rule.hit();
                rule.removed.cancelled().await;
                Err(self.cut(fault))
            }
            ProxyFault::Cut => {
                self.record_fault(fault, None);
                rule.hit();
                Err(self.cut(fault))
            }
            ProxyFault::CutAfter => {
                let response = self.commit(request).await?;
                self.record_fault(fault, Some(response.status()));
                rule.hit();
                Err(self.cut(fault))
            }
            ProxyFault::AfterCommit(callback) => {
                let response = self.commit(request).await?;
                // Counted first: a test waits for the exit of a process that the callback kills.
                rule.hit();
                let then = callback();
                self.record_fault(fault, Some(response.status()));
                match then {
                    Then::Deliver => Ok(response),
                    Then::Cut => Err(self.cut(fault)),
                }
            }
            ProxyFault::Answer { status, retry_after } => {
                drain(request.into_body()).await;
                self.record_fault(fault, None);
                rule.hit();
                let code = StatusCode::from_u16(*status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                Ok(status::failure(code, info, *retry_after))
            }
            // These forward the request: the caller delays it, and the table applies the others to the open watch.
            ProxyFault::Delay(_) | ProxyFault::StallWatch { .. } | ProxyFault::CutWatch { .. } => {
                Ok(self.forward(request).await?.map(streamed))
            }
        }
    }

    /// Forwards the request and reads the whole response: only its end shows that the API server has completed it.
    async fn commit(&self, request: Request<Incoming>) -> Result<Response<ForwardedBody>, BrokenResponse> {
        let (parts, body) = self.forward(request).await?.into_parts();
        let body = match body.collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) => return Err(self.broken(BrokenResponse::upstream(error))),
        };
        Ok(Response::from_parts(parts, Full::new(body).map_err(|never| match never {}).boxed_unsync()))
    }

    async fn forward(&self, request: Request<Incoming>) -> Result<Response<Incoming>, BrokenResponse> {
        // A request that was read before the partition began must not reach the API server during the partition.
        let mut partition = self.core.partition.subscribe();
        let _ = partition.wait_for(|partition| *partition == Partition::None).await;
        if self.client.is_gone() {
            return Err(BrokenResponse::stopping());
        }
        match self.core.upstream.send(request).await {
            Ok(response) => {
                self.record.set(RequestOutcome::Status(response.status().as_u16()));
                Ok(response)
            }
            Err(NoResponse::Unreachable(error)) => {
                tracing::debug!(error = format!("{error:#}"), "the API server is unreachable");
                self.record.set(RequestOutcome::Unreachable);
                self.client.reset();
                // The reset of the connection ends this future. An error would first send a stream reset to an HTTP/2
                // client, and a dead server does not send one.
                std::future::pending().await
            }
            Err(NoResponse::Broken(error)) => Err(self.broken(BrokenResponse::upstream(error))),
        }
    }

    fn record_fault(&self, fault: &ProxyFault, committed: Option<StatusCode>) {
        self.record.set(RequestOutcome::Fault { fault: fault.name(), committed: committed.map(|code| code.as_u16()) });
    }

    fn broken(&self, error: BrokenResponse) -> BrokenResponse {
        self.record.set(RequestOutcome::Unreachable);
        self.reset();
        error
    }

    fn cut(&self, fault: &ProxyFault) -> BrokenResponse {
        self.reset();
        BrokenResponse::fault(fault)
    }

    /// Resets only HTTP/1.1 connections: an HTTP/2 connection carries other requests, which the fault must not affect.
    fn reset(&self) {
        if self.version < Version::HTTP_2 {
            self.client.reset();
        }
    }
}

fn streamed(body: Incoming) -> ForwardedBody {
    body.map_err(BrokenResponse::upstream).boxed_unsync()
}

fn user_agent(headers: &HeaderMap) -> String {
    let value = headers.get(header::USER_AGENT).map(|value| String::from_utf8_lossy(value.as_bytes()));
    value.unwrap_or_default().into_owned()
}

/// Reads a body to its end. With unread bytes, an HTTP/1.1 connection cannot be reused, and its close is not detected.
async fn drain(mut body: Incoming) {
    while !body.is_end_stream() {
        if !matches!(body.frame().await, Some(Ok(_))) {
            return;
        }
    }
}
