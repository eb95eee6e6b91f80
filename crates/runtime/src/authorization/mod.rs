//! Whether a client can read an endpoint of this program: the API server authenticates its bearer token (TokenReview)
//! and decides whether that user can get the path (SubjectAccessReview).
//!
//! Answers are cached, and the rate and the number of concurrent reviews are limited: a client with many invalid tokens
//! cannot use this program to flood the API server. Reviews wait in the order of their arrival. A request without an
//! answer is refused.

mod cache;
mod review;
#[cfg(test)]
mod tests;

use std::{sync::OnceLock, time::Duration};

use http::{HeaderMap, HeaderValue, StatusCode, header};
use kube::Client;
use parking_lot::Mutex;
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};

use self::{
    cache::{Decision, DecisionCache, TokenHash},
    review::review,
};
use crate::{
    client::Bucket,
    root_cause::root_cause,
    server::{HttpResponse, text_response},
};

/// A review is two requests.
const REVIEWS_PER_SECOND: f64 = 10.0;
const REVIEWS_BURST: u32 = 20;
const CONCURRENT_REVIEWS: usize = 4;
/// From the arrival of a request to the answer of the API server. Less than the server's limit for a request.
const TIMEOUT: Duration = Duration::from_secs(8);
/// Larger than any token that the API server accepts in practice.
const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// The least time between two log lines about failed reviews.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

pub(crate) struct Authorizer {
    path: &'static str,
    /// Not set before the program knows its API server.
    client: OnceLock<Client>,
    cache: Mutex<DecisionCache>,
    rate: Bucket,
    concurrent: Semaphore,
    logged: Mutex<Option<Instant>>,
}

/// Why there is no decision.
#[derive(Debug, thiserror::Error)]
enum ReviewError {
    #[error("the program is starting")]
    Starting,
    #[error("the API server did not answer in time, or too many tokens wait for a review")]
    Timeout,
    #[error("{}", root_cause(.0))]
    Client(#[from] kube::Error),
}

impl Authorizer {
    /// Decides about requests for this path.
    pub(crate) fn new(path: &'static str) -> Self {
        Self {
            path,
            client: OnceLock::new(),
            cache: Mutex::default(),
            rate: Bucket::new(REVIEWS_PER_SECOND, REVIEWS_BURST),
            concurrent: Semaphore::new(CONCURRENT_REVIEWS),
            logged: Mutex::new(None),
        }
    }

    /// Reviews are possible from now on.
    pub(crate) fn set_client(&self, client: Client) {
        // Only the first client counts. The program has one.
        let _ = self.client.set(client);
    }

    /// The error is the response for a client that cannot read the path.
    pub(crate) async fn authorize(&self, headers: &HeaderMap) -> Result<(), HttpResponse> {
        let Some(token) = bearer_token(headers) else {
            return Err(unauthorized("no bearer token: send the header Authorization: Bearer TOKEN"));
        };
        let decision = timeout(TIMEOUT, self.decide(token)).await.unwrap_or(Err(ReviewError::Timeout));
        match decision {
            Ok(Decision::Allowed) => Ok(()),
            Ok(Decision::Unauthenticated) => Err(unauthorized("the API server does not accept this bearer token")),
            Ok(Decision::Forbidden { user }) => {
                let path = self.path;
                let message =
                    format!("user {user:?} cannot get {path}: it needs a ClusterRole with this nonResourceURL");
                Err(text_response(StatusCode::FORBIDDEN, format!("{message}\n")))
            }
            Err(error) => {
                self.log(&error);
                Err(unavailable())
            }
        }
    }

    async fn decide(&self, token: &str) -> Result<Decision, ReviewError> {
        let hash = TokenHash::of(token);
        if let Some(decision) = self.cached(&hash) {
            return Ok(decision);
        }
        let client = self.client.get().ok_or(ReviewError::Starting)?;
        // The semaphore is never closed.
        let _permit = self.concurrent.acquire().await.map_err(|_| ReviewError::Timeout)?;
        // Another request with the same token may have been reviewed meanwhile.
        if let Some(decision) = self.cached(&hash) {
            return Ok(decision);
        }
        self.rate.wait().await;
        let decision = review(client, token, self.path).await?;
        self.cache.lock().insert(hash, decision.clone(), Instant::now());
        Ok(decision)
    }

    fn cached(&self, token: &TokenHash) -> Option<Decision> {
        self.cache.lock().get(token, Instant::now())
    }

    /// A client cannot fill the log with its requests.
    fn log(&self, error: &ReviewError) {
        let now = Instant::now();
        let mut logged = self.logged.lock();
        if logged.is_none_or(|last| now >= last + LOG_INTERVAL) {
            *logged = Some(now);
            tracing::warn!(path = self.path, error = %error, "request refused: its token cannot be reviewed");
        }
    }
}

/// The token of the header `Authorization: Bearer TOKEN`.
fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.trim().split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() && token.len() <= MAX_TOKEN_BYTES).then_some(token)
}

fn unauthorized(message: &str) -> HttpResponse {
    let mut response = text_response(StatusCode::UNAUTHORIZED, format!("{message}\n"));
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// The cause is in the log. It may name the operator's account and the API server, which a client without a valid token
/// must not learn.
fn unavailable() -> HttpResponse {
    let message = "the API server cannot be asked whether this token is allowed; the operator's log has the cause\n";
    let mut response = text_response(StatusCode::SERVICE_UNAVAILABLE, message.to_owned());
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("10"));
    response
}
