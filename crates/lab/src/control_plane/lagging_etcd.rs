//! A proxy in front of etcd that delays what an API server hears about changes.
//!
//! Several API servers of a cluster do not hear of a change at the same time: each has its own watches and caches. The
//! second API server of a lab reads and writes etcd through this proxy. It forwards all requests (gRPC is HTTP/2) at
//! once, and delays the events of watches. Their order stays the same, so that the caches of the API server remain
//! consistent.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use anyhow::{Context, Result};
use bytes::{Buf, Bytes, BytesMut};
use futures::{StreamExt, stream};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    client, server,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::Instant,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

/// How late an API server hears of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiServerLag {
    pub delay: Duration,
    pub scope: LagScope,
}

/// The changes that an API server hears of late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LagScope {
    /// Those that decide which other servers the API server calls, and whom it trusts: webhook configurations and
    /// APIServices.
    CalledServers,
    /// All changes.
    Everything,
}

impl LagScope {
    /// The text in the keys of the objects.
    fn keys(self) -> &'static [&'static str] {
        match self {
            LagScope::CalledServers => &[
                "/registry/validatingwebhookconfigurations/",
                "/registry/mutatingwebhookconfigurations/",
                "/registry/apiregistration.k8s.io/apiservices/",
            ],
            LagScope::Everything => &["/registry/"],
        }
    }

    /// Whether a response to a watch contains the event of such a change. Keys are plain text in protobuf.
    fn contains_event(self, message: &[u8]) -> bool {
        self.keys().iter().any(|key| message.windows(key.len()).any(|window| window == key.as_bytes()))
    }
}

/// A running proxy. Dropping it closes its listener and all its connections.
pub(super) struct LaggingEtcd {
    _stop: DropGuard,
}

/// The same limits as etcd's, so that the proxy is not the bottleneck.
const MAX_STREAMS: u32 = 10_000;
const WINDOW: u32 = 4 << 20;
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
const WATCH: &str = "/etcdserverpb.Watch/Watch";

type EtcdBody = UnsyncBoxBody<Bytes, hyper::Error>;

impl LaggingEtcd {
    pub(super) async fn start(listen: SocketAddr, etcd: SocketAddr, lag: ApiServerLag) -> Result<Self> {
        let listener =
            TcpListener::bind(listen).await.with_context(|| format!("the proxy of etcd cannot listen on {listen}"))?;
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let stopped = stop.clone();
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            loop {
                let Ok((connection, _)) = listener.accept().await else {
                    // No file descriptors are left. Without a pause the loop would spin.
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                };
                tasks.spawn(stopped.clone().run_until_cancelled_owned(async move {
                    if let Err(error) = serve(connection, etcd, lag).await {
                        tracing::debug!("a connection to etcd failed: {error:#}");
                    }
                }));
            }
        }));
        Ok(LaggingEtcd { _stop: stop.drop_guard() })
    }
}

/// Serves one connection of the API server with one connection to etcd. Both end together.
async fn serve(api_server: TcpStream, etcd: SocketAddr, lag: ApiServerLag) -> Result<()> {
    let upstream = TcpStream::connect(etcd).await.context("connecting to etcd")?;
    for stream in [&api_server, &upstream] {
        stream.set_nodelay(true).context("setting TCP_NODELAY")?;
    }
    let (sender, connection) = client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .handshake(TokioIo::new(upstream))
        .await
        .context("HTTP/2 handshake with etcd")?;
    let service = service_fn(|request: Request<Incoming>| {
        let mut sender = sender.clone();
        async move {
            let is_watch = request.uri().path() == WATCH;
            let response = match sender.send_request(request).await {
                Ok(response) if is_watch => response.map(|body| delayed(body, lag)),
                Ok(response) => response.map(BodyExt::boxed_unsync),
                Err(error) => {
                    tracing::debug!("a request to etcd failed: {error:#}");
                    unavailable()
                }
            };
            Ok::<_, Infallible>(response)
        }
    });
    let serving = server::conn::http2::Builder::new(TokioExecutor::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .serve_connection(TokioIo::new(api_server), service);
    tokio::select! {
        ended = serving => ended.context("serving the API server"),
        ended = connection => ended.context("the connection to etcd"),
    }
}

fn unavailable() -> Response<EtcdBody> {
    let mut response = Response::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

/// The body of a watch, message by message. Messages without a delayed event pass at once, unless an earlier message
/// waits.
fn delayed(mut body: Incoming, lag: ApiServerLag) -> EtcdBody {
    let (sender, receiver) = mpsc::unbounded_channel::<(Instant, Result<Frame<Bytes>, hyper::Error>)>();
    tokio::spawn(async move {
        let mut release = Instant::now();
        let mut messages = GrpcMessages::default();
        loop {
            let frame = tokio::select! {
                frame = body.frame() => frame,
                () = sender.closed() => return,
            };
            match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => {
                    for message in messages.add(&data) {
                        let delay = if lag.scope.contains_event(&message) { lag.delay } else { Duration::ZERO };
                        release = release.max(Instant::now() + delay);
                        let _ = sender.send((release, Ok(Frame::data(message))));
                    }
                }
                // Trailers and errors are the end of the body.
                Some(Ok(Err(trailers))) => {
                    let _ = sender.send((release, Ok(trailers)));
                    return;
                }
                Some(Err(error)) => {
                    let _ = sender.send((release, Err(error)));
                    return;
                }
                None => return,
            }
        }
    });
    let frames = stream::unfold(receiver, |mut receiver| async move {
        let (release, frame) = receiver.recv().await?;
        tokio::time::sleep_until(release).await;
        Some((frame, receiver))
    });
    StreamBody::new(frames.boxed()).boxed_unsync()
}

/// The messages of a gRPC stream. A frame of HTTP/2 may contain several messages, or a part of one.
#[derive(Default)]
struct GrpcMessages(BytesMut);

/// A byte that says whether the message is compressed, and its length.
const MESSAGE_HEADER: usize = 5;

impl GrpcMessages {
    /// The complete messages, with their headers.
    fn add(&mut self, data: &[u8]) -> Vec<Bytes> {
        self.0.extend_from_slice(data);
        let mut messages = Vec::new();
        while let Some(mut length) = self.0.get(1..MESSAGE_HEADER) {
            let length = MESSAGE_HEADER + length.get_u32() as usize;
            if self.0.len() < length {
                break;
            }
            messages.push(self.0.split_to(length).freeze());
        }
        messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str) -> Vec<u8> {
        let length = u32::try_from(text.len()).unwrap();
        [&[0], length.to_be_bytes().as_slice(), text.as_bytes()].concat()
    }

    #[test]
    fn messages_are_assembled_from_any_parts() {
        let stream = [message("one"), message(""), message("three")].concat();
        for size in 1..=stream.len() {
            let mut messages = GrpcMessages::default();
            let found: Vec<Bytes> = stream.chunks(size).flat_map(|part| messages.add(part)).collect();
            assert_eq!(found, [message("one"), message(""), message("three")], "parts of {size} bytes");
        }
    }

    #[test]
    fn only_events_of_the_scope_are_delayed() {
        let event = |key: &str| message(&format!("\u{1}{key}\u{2}value"));
        let webhook = event("/registry/validatingwebhookconfigurations/virt-api-validator");
        let pod = event("/registry/pods/default/a");
        let progress = message("\u{1}revision");
        let delayed = |scope: LagScope| [&webhook, &pod, &progress].map(|message| scope.contains_event(message));
        assert_eq!(delayed(LagScope::CalledServers), [true, false, false]);
        assert_eq!(delayed(LagScope::Everything), [true, true, false]);
    }
}
