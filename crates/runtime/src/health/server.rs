//! A small HTTP server for three paths. It answers 200 or 500, and 404 elsewhere.

use std::{
    convert::Infallible,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::Health;
use crate::metrics::Metrics;

const CONNECTIONS: usize = 64;
const CONNECTION_LIMIT: Duration = Duration::from_secs(60);

/// Where to listen: `:8080` is every address of the host, IPv6 and IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bind {
    /// `None`: every address.
    pub address: Option<IpAddr>,
    pub port: u16,
}

#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("{0:?} is not an address to listen on; write it as :8080, 0.0.0.0:8080 or [::]:8080")]
    Malformed(String),
    #[error("port {} is in use: {what} cannot listen on {bind}; choose another address or stop what listens there", bind.port)]
    InUse { bind: Bind, what: &'static str },
    #[error("{what} cannot listen on {bind}: {source}")]
    Other { bind: Bind, what: &'static str, source: std::io::Error },
}

impl FromStr for Bind {
    type Err = BindError;

    fn from_str(text: &str) -> Result<Self, BindError> {
        let malformed = || BindError::Malformed(text.to_owned());
        if let Some(port) = text.strip_prefix(':') {
            return Ok(Self { address: None, port: port.parse().map_err(|_| malformed())? });
        }
        let address: SocketAddr = text.parse().map_err(|_| malformed())?;
        Ok(Self { address: Some(address.ip()), port: address.port() })
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => SocketAddr::new(address, self.port).fmt(f),
            None => write!(f, ":{}", self.port),
        }
    }
}

impl Bind {
    /// `what` says in an error who wanted to listen.
    pub async fn listen(self, what: &'static str) -> Result<TcpListener, BindError> {
        let result = match self.address {
            Some(address) => TcpListener::bind((address, self.port)).await,
            // A host without IPv6 cannot listen on its wildcard.
            None => match TcpListener::bind((Ipv6Addr::UNSPECIFIED, self.port)).await {
                Err(error) if error.kind() != std::io::ErrorKind::AddrInUse => {
                    TcpListener::bind((Ipv4Addr::UNSPECIFIED, self.port)).await
                }
                bound => bound,
            },
        };
        result.map_err(|source| match source.kind() {
            std::io::ErrorKind::AddrInUse => BindError::InUse { bind: self, what },
            _ => BindError::Other { bind: self, what, source },
        })
    }
}

/// What a listener serves.
#[derive(Clone, Default)]
pub struct Routes {
    pub health: Option<Arc<Health>>,
    pub metrics: Option<Arc<Metrics>>,
}

/// Serves until `stop`.
pub async fn serve(listener: TcpListener, routes: Routes, stop: CancellationToken) {
    let free = Arc::new(Semaphore::new(CONNECTIONS));
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
        let routes = routes.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let response = answer(&routes, request.method(), request.uri().path());
                async move { Ok::<_, Infallible>(response) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(Duration::from_secs(10))
                .serve_connection(TokioIo::new(stream), service);
            // A prober that hangs up early is no news.
            let _ = timeout(CONNECTION_LIMIT, connection).await;
            drop(permit);
        });
    }
}

fn answer(routes: &Routes, method: &Method, path: &str) -> Response<Full<Bytes>> {
    let read = *method == Method::GET || *method == Method::HEAD;
    let verdict = |trouble: Option<String>| match trouble {
        None => text(StatusCode::OK, "ok\n".to_owned()),
        Some(trouble) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{trouble}\n")),
    };
    match (path, &routes.health, &routes.metrics) {
        ("/healthz", Some(health), _) if read => verdict(health.sickness()),
        ("/readyz", Some(health), _) if read => verdict(health.not_ready()),
        ("/metrics", _, Some(metrics)) if read => match metrics.encode() {
            Ok(body) => {
                let mut response = text(StatusCode::OK, body);
                let openmetrics =
                    header::HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
                response.headers_mut().insert(header::CONTENT_TYPE, openmetrics);
                response
            }
            Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, "the metrics could not be written\n".to_owned()),
        },
        _ => text(StatusCode::NOT_FOUND, "not found\n".to_owned()),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let plain = header::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;

    #[test]
    fn addresses_as_kubernetes_programs_write_them() {
        assert_eq!(":8080".parse::<Bind>().unwrap(), Bind { address: None, port: 8080 });
        assert_eq!("0.0.0.0:8081".parse::<Bind>().unwrap().to_string(), "0.0.0.0:8081");
        assert_eq!("[::]:80".parse::<Bind>().unwrap().to_string(), "[::]:80");
        for bad in ["", "8080", ":", ":99999", "localhost:80", "0.0.0.0", ":80 "] {
            let error = bad.parse::<Bind>().unwrap_err().to_string();
            assert!(error.contains("write it as :8080") && error.contains(bad), "{error}");
        }
    }

    #[tokio::test]
    async fn a_port_in_use_is_said_so() {
        let first = Bind { address: Some(Ipv4Addr::LOCALHOST.into()), port: 0 }.listen("the test").await.unwrap();
        let port = first.local_addr().unwrap().port();
        let second = Bind { address: Some(Ipv4Addr::LOCALHOST.into()), port };
        let error = second.listen("the metrics server").await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("port {port} is in use: the metrics server")), "{error}");
    }

    async fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn answers_200_or_500_and_404_elsewhere() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let health = Arc::new(Health::default());
        let ready = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let flag = ready.clone();
        health.require("the cache", move || flag.load(std::sync::atomic::Ordering::Relaxed));
        let routes = Routes { health: Some(health), metrics: Some(Arc::new(Metrics::new("test"))) };
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, routes, stop.clone()));

        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let answer = get(address, "/readyz").await;
        assert!(answer.starts_with("HTTP/1.1 500") && answer.contains("waiting for the cache"), "{answer}");
        ready.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/metrics").await.contains("test_leader 0"));
        assert!(get(address, "/elsewhere").await.starts_with("HTTP/1.1 404"));
        stop.cancel();
        server.await.unwrap();
    }
}
