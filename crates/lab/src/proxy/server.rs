//! The client's side: accepts connections, terminates TLS, and can freeze or reset a connection as a network would.

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

/// After `accept` fails (out of file descriptors), so that the loop does not spin until it succeeds again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Above the API server's own limit: requests that a fault holds must not use up the streams of those it does not.
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
                tracing::warn!(%error, "the fault proxy could not accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// A client's connection, as its requests see it.
#[derive(Clone)]
pub(super) struct ClientLink {
    gone: CancellationToken,
    abort: Arc<AtomicBool>,
}

impl ClientLink {
    /// Ends the connection with a TCP reset, and every request on it.
    pub(super) fn reset(&self) {
        self.abort.store(true, Ordering::Release);
        self.gone.cancel();
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.is_cancelled()
    }
}

async fn serve(tcp: TcpStream, tls: TlsAcceptor, core: Arc<Core>, client: ClientLink, tasks: TaskTracker) {
    // Dropped last: streams that ended before the connection would say so to the client, as a dead server cannot.
    let streams = Streams { tasks, ended: CancellationToken::new() };
    let _ended = streams.ended.clone().drop_guard();
    let socket = ClientSocket { tcp, abort: Arc::clone(&client.abort) };
    let connection = async {
        if let Err(error) = socket.tcp.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        match tls.accept(socket).await {
            Ok(stream) => converse(stream, &core, &client, streams).await,
            Err(error) => tracing::debug!(%error, "TLS handshake with a client"),
        }
    };
    through_partitions(connection, &core, &client).await;
}

/// A frozen connection is one that nobody polls: the kernel keeps what arrives, and all goes on when it thaws.
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

async fn converse(stream: TlsStream<ClientSocket>, core: &Arc<Core>, client: &ClientLink, streams: Streams) {
    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let io = TokioIo::new(stream);
    let service = service_fn(|request| {
        let (core, client) = (Arc::clone(core), client.clone());
        async move { core.answer(&client, request).await }
    });
    let ended = if http2 {
        conn::http2::Builder::new(streams).max_concurrent_streams(MAX_STREAMS).serve_connection(io, service).await
    } else {
        conn::http1::Builder::new().serve_connection(io, service).await
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client's connection ended");
    }
}

/// Runs the streams of one HTTP/2 connection, which hyper makes tasks of, no longer than the connection.
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

/// A socket that can be closed by a reset, though it is buried in TLS and HTTP by then.
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
