//! A TLS server in the role of the API server: it records committed requests, and tests send the events of its watches.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use futures::stream;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Pki;

#[derive(Clone, Debug)]
pub(super) struct Committed {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    pub(super) body: String,
}

/// The server's end of a watch.
pub(super) type Feed = mpsc::UnboundedSender<Bytes>;

#[derive(Default)]
struct ServerState {
    committed: watch::Sender<Vec<Committed>>,
    feeds: watch::Sender<Vec<Feed>>,
    connections: AtomicUsize,
}

pub(super) struct ApiServer {
    pub(super) address: SocketAddr,
    shared: Arc<ServerState>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl ApiServer {
    pub(super) async fn start(pki: &Pki, address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = TlsAcceptor::from(pki.server());
        let (tasks, stop, shared) = (TaskTracker::new(), CancellationToken::new(), Arc::<ServerState>::default());
        let accept = {
            let (tasks, stop, shared) = (tasks.clone(), stop.clone(), Arc::clone(&shared));
            async move {
                while let Ok((tcp, _)) = listener.accept().await {
                    tcp.set_nodelay(true).unwrap();
                    shared.connections.fetch_add(1, Ordering::Relaxed);
                    let (acceptor, shared) = (acceptor.clone(), Arc::clone(&shared));
                    let connection = async move {
                        let Ok(tls) = acceptor.accept(tcp).await else { return };
                        let service = service_fn(|request| handle(Arc::clone(&shared), request));
                        let _ = http1::Builder::new().serve_connection(TokioIo::new(tls), service).await;
                    };
                    tasks.spawn(stop.clone().run_until_cancelled_owned(connection));
                }
            }
        };
        tasks.spawn(stop.clone().run_until_cancelled_owned(accept));
        Self { address, shared, tasks, stop }
    }

    /// Like `kill -9`: closes all connections immediately.
    pub(super) async fn kill(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Waits until all connections are closed and only the listener is left.
    pub(super) async fn wait_no_connections(&self) {
        while self.tasks.len() > 1 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    /// The number of connections since the start.
    pub(super) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Ends all watches whose feeds the test has dropped, because this drops the other reference.
    pub(super) fn forget_feeds(&self) {
        self.shared.feeds.send_replace(Vec::new());
    }

    pub(super) fn log(&self) -> watch::Receiver<Vec<Committed>> {
        self.shared.committed.subscribe()
    }

    pub(super) fn committed(&self) -> Vec<Committed> {
        self.shared.committed.borrow().clone()
    }

    pub(super) fn committed_bodies(&self) -> Vec<String> {
        self.committed().into_iter().map(|request| request.body).collect()
    }

    /// Waits until the n-th watch (from 0) is open and returns its feed.
    pub(super) async fn feed(&self, n: usize) -> Feed {
        self.shared.feeds.subscribe().wait_for(|all| all.len() > n).await.unwrap()[n].clone()
    }
}

async fn handle(
    shared: Arc<ServerState>,
    request: Request<Incoming>,
) -> Result<Response<UnsyncBoxBody<Bytes, Infallible>>, hyper::Error> {
    let (parts, body) = request.into_parts();
    let body = String::from_utf8(body.collect().await?.to_bytes().to_vec()).unwrap();
    let created = parts.method == Method::POST;
    let watching = parts.uri.query().is_some_and(|query| query.contains("watch=true"));
    let answer = format!("answer to {body}");
    shared.committed.send_modify(|all| {
        all.push(Committed { method: parts.method, uri: parts.uri, headers: parts.headers, body });
    });
    if watching {
        let (feed, events) = mpsc::unbounded_channel();
        shared.feeds.send_modify(|all| all.push(feed));
        let frames = stream::unfold(events, |mut events| async {
            let event = events.recv().await?;
            Some((Ok(Frame::data(event)), events))
        });
        return Ok(Response::new(StreamBody::new(frames).boxed_unsync()));
    }
    let mut response = Response::new(Full::from(answer).boxed_unsync());
    if created {
        *response.status_mut() = StatusCode::CREATED;
    }
    Ok(response)
}
