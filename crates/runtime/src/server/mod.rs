//! A small HTTP server, with or without TLS, in which everything has an end: connections, their silence, each request.
//!
//! A panic is one failed request. A connection is ended between two requests by saying so in an answer, never by
//! hanging up on a client that may be about to send the next.

mod bind;
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
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

pub use bind::{Bind, BindError};

use crate::tls::Acceptor;

pub type Answer = Response<Full<Bytes>>;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// At once. Others wait to be accepted.
    pub connections: usize,
    /// From the beginning of a connection until its first request has come.
    pub silence: Duration,
    /// Between two requests. A client that keeps connections should give up first.
    pub idle: Duration,
    /// For an answer, the reading of the request included.
    pub request: Duration,
    /// After so long a connection's next answer is its last.
    pub age: Duration,
}

/// Serves until `stop`; what is being answered then still is.
pub async fn serve<S, F>(
    listener: TcpListener,
    tls: Option<Acceptor>,
    limits: Limits,
    answer: S,
    stop: CancellationToken,
) where
    S: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let free = Arc::new(Semaphore::new(limits.connections));
    loop {
        let Ok(permit) = free.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, say: asking again at once would only burn time.
                tracing::warn!(error = %error, "a connection could not be accepted");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let conversation = Conversation { limits, answer: answer.clone(), stop: stop.clone(), begin: Instant::now() };
        let tls = tls.clone();
        tokio::spawn(async move {
            conversation.begin(stream, tls).await;
            drop(permit);
        });
    }
}

struct Conversation<S> {
    limits: Limits,
    answer: S,
    stop: CancellationToken,
    begin: Instant,
}

impl<S, F> Conversation<S>
where
    S: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    async fn begin(self, stream: TcpStream, tls: Option<Acceptor>) {
        let Some(tls) = tls else { return self.go_on(stream).await };
        match timeout(self.limits.silence, TlsAcceptor::from(tls.config()).accept(stream)).await {
            Ok(Ok(stream)) => self.go_on(stream).await,
            Ok(Err(error)) => tracing::debug!(error = %error, "a client and this server could not agree on TLS"),
            Err(_) => tracing::debug!("a client did not complete its TLS handshake"),
        }
    }

    async fn go_on(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send) {
        let Self { limits, answer, stop, begin } = self;
        let asked = AtomicBool::new(false);
        let service = service_fn(|request: Request<Incoming>| {
            asked.store(true, Ordering::Relaxed);
            let answered = answer_in_time(limits.request, answer.clone(), request);
            let last = begin.elapsed() > limits.age;
            async move {
                let mut response = answered.await;
                if last {
                    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(response)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.idle)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = pin!(connection);
        // A client that hangs up early is no news.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = sleep(limits.silence.saturating_sub(begin.elapsed())) => {
                if !asked.load(Ordering::Relaxed) {
                    return;
                }
            }
            () = stop.cancelled() => {}
        }
        // Only who does not read its answers is still here when all of these have passed.
        let limit = limits.age + limits.idle + limits.request;
        tokio::select! {
            _ = timeout(limit, connection.as_mut()) => return,
            () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        let _ = timeout(limits.request, connection).await;
    }
}

async fn answer_in_time<S, F>(limit: Duration, answer: S, request: Request<Incoming>) -> Answer
where
    S: Fn(Request<Incoming>) -> F,
    F: Future<Output = Answer>,
{
    let answer = AssertUnwindSafe(async move { answer(request).await }).catch_unwind();
    match timeout(limit, answer).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => {
            text(StatusCode::INTERNAL_SERVER_ERROR, "this request has met a fault of the program\n".to_owned())
        }
        Err(_) => text(StatusCode::SERVICE_UNAVAILABLE, "the answer took too long\n".to_owned()),
    }
}

/// Plain text.
pub fn text(status: StatusCode, body: String) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}
