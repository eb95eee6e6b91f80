//! Connections of clients: accepts them, terminates TLS, and freezes or resets them to simulate network failures.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use hyper::{rt::Executor, server::conn, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{Partition, forward::Core};

/// The delay after `accept` fails (no file descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Higher than the API server's limit, so that requests held by a fault do not use up the streams of other requests.
const MAX_STREAMS: u32 = 1000;

pub(super) async fn accept(
    listener: TcpListener,
    tls: TlsAcceptor,
    core: Arc<Core>,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        match listener.accept().await {
            Ok((tcp, _)) => {
                let client = ClientLink { gone: stop.child_token(), abort: Arc::default() };
                let connection = serve(tcp, tls.clone(), Arc::clone(&core), client.clone(), tasks.clone());
                tasks.spawn(client.gone.run_until_cancelled_owned(connection));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The connection of a client, as its requests use it.
#[derive(Clone)]
pub(super) struct ClientLink {
    gone: CancellationToken,
    abort: Arc<AtomicBool>,
}

impl ClientLink {
    /// Closes the connection with a TCP reset, and ends all its requests.
    pub(super) fn reset(&self) {
        self.abort.store(true, Ordering::Release);
        self.gone.cancel();
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.is_cancelled()
    }
}

async fn serve(tcp: TcpStream, tls: TlsAcceptor, core: Arc<Core>, client: ClientLink, tasks: TaskTracker) {
    // Dropped last: a stream that ends before the connection sends a reset to the client, and a dead server does not.
    let streams = Streams { tasks, ended: CancellationToken::new() };
    let _ended = streams.ended.clone().drop_guard();
    let socket = ClientSocket { tcp, abort: Arc::clone(&client.abort) };
    let connection = async {
        if let Err(error) = socket.tcp.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        match tls.accept(socket).await {
            Ok(stream) => serve_http(stream, &core, &client, streams).await,
            Err(error) => tracing::debug!(%error, "TLS handshake with a client"),
        }
    };
    through_partitions(connection, &core, &client).await;
}

/// A frozen connection is not polled: the kernel buffers incoming bytes, and the connection continues after the
/// partition.
async fn through_partitions(connection: impl Future<Output = ()>, core: &Core, client: &ClientLink) {
    let mut partition = core.partition.subscribe();
    let mut connection = std::pin::pin!(connection);
    loop {
        let now = *partition.borrow_and_update();
        match now {
            Partition::Refuse => return client.reset(),
            Partition::BlackHole => {
                if partition.changed().await.is_err() {
                    return;
                }
            }
            Partition::None => tokio::select! {
                biased;
                changed = partition.changed() => if changed.is_err() { return },
                () = &mut connection => return,
            },
        }
    }
}

async fn serve_http(stream: TlsStream<ClientSocket>, core: &Arc<Core>, client: &ClientLink, streams: Streams) {
    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let io = TokioIo::new(stream);
    let service = service_fn(|request| {
        let (core, client) = (Arc::clone(core), client.clone());
        async move { core.handle(&client, request).await }
    });
    let ended = if http2 {
        conn::http2::Builder::new(streams).max_concurrent_streams(MAX_STREAMS).serve_connection(io, service).await
    } else {
        conn::http1::Builder::new().serve_connection(io, service).await
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client connection failed");
    }
}

/// Runs the HTTP/2 streams that hyper spawns as tasks, and ends them with their connection.
#[derive(Clone)]
struct Streams {
    tasks: TaskTracker,
    ended: CancellationToken,
}

impl<F> Executor<F> for Streams
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, stream: F) {
        self.tasks.spawn(self.ended.clone().run_until_cancelled_owned(stream));
    }
}

/// A socket that can be closed with a TCP reset from outside of the TLS and HTTP layers.
struct ClientSocket {
    tcp: TcpStream,
    abort: Arc<AtomicBool>,
}

impl Drop for ClientSocket {
    fn drop(&mut self) {
        if self.abort.load(Ordering::Acquire)
            && let Err(error) = self.tcp.set_zero_linger()
        {
            tracing::debug!(%error, "SO_LINGER");
        }
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
