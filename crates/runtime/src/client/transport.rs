//! What every request passes through on its way to the API server: its turn, its deadline and its count.
//!
//! A deadline covers the whole answer, body included. A watch has none for its body, for it should stay open; instead
//! it ends when nothing came for longer than the server was asked to keep it, and its opening is bounded like any
//! other request. A watch that ends quietly is opened again by the watcher from where it stood.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use kube::client::Body;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};
use tower::{BoxError, Layer, Service};

use super::{
    bucket::Bucket,
    verb::{Verb, server_timeout},
};
use crate::{lease::Fence, metrics::Metrics};

/// The server closes a watch by itself at the time it was asked to; only a dead connection is silent for longer.
const WATCH_MARGIN: Duration = Duration::from_secs(10);
const WATCH_UNBOUNDED: Duration = Duration::from_secs(300);
/// An answer to "slow down" is short; whatever a proxy sends in its place is not read.
const RETRY_AFTER_LIMIT: u64 = 300;

/// A request, or the body of its answer, took longer than its deadline.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {0:?}")]
pub struct DeadlineExceeded(pub Duration);

/// The request was not sent: while it waited for its turn, the lease that allowed it ran out.
#[derive(Debug, thiserror::Error)]
#[error("this replica does not lead")]
pub struct NotLeading;

#[derive(Clone)]
pub struct Transport {
    pub deadline: Duration,
    /// Reads and writes wait for a token of this one.
    pub requests: Option<Arc<Bucket>>,
    /// Opening a watch waits for one of this. It is generous; it only stops a server that closes every watch at once
    /// from being asked thousands of times a second.
    pub watches: Arc<Bucket>,
    pub metrics: Arc<Metrics>,
}

impl<S> Layer<S> for Transport {
    type Service = Transported<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Transported { inner, transport: self.clone() }
    }
}

#[derive(Clone)]
pub struct Transported<S> {
    inner: S,
    transport: Transport,
}

impl<S, B> Service<Request<Body>> for Transported<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Guarded<B>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let verb = Verb::of(request.method(), request.uri());
        let idle = server_timeout(request.uri()).map_or(WATCH_UNBOUNDED, |timeout| timeout + WATCH_MARGIN);
        let path = request.uri().path().to_owned();
        // A write of the leader carries its fence.
        let fence = request.extensions().get::<Fence>().cloned();
        let transport = self.transport.clone();
        // Nothing is sent before this future is polled, and it is polled only after its turn has come.
        let answer = self.inner.call(request);
        Box::pin(async move {
            match (verb, &transport.requests) {
                (Verb::Watch, _) => transport.watches.wait().await,
                (_, Some(bucket)) => bucket.wait().await,
                (_, None) => {}
            }
            // The turn may have come long after the write was decided on.
            if fence.is_some_and(|fence| !fence.may_write()) {
                return Err(NotLeading.into());
            }
            let begin = Instant::now();
            let deadline = begin + transport.deadline;
            let result = match timeout_at(deadline, answer).await {
                Ok(result) => result.map_err(Into::into),
                Err(_) => Err(DeadlineExceeded(transport.deadline).into()),
            };
            let code = result.as_ref().map_or(0, |response| response.status().as_u16());
            transport.metrics.count_request(verb, code);
            tracing::debug!(verb = verb.as_str(), path, code, milliseconds = begin.elapsed().as_millis(), "request");
            let response = result?;
            if let Some(status) = too_many_requests(&response) {
                let (parts, _) = response.into_parts();
                return Ok(Response::from_parts(parts, Guarded::whole(status)));
            }
            let watching = verb == Verb::Watch && response.status().is_success();
            Ok(response.map(|body| {
                if watching { Guarded::idle(body, idle) } else { Guarded::until(body, deadline, transport.deadline) }
            }))
        })
    }
}

/// The server says when to come back in a header, which no later layer sees: it is put where errors are read.
fn too_many_requests<B>(response: &Response<B>) -> Option<Bytes> {
    if response.status() != StatusCode::TOO_MANY_REQUESTS {
        return None;
    }
    let seconds: u64 = response.headers().get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    let status = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 429, "reason": "TooManyRequests",
        "message": "the API server asks to slow down",
        "details": { "retryAfterSeconds": seconds.min(RETRY_AFTER_LIMIT) },
    });
    Some(Bytes::from(status.to_string()))
}

/// The body of an answer, with the limit that holds for it.
pub struct Guarded<B> {
    content: Content<B>,
    limit: Option<(Pin<Box<Sleep>>, Limit)>,
}

enum Content<B> {
    Inner(B),
    Whole(Option<Bytes>),
    /// After the limit, nothing more is read.
    Ended,
}

#[derive(Clone, Copy)]
enum Limit {
    /// The whole body must have come by then; the duration is what the error tells.
    Deadline(Duration),
    /// Each piece must come within this time.
    Idle(Duration),
}

impl<B> Guarded<B> {
    fn whole(bytes: Bytes) -> Self {
        Self { content: Content::Whole(Some(bytes)), limit: None }
    }

    fn until(body: B, deadline: Instant, duration: Duration) -> Self {
        let limit = Some((Box::pin(sleep_until(deadline)), Limit::Deadline(duration)));
        Self { content: Content::Inner(body), limit }
    }

    fn idle(body: B, idle: Duration) -> Self {
        let limit = Some((Box::pin(sleep_until(Instant::now() + idle)), Limit::Idle(idle)));
        Self { content: Content::Inner(body), limit }
    }
}

impl<B> HttpBody for Guarded<B>
where
    B: HttpBody<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        let body = match &mut this.content {
            Content::Inner(body) => body,
            Content::Whole(bytes) => return Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Ended => return Poll::Ready(None),
        };
        if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
            if let Some((sleep, Limit::Idle(idle))) = &mut this.limit {
                sleep.as_mut().reset(Instant::now() + *idle);
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let Some((sleep, limit)) = &mut this.limit else { return Poll::Pending };
        if sleep.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        this.content = Content::Ended;
        match *limit {
            Limit::Deadline(duration) => Poll::Ready(Some(Err(DeadlineExceeded(duration).into()))),
            Limit::Idle(idle) => {
                tracing::debug!(seconds = idle.as_secs(), "a silent watch was closed");
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Inner(body) => body.is_end_stream(),
            Content::Whole(bytes) => bytes.is_none(),
            Content::Ended => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Inner(body) => body.size_hint(),
            Content::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Content::Ended => SizeHint::with_exact(0),
        }
    }
}
