//! The HTTP handler: status 200 or 500 on three paths, and 404 on all others. Metrics may require a permission.

use std::{sync::Arc, time::Duration};

use http::{HeaderValue, Method, StatusCode, header, request::Parts};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::Health;
use crate::{
    authorization::Authorizer,
    metrics::{Metrics, MetricsFormat},
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

/// The path of the metrics.
pub(crate) const METRICS: &str = "/metrics";

/// The paths that a listener serves.
#[derive(Clone, Default)]
pub(crate) struct Routes {
    pub(crate) health: Option<Arc<Health>>,
    pub(crate) metrics: Option<Arc<Metrics>>,
    /// Decides who reads the metrics. `None`: every client.
    pub(crate) authorizer: Option<Arc<Authorizer>>,
}

/// Serves until `stop`, over TLS or in plain text.
pub(crate) async fn serve(listener: TcpListener, tls: Option<Acceptor>, routes: Routes, stop: CancellationToken) {
    let handler = move |request: http::Request<_>| {
        let (routes, parts) = (routes.clone(), request.into_parts().0);
        async move { respond(&routes, &parts).await }
    };
    server::serve(listener, tls, LIMITS, handler, stop).await;
}

async fn respond(routes: &Routes, request: &Parts) -> HttpResponse {
    let is_read = request.method == Method::GET || request.method == Method::HEAD;
    match (request.uri.path(), &routes.health, &routes.metrics) {
        ("/healthz", Some(health), _) if is_read => health_response(health.liveness_error()),
        ("/readyz", Some(health), _) if is_read => health_response(health.readiness_error()),
        (METRICS, _, Some(metrics)) if is_read => {
            if let Some(authorizer) = &routes.authorizer
                && let Err(refusal) = authorizer.authorize(&request.headers).await
            {
                return refusal;
            }
            metrics_response(metrics, MetricsFormat::negotiate(&request.headers))
        }
        _ => text_response(StatusCode::NOT_FOUND, "not found\n".to_owned()),
    }
}

fn health_response(error: Option<String>) -> HttpResponse {
    match error {
        None => text_response(StatusCode::OK, "ok\n".to_owned()),
        Some(error) => text_response(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

fn metrics_response(metrics: &Metrics, format: MetricsFormat) -> HttpResponse {
    let Ok(body) = metrics.encode_as(format) else {
        return text_response(StatusCode::INTERNAL_SERVER_ERROR, "cannot encode the metrics\n".to_owned());
    };
    let mut response = text_response(StatusCode::OK, body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
    headers.insert(header::VARY, HeaderValue::from_static("Accept"));
    response
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
        get_as(address, path, "*/*").await
    }

    async fn get_as(address: SocketAddr, path: &str, accept: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: h\r\nAccept: {accept}\r\nConnection: close\r\n\r\n");
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
        let routes = Routes { health: Some(health), metrics: Some(Arc::new(Metrics::new("test"))), authorizer: None };
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, None, routes, stop.clone()));

        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let response = get(address, "/readyz").await;
        assert!(response.starts_with("HTTP/1.1 500") && response.contains("waiting for machines"), "{response}");
        ready.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/metrics").await.contains("test_leader 0"));
        for (accept, content_type, described, ends_with_mark) in [
            ("*/*", "text/plain; version=0.0.4; charset=utf-8", "test_events_dropped_total", false),
            (
                "application/openmetrics-text",
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
                "test_events_dropped",
                true,
            ),
        ] {
            let response = get_as(address, "/metrics", accept).await;
            assert!(response.contains(&format!("content-type: {content_type}\r\n")), "{response}");
            assert!(response.contains(&format!("# TYPE {described} counter\n")), "{response}");
            assert_eq!(response.ends_with("# EOF\n"), ends_with_mark, "{response}");
        }
        assert!(get(address, "/elsewhere").await.starts_with("HTTP/1.1 404"));
        stop.cancel();
        server.await.unwrap();
    }

    #[tokio::test]
    async fn an_authorizer_refuses_metrics_and_no_other_path() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Routes {
            health: Some(Arc::default()),
            metrics: Some(Arc::new(Metrics::new("test"))),
            authorizer: Some(Arc::new(Authorizer::new(METRICS))),
        };
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, None, routes, stop.clone()));
        let refused = get(address, METRICS).await;
        assert!(refused.starts_with("HTTP/1.1 401") && !refused.contains("test_leader"), "{refused}");
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/elsewhere").await.starts_with("HTTP/1.1 404"));
        stop.cancel();
        server.await.unwrap();
    }
}
