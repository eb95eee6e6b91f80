//! The authorizer with an API server that answers reviews.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use futures::future::join_all;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use kube::client::Body;
use serde_json::{Value, json};
use tower::{BoxError, service_fn};

use super::*;

/// `good` belongs to a user with permission, `other` to one without. No other token is valid.
#[derive(Default)]
struct Reviews {
    requests: Mutex<BTreeMap<String, usize>>,
    /// Reviews that are in progress, now and at most.
    concurrent: Mutex<(usize, usize)>,
    delay: Duration,
    fails: Mutex<bool>,
}

impl Reviews {
    fn client(self: &Arc<Self>) -> Client {
        let reviews = self.clone();
        let service = service_fn(move |request: Request<Body>| {
            let reviews = reviews.clone();
            async move { reviews.respond(request).await }
        });
        Client::new(service, "default")
    }

    async fn respond(&self, request: Request<Body>) -> Result<Response<Full<Bytes>>, BoxError> {
        let resource = request.uri().path().rsplit('/').next().unwrap().to_owned();
        *self.requests.lock().entry(resource.clone()).or_default() += 1;
        {
            let mut concurrent = self.concurrent.lock();
            concurrent.0 += 1;
            concurrent.1 = concurrent.1.max(concurrent.0);
        }
        tokio::time::sleep(self.delay).await;
        self.concurrent.lock().0 -= 1;
        if *self.fails.lock() {
            return Err("connection refused".into());
        }
        let mut review: Value = serde_json::from_slice(&request.into_body().collect().await?.to_bytes())?;
        review["status"] = match (resource.as_str(), &review["spec"]["token"], &review["spec"]["user"]) {
            ("tokenreviews", token, _) if token == "good" || token == "other" => {
                json!({"authenticated": true, "user": {"username": format!("user-{}", token.as_str().unwrap())}})
            }
            ("tokenreviews", ..) => json!({"authenticated": false, "error": "invalid bearer token"}),
            (_, _, user) => json!({"allowed": user == "user-good"}),
        };
        Ok(Response::new(Full::new(Bytes::from(review.to_string()))))
    }

    fn count(&self, resource: &str) -> usize {
        self.requests.lock().get(resource).copied().unwrap_or_default()
    }
}

fn authorizer(reviews: &Arc<Reviews>) -> Authorizer {
    let authorizer = Authorizer::new("/metrics");
    authorizer.set_client(reviews.client());
    authorizer
}

async fn ask(authorizer: &Authorizer, authorization: Option<&str>) -> (u16, String) {
    let mut headers = HeaderMap::new();
    if let Some(value) = authorization {
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
    }
    match authorizer.authorize(&headers).await {
        Ok(()) => (200, String::new()),
        Err(response) => {
            let status = response.status();
            assert_eq!(response.headers().contains_key(header::WWW_AUTHENTICATE), status == 401);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            (status.as_u16(), String::from_utf8_lossy(&body).into_owned())
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_bearer_token_is_refused_without_a_review() {
    let reviews = Arc::new(Reviews::default());
    let authorizer = authorizer(&reviews);
    let long = format!("Bearer {}", "x".repeat(MAX_TOKEN_BYTES + 1));
    for header in [None, Some("Bearer"), Some("Bearer  "), Some("Basic good"), Some("good"), Some(long.as_str())] {
        let (status, body) = ask(&authorizer, header).await;
        assert!(status == 401 && body.contains("no bearer token"), "{header:?}: {status} {body}");
    }
    assert!(reviews.requests.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_api_server_decides_and_its_answer_is_cached() {
    let reviews = Arc::new(Reviews::default());
    let authorizer = authorizer(&reviews);
    for _ in 0..3 {
        assert_eq!(ask(&authorizer, Some("bearer good")).await.0, 200);
        let (status, body) = ask(&authorizer, Some("Bearer other")).await;
        assert!(status == 403 && body.contains("user \"user-other\" cannot get /metrics"), "{body}");
        let (status, body) = ask(&authorizer, Some("Bearer bad")).await;
        assert!(status == 401 && body.contains("does not accept this bearer token"), "{body}");
    }
    assert_eq!((reviews.count("tokenreviews"), reviews.count("subjectaccessreviews")), (3, 2));

    tokio::time::advance(Duration::from_secs(11)).await;
    assert_eq!(ask(&authorizer, Some("Bearer good")).await.0, 200);
    assert_eq!(ask(&authorizer, Some("Bearer other")).await.0, 403);
    assert_eq!((reviews.count("tokenreviews"), reviews.count("subjectaccessreviews")), (4, 3));
    tokio::time::advance(Duration::from_secs(50)).await;
    assert_eq!(ask(&authorizer, Some("Bearer good")).await.0, 200);
    assert_eq!(reviews.count("tokenreviews"), 5);
}

#[tokio::test(start_paused = true)]
async fn without_an_answer_the_request_is_refused_and_asked_again() {
    let reviews = Arc::new(Reviews::default());
    let starting = Authorizer::new("/metrics");
    let unavailable = async |authorizer: &Authorizer| {
        let (status, body) = ask(authorizer, Some("Bearer good")).await;
        assert!(status == 503 && body.contains("the API server cannot be asked"), "{status} {body}");
        assert!(!body.contains("connection refused"), "{body}");
    };
    unavailable(&starting).await;
    starting.set_client(reviews.client());
    assert_eq!(ask(&starting, Some("Bearer good")).await.0, 200);

    let authorizer = authorizer(&reviews);
    *reviews.fails.lock() = true;
    unavailable(&authorizer).await;
    *reviews.fails.lock() = false;
    assert_eq!(ask(&authorizer, Some("Bearer good")).await.0, 200);

    let silent = Arc::new(Reviews { delay: Duration::from_secs(3600), ..Reviews::default() });
    let begin = Instant::now();
    unavailable(&self::authorizer(&silent)).await;
    assert!(begin.elapsed() <= TIMEOUT + Duration::from_millis(10));
}

#[tokio::test(start_paused = true)]
async fn many_invalid_tokens_cause_few_reviews_and_one_token_causes_one() {
    let reviews = Arc::new(Reviews { delay: Duration::from_millis(20), ..Reviews::default() });
    let authorizer = authorizer(&reviews);
    let tokens: Vec<String> = (0..500).map(|number| format!("Bearer bad-{number}")).collect();
    let begin = Instant::now();
    let answers = join_all(tokens.iter().map(|token| ask(&authorizer, Some(token)))).await;
    assert!(answers.iter().all(|(status, _)| [401, 503].contains(status)));
    let most = f64::from(REVIEWS_BURST) + REVIEWS_PER_SECOND * begin.elapsed().as_secs_f64() + 1.0;
    assert!((reviews.count("tokenreviews") as f64) <= most, "{} and not {most}", reviews.count("tokenreviews"));
    assert!(reviews.concurrent.lock().1 <= CONCURRENT_REVIEWS);

    tokio::time::advance(Duration::from_secs(60)).await;
    let before = reviews.count("tokenreviews");
    let answers = join_all((0..100).map(|_| ask(&authorizer, Some("Bearer good")))).await;
    assert!(answers.iter().all(|(status, _)| *status == 200), "{answers:?}");
    assert!(reviews.count("tokenreviews") - before <= CONCURRENT_REVIEWS);
}
