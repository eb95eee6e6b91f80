//! The way to the API server: a pool of HTTP/1.1 connections over TLS.
//!
//! HTTP/1.1 although the server speaks HTTP/2, because then every request has a connection of its own: breaking one
//! breaks nothing else, and any number of watches fits, where one HTTP/2 connection ends at the server's stream limit.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Idle connections kept. More are closed: the API server would otherwise hold a goroutine for each burst's peak.
const IDLE: usize = 64;

/// These belong to one connection and not to the message. An HTTP/2 message must not carry them.
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

type Connection = http1::SendRequest<Incoming>;

pub(super) struct Upstream {
    pub(super) address: SocketAddr,
    pub(super) name: ServerName<'static>,
    pub(super) tls: TlsConnector,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
    pub(super) idle: Arc<Mutex<Vec<Connection>>>,
}

/// Why there is no response. The two look different to the client of a dead server.
pub(super) enum NoResponse {
    /// Nobody is there: no connection can be had.
    Unreachable(anyhow::Error),
    /// The connection broke during this exchange; whether the request was committed is unknown.
    Broken(hyper::Error),
}

impl Upstream {
    pub(super) async fn send(&self, request: Request<Incoming>) -> Result<Response<Incoming>, NoResponse> {
        let mut request = outbound(request);
        loop {
            let pooled = self.take_idle();
            let reused = pooled.is_some();
            let mut connection = match pooled {
                Some(connection) => connection,
                None => self.connect().await.map_err(NoResponse::Unreachable)?,
            };
            match connection.try_send_request(request).await {
                Ok(mut response) => {
                    strip_hop_by_hop(response.headers_mut());
                    self.give_back(connection);
                    return Ok(response);
                }
                // An idle connection may have been closed under us. A request that comes back was never written, so
                // it may go out again; one that does not might have been committed, and is never repeated.
                Err(mut refused) => match refused.take_message() {
                    Some(unsent) if reused => request = unsent,
                    _ => return Err(NoResponse::Broken(refused.into_error())),
                },
            }
        }
    }

    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle.lock();
        while let Some(connection) = idle.pop() {
            if connection.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    /// The connection is free again once the response's body was read to its end.
    fn give_back(&self, mut connection: Connection) {
        let idle = Arc::clone(&self.idle);
        let task = async move {
            if connection.ready().await.is_ok() {
                let mut idle = idle.lock();
                idle.retain(|connection| !connection.is_closed());
                if idle.len() < IDLE {
                    idle.push(connection);
                }
            }
        };
        self.tasks.spawn(self.stop.clone().run_until_cancelled_owned(task));
    }

    async fn connect(&self) -> anyhow::Result<Connection> {
        let tcp = TcpStream::connect(self.address).await.context("connecting to the API server")?;
        tcp.set_nodelay(true).context("setting TCP_NODELAY")?;
        let tls = self.tls.connect(self.name.clone(), tcp).await.context("TLS handshake with the API server")?;
        let (connection, driver) =
            http1::handshake(TokioIo::new(tls)).await.context("HTTP handshake with the API server")?;
        self.tasks.spawn(self.stop.clone().run_until_cancelled_owned(driver));
        Ok(connection)
    }
}

/// The request as it goes out: origin form, with the host that the client named.
fn outbound(mut request: Request<Incoming>) -> Request<Incoming> {
    if !request.headers().contains_key(header::HOST)
        && let Some(host) = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok())
    {
        request.headers_mut().insert(header::HOST, host);
    }
    let path = request.uri().path_and_query().cloned();
    *request.uri_mut() = path.map_or_else(|| Uri::from_static("/"), Uri::from);
    *request.version_mut() = http::Version::HTTP_11;
    strip_hop_by_hop(request.headers_mut());
    // The body is asked for here already, which is what the client waits for.
    request.headers_mut().remove(header::EXPECT);
    request
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}
