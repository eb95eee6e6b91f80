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
use serde_json::json;
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
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
/// Bodies up to this size need no space in the buffer: the number of connections limits them. Large bodies that never
/// arrive completely therefore do not stop reviews of usual size.
const SMALL_BODY_BYTES: usize = 64 * 1024;
/// The limit for the larger bodies of all requests in progress together.
const MAX_BUFFERED_BYTES: usize = 2 * MAX_BODY_BYTES;
/// For space in the buffer, and again for the rest of a body that gets none.
const BUFFER_TIMEOUT: Duration = Duration::from_secs(1);
const RETRY_AFTER_SECONDS: u32 = 1;

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
    /// One permit for each byte of larger bodies that may be buffered.
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

    /// Reads the body. A body that is not small waits for buffer space for all of it, so that no two requests wait for
    /// the space of each other. Without a Content-Length only a small one is accepted. The API server always sends one.
    async fn read_body(&self, mut body: Incoming) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), HttpResponse> {
        let length = body.size_hint().exact().map(|length| usize::try_from(length).unwrap_or(usize::MAX));
        let buffer = match length {
            Some(length) if length > MAX_BODY_BYTES => {
                let message = format!("request body is larger than {MAX_BODY_BYTES} bytes");
                return Err(plain_text(StatusCode::PAYLOAD_TOO_LARGE, &message));
            }
            Some(length) if length > SMALL_BODY_BYTES => {
                let Some(buffer) = self.reserve(length).await else {
                    // A client that is still sending when the connection closes may not read the response.
                    let rest = async { while let Some(Ok(_)) = body.frame().await {} };
                    let _ = timeout(BUFFER_TIMEOUT, rest).await;
                    return Err(too_many_requests());
                };
                Some(buffer)
            }
            Some(_) | None => None,
        };
        let mut read = Vec::with_capacity(length.unwrap_or_default());
        while let Some(frame) = body.frame().await {
            let incomplete = |_| plain_text(StatusCode::BAD_REQUEST, "request body is incomplete");
            let Ok(data) = frame.map_err(incomplete)?.into_data() else { continue };
            if length.is_none() && read.len() + data.len() > SMALL_BODY_BYTES {
                let message = format!("request body is larger than {SMALL_BODY_BYTES} bytes and has no Content-Length");
                return Err(plain_text(StatusCode::LENGTH_REQUIRED, &message));
            }
            read.extend_from_slice(&data);
        }
        Ok((read, buffer))
    }

    /// Waits a short time for buffer space.
    async fn reserve(&self, length: usize) -> Option<OwnedSemaphorePermit> {
        let permits = self.buffer.clone().acquire_many_owned(u32::try_from(length).ok()?);
        timeout(BUFFER_TIMEOUT, permits).await.ok()?.ok()
    }
}

/// The API server sends the request again after the time in the header. After its last attempt it shows the message of
/// the Status to the user.
fn too_many_requests() -> HttpResponse {
    let status = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "TooManyRequests", "code": 429,
        "message": "virt-operator is receiving too many large admission requests; nothing was changed, try again",
        "details": {"retryAfterSeconds": RETRY_AFTER_SECONDS},
    });
    let mut response = text_response(StatusCode::TOO_MANY_REQUESTS, status.to_string());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECONDS));
    response
}

fn plain_text(status: StatusCode, message: &str) -> HttpResponse {
    text_response(status, format!("{message}\n"))
}
