//! What is answered on three paths: 200 or 500, and 404 elsewhere.

use std::{sync::Arc, time::Duration};

use http::{Method, StatusCode, header};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::Health;
use crate::{
    metrics::Metrics,
    server::{self, Answer, Limits, text},
    tls::Acceptor,
};

const LIMITS: Limits = Limits {
    connections: 64,
    silence: Duration::from_secs(10),
    idle: Duration::from_secs(10),
    request: Duration::from_secs(10),
    age: Duration::from_secs(60),
};

/// What a listener serves.
#[derive(Clone, Default)]
pub struct Routes {
    pub health: Option<Arc<Health>>,
    pub metrics: Option<Arc<Metrics>>,
}

/// Serves until `stop`; without TLS in plain text.
pub async fn serve(listener: TcpListener, tls: Option<Acceptor>, routes: Routes, stop: CancellationToken) {
    let answer = move |request: http::Request<_>| {
        let response = answer(&routes, request.method(), request.uri().path());
        async move { response }
    };
    server::serve(listener, tls, LIMITS, answer, stop).await;
}

fn answer(routes: &Routes, method: &Method, path: &str) -> Answer {
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

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;

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
        let server = tokio::spawn(serve(listener, None, routes, stop.clone()));

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
