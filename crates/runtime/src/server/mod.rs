//! A small HTTP server, with or without TLS, that limits the number and age of connections, their idle time, and the
//! time of each request.
//!
//! A panic fails one request. The server ends a connection between two requests with the header `Connection: close` in
//! a response. It closes a connection on which the client may be about to send the next request only if too many are
//! open (`connections`).

mod bind;
mod connections;
#[cfg(test)]
mod tests;

use std::{
    convert::Infallible,
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::FutureExt;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    time::{Instant, sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

pub use bind::{Bind, BindError};

use self::connections::{Connections, Place};
use crate::tls::Acceptor;

pub type HttpResponse = Response<Full<Bytes>>;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Concurrent connections. A further one replaces one that is idle.
    pub connections: usize,
    /// From the start of a connection until its first request.
    pub first_request_timeout: Duration,
    /// Between two requests. A client that reuses connections should have a shorter timeout.
    pub idle_timeout: Duration,
    /// For one request, including reading it.
    pub request_timeout: Duration,
    /// After this time the next response of a connection is its last one.
    pub max_age: Duration,
}

/// Serves until `stop`. Requests in progress are still served to their end.
pub async fn serve<S, F>(
    listener: TcpListener,
    tls: Option<Acceptor>,
    limits: Limits,
    handler: S,
    stop: CancellationToken,
) where
    S: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = HttpResponse> + Send + 'static,
{
    let connections = Connections::new(limits.connections);
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // For example, no file descriptor is left: an immediate retry would fail again.
                tracing::warn!(error = %error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(place) = connections.add(peer.ip()) else {
            tracing::debug!("connection refused: too many requests are in progress");
            continue;
        };
        let (tls, place) = (tls.clone(), Arc::new(place));
        let (close, begin) = (place.close.clone(), Instant::now());
        let connection = HttpConnection { limits, handler: handler.clone(), stop: stop.clone(), begin, place };
        tokio::spawn(async move { close.run_until_cancelled(connection.handshake(stream, tls)).await });
    }
}

struct HttpConnection<S> {
    limits: Limits,
    handler: S,
    stop: CancellationToken,
    begin: Instant,
    place: Arc<Place>,
}

impl<S, F> HttpConnection<S>
where
    S: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = HttpResponse> + Send + 'static,
{
    async fn handshake(self, stream: TcpStream, tls: Option<Acceptor>) {
        let Some(tls) = tls else { return self.serve(stream).await };
        match timeout(self.limits.first_request_timeout, TlsAcceptor::from(tls.config()).accept(stream)).await {
            Ok(Ok(stream)) => self.serve(stream).await,
            Ok(Err(error)) => tracing::debug!(error = %error, "TLS handshake failed"),
            Err(_) => tracing::debug!("TLS handshake timed out"),
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send) {
        let Self { limits, handler, stop, begin, place } = self;
        let request_seen = AtomicBool::new(false);
        let service = service_fn(|request: Request<Incoming>| {
            request_seen.store(true, Ordering::Relaxed);
            place.set_idle(false);
            let place = place.clone();
            let response = handle_with_timeout(limits.request_timeout, handler.clone(), request);
            let is_last = begin.elapsed() > limits.max_age;
            async move {
                let mut response = response.await;
                place.set_idle(true);
                if is_last {
                    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(response)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.idle_timeout)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = pin!(connection);
        // The result is ignored: a client may close its connection at any time.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = sleep(limits.first_request_timeout.saturating_sub(begin.elapsed())) => {
                if !request_seen.load(Ordering::Relaxed) {
                    return;
                }
            }
            () = stop.cancelled() => {}
        }
        // Only the connection of a client that does not read its responses is still open after all of these.
        let limit = limits.max_age + limits.idle_timeout + limits.request_timeout;
        tokio::select! {
            _ = timeout(limit, connection.as_mut()) => return,
            () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        let _ = timeout(limits.request_timeout, connection).await;
    }
}

async fn handle_with_timeout<S, F>(limit: Duration, handler: S, request: Request<Incoming>) -> HttpResponse
where
    S: Fn(Request<Incoming>) -> F,
    F: Future<Output = HttpResponse>,
{
    let response = AssertUnwindSafe(async move { handler(request).await }).catch_unwind();
    match timeout(limit, response).await {
        Ok(Ok(response)) => response,
        Ok(Err(_)) => text_response(StatusCode::INTERNAL_SERVER_ERROR, "internal error\n".to_owned()),
        Err(_) => text_response(StatusCode::SERVICE_UNAVAILABLE, "the request took too long\n".to_owned()),
    }
}

pub fn text_response(status: StatusCode, body: String) -> HttpResponse {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}
