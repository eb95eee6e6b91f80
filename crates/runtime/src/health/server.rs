//! The HTTP handler: status 200 or 500 on three paths, and 404 on all others.

use std::{sync::Arc, time::Duration};

use http::{Method, StatusCode, header};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::Health;
use crate::{
    metrics::Metrics,
    server::{self, HttpResponse, Limits, text_response},
    tls::Acceptor,
};

const LIMITS: Limits = Limits {
    connections: 64,
    first_request_timeout: Duration::from_secs(10),
    idle_timeout: Duration::from_secs(10),
    request_timeout: Duration::from_secs(10),
    max_age: Duration::from_secs(60),
};

/// The paths that a listener serves.
#[derive(Clone, Default)]
pub(crate) struct Routes {
    pub(crate) health: Option<Arc<Health>>,
    pub(crate) metrics: Option<Arc<Metrics>>,
}

/// Serves until `stop`, over TLS or in plain text.
pub(crate) async fn serve(listener: TcpListener, tls: Option<Acceptor>, routes: Routes, stop: CancellationToken) {
    let handler = move |request: http::Request<_>| {
        let response = handle(&routes, request.method(), request.uri().path());
        async move { response }
    };
    server::serve(listener, tls, LIMITS, handler, stop).await;
}

fn handle(routes: &Routes, method: &Method, path: &str) -> HttpResponse {
    let is_read = *method == Method::GET || *method == Method::HEAD;
    let health_response = |error: Option<String>| match error {
        None => text_response(StatusCode::OK, "ok\n".to_owned()),
        Some(error) => text_response(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    };
    match (path, &routes.health, &routes.metrics) {
        ("/healthz", Some(health), _) if is_read => health_response(health.liveness_error()),
        ("/readyz", Some(health), _) if is_read => health_response(health.readiness_error()),
        ("/metrics", _, Some(metrics)) if is_read => match metrics.encode() {
            Ok(body) => {
                let mut response = text_response(StatusCode::OK, body);
                let openmetrics =
                    header::HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
                response.headers_mut().insert(header::CONTENT_TYPE, openmetrics);
                response
            }
            Err(_) => text_response(StatusCode::INTERNAL_SERVER_ERROR, "cannot encode the metrics\n".to_owned()),
        },
        _ => text_response(StatusCode::NOT_FOUND, "not found\n".to_owned()),
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
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn known_paths_respond_with_200_or_500_and_others_with_404() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let health = Arc::new(Health::default());
        let ready = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let flag = ready.clone();
        health.add_readiness_check("machines", move || flag.load(std::sync::atomic::Ordering::Relaxed));
        let routes = Routes { health: Some(health), metrics: Some(Arc::new(Metrics::new("test"))) };
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, None, routes, stop.clone()));

        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let response = get(address, "/readyz").await;
        assert!(response.starts_with("HTTP/1.1 500") && response.contains("waiting for machines"), "{response}");
        ready.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/metrics").await.contains("test_leader 0"));
        assert!(get(address, "/elsewhere").await.starts_with("HTTP/1.1 404"));
        stop.cancel();
        server.await.unwrap();
    }
}
