//! Connections to the API server: a pool of HTTP/1.1 connections over TLS.
//!
//! The pool uses HTTP/1.1, although the server supports HTTP/2, so that every request has its own connection: a broken
//! connection affects one request only, and the number of watches is not limited by the server's maximum of streams.

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

/// The maximum number of idle connections. Each one costs the API server a goroutine.
const IDLE: usize = 64;

/// Headers of a connection, not of the message. An HTTP/2 message must not contain them.
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

type UpstreamConnection = http1::SendRequest<Incoming>;

pub(super) struct Upstream {
    pub(super) address: SocketAddr,
    pub(super) name: ServerName<'static>,
    pub(super) tls: TlsConnector,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
    pub(super) idle: Arc<Mutex<Vec<UpstreamConnection>>>,
}

/// Why there is no response. The client sees a different error for each.
pub(super) enum NoResponse {
    /// The proxy cannot connect to the API server.
    Unreachable(anyhow::Error),
    /// The connection was closed during this request. Whether the API server committed it is unknown.
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
                // The server may have closed an idle connection. A request that hyper returns was never written, so it
                // can be sent again. Any other request may have been committed and must not be repeated.
                Err(mut error) => match error.take_message() {
                    Some(unsent) if reused => request = unsent,
                    _ => return Err(NoResponse::Broken(error.into_error())),
                },
            }
        }
    }

    fn take_idle(&self) -> Option<UpstreamConnection> {
        let mut idle = self.idle.lock();
        while let Some(connection) = idle.pop() {
            if connection.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    /// Returns the connection to the pool after the body of the response was read to its end.
    fn give_back(&self, mut connection: UpstreamConnection) {
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

    async fn connect(&self) -> anyhow::Result<UpstreamConnection> {
        let tcp = TcpStream::connect(self.address).await.context("connecting to the API server")?;
        tcp.set_nodelay(true).context("setting TCP_NODELAY")?;
        let tls = self.tls.connect(self.name.clone(), tcp).await.context("TLS handshake with the API server")?;
        let (connection, driver) =
            http1::handshake(TokioIo::new(tls)).await.context("HTTP handshake with the API server")?;
        self.tasks.spawn(self.stop.clone().run_until_cancelled_owned(driver));
        Ok(connection)
    }
}

/// The request for the API server: in origin form, with the host of the client's request.
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
    // The proxy requests the body from the client itself, so the API server need not answer `100 Continue`.
    request.headers_mut().remove(header::EXPECT);
    request
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}
