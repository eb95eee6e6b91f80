//! The tower layer of every request to the API server: rate limit, deadline, size of pages and metrics.
//!
//! The deadline covers the whole response, including its body. The body of a watch has no deadline, because a watch
//! stays open. It ends when nothing arrives for longer than the time between two bookmarks, or than the request asked
//! the server to keep the watch open. The opening of a watch has the same deadline as other requests. kube's watcher
//! resumes such a watch from its last resource version.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body::Body as HttpBody;
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use kube::client::Body;
use tokio::time::{Instant, timeout_at};
use tower::{BoxError, Layer, Service};
use tower_http::timeout::{DeadlineBody, TimeoutBody, TimeoutError};

use super::{
    bucket::Bucket,
    pages::{ListPage, PageLimits},
};
use crate::{
    lease::WriteFence,
    metrics::{Metrics, RequestDescription},
    verb::{Verb, server_timeout, with_parameter},
};

/// The server closes a watch after the requested time. Only a dead connection is silent for longer.
const WATCH_MARGIN: Duration = Duration::from_secs(10);
/// The API server sends a bookmark about every minute on a watch without changes. A watch that is silent for longer is
/// dead, or stuck in a balancer or in the server.
pub(crate) const WATCH_IDLE_TIMEOUT: Duration = Duration::from_secs(90);
const MAX_RETRY_AFTER_SECONDS: u64 = 300;

/// A request, or the body of its response, took longer than its deadline.
#[derive(Debug, thiserror::Error)]
#[error("no response within {0:?}")]
pub(crate) struct DeadlineExceeded(pub(crate) Duration);

/// A watch sent nothing, not even a bookmark, and was closed.
#[derive(Debug, thiserror::Error)]
#[error("the watch was silent for {0:?}")]
pub(crate) struct SilentWatch(Duration);

/// The request was not sent: the lease expired while the request waited for the rate limit.
#[derive(Debug, thiserror::Error)]
#[error("this replica is not the leader")]
pub(crate) struct NotLeading;

#[derive(Clone)]
pub(crate) struct ClientLayer {
    pub(crate) deadline: Duration,
    /// The rate limit of reads and writes.
    pub(crate) requests: Option<Arc<Bucket>>,
    /// The rate limit of opening watches. It is generous, and only prevents thousands of requests per second to a
    /// server that closes every watch at once.
    pub(crate) watches: Arc<Bucket>,
    pub(crate) pages: Arc<PageLimits>,
    pub(crate) metrics: Arc<Metrics>,
    /// The address of the API server, for metrics.
    pub(crate) host: Arc<str>,
}

impl<S> Layer<S> for ClientLayer {
    type Service = ClientService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ClientService { inner, layer: self.clone() }
    }
}

#[derive(Clone)]
pub(crate) struct ClientService<S> {
    inner: S,
    layer: ClientLayer,
}

impl<S, B> Service<Request<Body>> for ClientService<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<UnsyncBoxBody<Bytes, BoxError>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let verb = Verb::from_request(request.method(), request.uri());
        let page = ListPage::of(request.uri(), &self.layer.pages).filter(|_| verb == Verb::List);
        if let Some(page) = &page {
            *request.uri_mut() = page.uri(request.uri());
        }
        let asked_for = server_timeout(request.uri()).map_or(WATCH_IDLE_TIMEOUT, |timeout| timeout + WATCH_MARGIN);
        let idle = asked_for.min(WATCH_IDLE_TIMEOUT);
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        // The executor puts the fence into the extensions of its writes.
        let fence = request.extensions().get::<WriteFence>().cloned();
        let layer = self.layer.clone();
        if fence.is_some() {
            // The server gives up when this replica does. A write that waits in the server must not be executed later,
            // when another replica leads.
            let seconds = format!("{}s", layer.deadline.as_secs());
            *request.uri_mut() = with_parameter(request.uri(), "timeout", &seconds);
        }
        // Nothing is sent before this future is polled, and it is polled only after the wait for the rate limit.
        let response = self.inner.call(request);
        Box::pin(async move {
            let bucket = layer.requests.as_ref().filter(|_| verb != Verb::Watch);
            let waited = match (verb, bucket) {
                (Verb::Watch, _) => layer.watches.wait().await,
                (_, Some(bucket)) => bucket.wait().await,
                (_, None) => false,
            };
            // The wait may have taken longer than the lease.
            if fence.is_some_and(|fence| !fence.may_write()) {
                return Err(NotLeading.into());
            }
            let begin = Instant::now();
            let deadline = begin + layer.deadline;
            let result = match timeout_at(deadline, response).await {
                Ok(result) => result.map_err(Into::into),
                Err(_) => Err(DeadlineExceeded(layer.deadline).into()),
            };
            let code = result.as_ref().map_or(0, |response| response.status().as_u16());
            let request = RequestDescription { verb, method: &method, host: &layer.host, path: &path };
            layer.metrics.count_request(&request, code);
            if let Some(bucket) = bucket {
                bucket.on_response(code, begin.elapsed(), waited);
            }
            tracing::debug!(verb = verb.as_str(), path, code, milliseconds = begin.elapsed().as_millis(), "request");
            let response = result?;
            if let Some(status) = too_many_requests(&response) {
                return Ok(response.map(|_| Full::new(status).map_err(Into::into).boxed_unsync()));
            }
            let is_watch = verb == Verb::Watch && response.status().is_success();
            Ok(response.map(|body| {
                if is_watch {
                    return watch_body(body, idle);
                }
                let body = deadline_body(body, deadline.saturating_duration_since(Instant::now()), layer.deadline);
                match page {
                    Some(page) => page.bound(body),
                    None => body,
                }
            }))
        })
    }
}

/// The rest of a response must arrive within `remaining` of its `deadline`.
fn deadline_body<B>(body: B, remaining: Duration, deadline: Duration) -> UnsyncBoxBody<Bytes, BoxError>
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let name_deadline =
        move |error: BoxError| if error.is::<TimeoutError>() { DeadlineExceeded(deadline).into() } else { error };
    DeadlineBody::new(remaining, body).map_err(name_deadline).boxed_unsync()
}

/// Each frame of a watch must arrive within `idle`.
fn watch_body<B>(body: B, idle: Duration) -> UnsyncBoxBody<Bytes, BoxError>
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let name_silence = move |error: BoxError| if error.is::<TimeoutError>() { SilentWatch(idle).into() } else { error };
    TimeoutBody::new(idle, body).map_err(name_silence).boxed_unsync()
}

/// The body that replaces the one of a 429. Errors do not keep the header `Retry-After`, so its value moves into the
/// Status. The replaced body, which may be a proxy's page, is not read.
fn too_many_requests<B>(response: &Response<B>) -> Option<Bytes> {
    if response.status() != StatusCode::TOO_MANY_REQUESTS {
        return None;
    }
    let seconds: u64 = response.headers().get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    let status = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 429, "reason": "TooManyRequests",
        "message": "the API server limits the rate of requests",
        "details": { "retryAfterSeconds": seconds.min(MAX_RETRY_AFTER_SECONDS) },
    });
    Some(Bytes::from(status.to_string()))
}
