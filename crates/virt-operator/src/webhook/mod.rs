//! The admission webhooks for KubeVirt resources: the API server calls them before it creates, updates or deletes one.
//! The server runs on every replica, also on those that do not lead.

mod admit;
mod client;
mod client_ca;
mod review;
mod server_tls;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use kube::Client;
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::sync::CancellationToken;
use vitivirt_runtime::{
    program::Context,
    server::{self, Bind, BindError, HttpResponse, Limits, text_response},
};

use admit::{WebhookEndpoint, admit};
use client::AdmissionClient;

pub(crate) use server_tls::ServerTls;

/// The target port of the webhook Service.
pub(crate) const PORT: u16 = 8444;

/// The API server waits ten seconds for a response, and keeps an idle connection open for ninety.
const LIMITS: Limits = Limits {
    connections: 128,
    first_request_timeout: Duration::from_secs(5),
    idle_timeout: Duration::from_secs(120),
    request_timeout: Duration::from_secs(8),
    max_age: Duration::from_secs(600),
};
/// Enough for two objects of the largest size that etcd accepts, and the request around them.
const MAX_BODY_BYTES: usize = 4 * 1024 * 1024;
/// The limit for the bodies of all requests in progress together.
const MAX_BUFFERED_BYTES: usize = 2 * MAX_BODY_BYTES;

/// Starts the webhook server. It runs until the process ends.
pub(crate) async fn start(context: &Context, bind: Bind, server_tls: &ServerTls) -> Result<(), BindError> {
    let listener = Bind { port: PORT, ..bind }.listen("the webhook server").await?;
    let client = context.clients.unlimited.clone();
    let client_ca = client_ca::watch_client_ca(client.clone(), server_tls.clone(), context.shutdown.clone());
    context.spawn("the watch of the API server's client CA", client_ca);
    let server = WebhookServer::new(client, server_tls.clone());
    // The server ignores the shutdown signal and runs until the process ends: the API server may send requests until it
    // has noticed that this replica stops.
    context.spawn("the webhook server", server.serve(listener, CancellationToken::new()));
    Ok(())
}

struct WebhookServer {
    client: AdmissionClient,
    server_tls: ServerTls,
    /// One permit for each byte that may be buffered.
    buffer: Arc<Semaphore>,
}

impl WebhookServer {
    fn new(client: Client, server_tls: ServerTls) -> Self {
        let buffer = Arc::new(Semaphore::new(MAX_BUFFERED_BYTES));
        Self { client: AdmissionClient::new(client), server_tls, buffer }
    }

    async fn serve(self, listener: TcpListener, stop: CancellationToken) {
        self.serve_with_limits(LIMITS, listener, stop).await;
    }

    async fn serve_with_limits(self, limits: Limits, listener: TcpListener, stop: CancellationToken) {
        let tls = self.server_tls.webhooks();
        let server = Arc::new(self);
        let respond = move |request| {
            let server = server.clone();
            async move { server.respond(request).await.unwrap_or_else(|error| error) }
        };
        server::serve(listener, Some(tls), limits, respond, stop).await;
    }

    /// The error is the HTTP response if there is no decision, usually because the request is not a valid
    /// AdmissionReview.
    async fn respond(&self, request: http::Request<Incoming>) -> Result<HttpResponse, HttpResponse> {
        let path = request.uri().path();
        let Some(endpoint) = WebhookEndpoint::from_path(path) else {
            return Err(plain_text(StatusCode::NOT_FOUND, "no webhook has this path"));
        };
        if request.method() != Method::POST {
            return Err(plain_text(StatusCode::METHOD_NOT_ALLOWED, "unsupported method; supported values: POST"));
        }
        let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let content = content_type.and_then(|content| content.split(';').next()).unwrap_or_default().trim();
        if content != "application/json" {
            let message = format!("unsupported content type {content:?}; supported values: application/json");
            return Err(plain_text(StatusCode::BAD_REQUEST, &message));
        }
        let (body, _buffer) = self.read_body(request.into_body()).await?;
        let bad_request = |message: String| plain_text(StatusCode::BAD_REQUEST, &message);
        let request = review::parse_review(&body).map_err(bad_request)?;
        drop(body);
        endpoint.validate_request(&request).map_err(bad_request)?;
        let uid = request.uid.clone();
        let decision = admit(&self.client, endpoint, request).await;
        if let [first, ..] = decision.refusals.as_slice() {
            let (operation, refusals) = (endpoint.operation(), decision.refusals.len());
            tracing::info!(operation, refusals, cause = %first, "admission request denied");
        }
        let body = decision.to_json(&uid).map_err(|error| {
            let message = format!("response cannot be serialized: {error}");
            plain_text(StatusCode::INTERNAL_SERVER_ERROR, &message)
        })?;
        let mut response = HttpResponse::new(Full::new(Bytes::from(body)));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }

    /// Reads the body and waits for buffer space for each part of it. A client that sends slowly occupies only the
    /// space of the bytes that have arrived.
    async fn read_body(&self, mut body: Incoming) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), HttpResponse> {
        let incomplete = || plain_text(StatusCode::BAD_REQUEST, "request body is incomplete");
        let too_large = || {
            let message = format!("request body is larger than {MAX_BODY_BYTES} bytes");
            plain_text(StatusCode::PAYLOAD_TOO_LARGE, &message)
        };
        if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
            return Err(too_large());
        }
        let mut read = Vec::new();
        let mut buffer: Option<OwnedSemaphorePermit> = None;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| incomplete())?.into_data() else { continue };
            if read.len() + data.len() > MAX_BODY_BYTES {
                return Err(too_large());
            }
            let amount = u32::try_from(data.len()).unwrap_or(u32::MAX);
            let permit = self.buffer.clone().acquire_many_owned(amount).await.map_err(|_| incomplete())?;
            match &mut buffer {
                Some(buffer) => buffer.merge(permit),
                None => buffer = Some(permit),
            }
            read.extend_from_slice(&data);
        }
        Ok((read, buffer))
    }
}

fn plain_text(status: StatusCode, message: &str) -> HttpResponse {
    text_response(status, format!("{message}\n"))
}
