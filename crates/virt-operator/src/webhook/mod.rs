//! What the API server asks before it creates, changes or deletes a KubeVirt resource, and what the answers are served
//! with. It runs on every replica, whoever leads.

mod admit;
mod authority;
mod live;
mod review;
mod serving;
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

use admit::{Check, admit};
use live::Cluster;

pub(crate) use serving::Serving;

/// The one that the service of the webhooks points to.
pub(crate) const PORT: u16 = 8444;

/// The API server gives an answer ten seconds, and keeps a connection that it does not use for ninety.
const LIMITS: Limits = Limits {
    connections: 128,
    first_request_timeout: Duration::from_secs(5),
    idle_timeout: Duration::from_secs(120),
    request_timeout: Duration::from_secs(8),
    max_age: Duration::from_secs(600),
};
/// Two objects of the greatest size that fits into etcd, and what is around them.
const LARGEST: usize = 4 * 1024 * 1024;
/// Of all requests that are being read or answered, together.
const HELD_AT_ONCE: usize = 2 * LARGEST;

/// Begins to serve on the port of the webhooks, for as long as the process lives.
pub(crate) async fn start(context: &Context, bind: Bind, serving: &Serving) -> Result<(), BindError> {
    let listener = Bind { port: PORT, ..bind }.listen("the webhook server").await?;
    let client = context.clients.unlimited.clone();
    let authority = authority::keep(client.clone(), serving.clone(), context.shutdown.clone());
    context.spawn("the cache of the front proxy's authority", authority);
    let server = Server::new(client, serving.clone());
    // Until the very end: the API server may not have heard yet that this replica stops.
    context.spawn("the webhook server", server.serve(listener, CancellationToken::new()));
    Ok(())
}

struct Server {
    cluster: Cluster,
    serving: Serving,
    held: Arc<Semaphore>,
}

impl Server {
    fn new(client: Client, serving: Serving) -> Self {
        Self { cluster: Cluster::new(client), serving, held: Arc::new(Semaphore::new(HELD_AT_ONCE)) }
    }

    async fn serve(self, listener: TcpListener, stop: CancellationToken) {
        self.serve_within(LIMITS, listener, stop).await;
    }

    async fn serve_within(self, limits: Limits, listener: TcpListener, stop: CancellationToken) {
        let tls = self.serving.webhooks();
        let server = Arc::new(self);
        let answer = move |request| {
            let server = server.clone();
            async move { server.answer(request).await.unwrap_or_else(|refused| refused) }
        };
        server::serve(listener, Some(tls), limits, answer, stop).await;
    }

    async fn answer(&self, request: http::Request<Incoming>) -> Result<HttpResponse, HttpResponse> {
        let path = request.uri().path();
        let Some(check) = Check::at(path) else {
            return Err(sentence(StatusCode::NOT_FOUND, "nothing is answered here"));
        };
        if request.method() != Method::POST {
            return Err(sentence(StatusCode::METHOD_NOT_ALLOWED, "an AdmissionReview is sent with POST"));
        }
        let content = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let content = content.and_then(|content| content.split(';').next()).unwrap_or_default().trim();
        if content != "application/json" {
            let wrong = format!("the content type must be application/json, and it is {content:?}");
            return Err(sentence(StatusCode::BAD_REQUEST, &wrong));
        }
        let (body, _held) = self.read(request.into_body()).await?;
        let bad = |wrong: String| sentence(StatusCode::BAD_REQUEST, &wrong);
        let request = review::read(&body).map_err(bad)?;
        drop(body);
        check.suits(&request).map_err(bad)?;
        let uid = request.uid.clone();
        let decision = admit(&self.cluster, check, request).await;
        if let [first, ..] = decision.refusals.as_slice() {
            tracing::info!(path = ?check, refusals = decision.refusals.len(), "refused: {first}");
        }
        let mut answer = HttpResponse::new(Full::new(Bytes::from(decision.write(&uid))));
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(answer)
    }

    /// The body, as far as there is room for it. Who sends slowly holds only what has come.
    async fn read(&self, mut body: Incoming) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), HttpResponse> {
        let broken = || sentence(StatusCode::BAD_REQUEST, "the body could not be read to its end");
        let large = || sentence(StatusCode::PAYLOAD_TOO_LARGE, &format!("the body has more than {LARGEST} bytes"));
        if body.size_hint().lower() > LARGEST as u64 {
            return Err(large());
        }
        let mut read = Vec::new();
        let mut held: Option<OwnedSemaphorePermit> = None;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| broken())?.into_data() else { continue };
            if read.len() + data.len() > LARGEST {
                return Err(large());
            }
            let amount = u32::try_from(data.len()).unwrap_or(u32::MAX);
            let room = self.held.clone().acquire_many_owned(amount).await.map_err(|_| broken())?;
            match &mut held {
                Some(held) => held.merge(room),
                None => held = Some(room),
            }
            read.extend_from_slice(&data);
        }
        Ok((read, held))
    }
}

fn sentence(status: StatusCode, sentence: &str) -> HttpResponse {
    text_response(status, format!("{sentence}\n"))
}
