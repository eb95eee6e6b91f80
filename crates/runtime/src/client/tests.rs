//! The client layer: deadlines of responses and bodies, the idle timeout of watches, the rate limit, the user agent.

use std::{convert::Infallible, net::Ipv4Addr};

use bytes::Bytes;
use futures::{StreamExt, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{ListParams, WatchParams},
};
use parking_lot::Mutex;
use tokio::{net::TcpListener, time::Instant};
use tower::Layer;

use super::*;
use crate::{lease::WriteFence, reconcile::classify, verb::Verb};

type BoxedResponse = Response<UnsyncBoxBody<Bytes, BoxError>>;

fn client(
    rate: Option<Rate>,
    respond: impl Fn(&Request<Body>) -> Option<BoxedResponse> + Send + Sync + 'static,
) -> Client {
    let respond = Arc::new(respond);
    let service = tower::service_fn(move |request: Request<Body>| {
        let respond = respond.clone();
        async move {
            match respond(&request) {
                Some(response) => Ok::<_, BoxError>(response),
                None => std::future::pending().await,
            }
        }
    });
    let layer = ClientLayer {
        deadline: Duration::from_secs(15),
        requests: rate.map(|rate| Arc::new(Bucket::new(rate.per_second, rate.burst))),
        watches: Arc::new(Bucket::new(10.0, 10)),
        pages: Arc::default(),
        metrics: Arc::new(Metrics::new("test")),
        host: "test".into(),
    };
    Client::new(layer.layer(service), "default")
}

fn full_response(body: &'static str) -> BoxedResponse {
    Response::new(Full::new(Bytes::from_static(body.as_bytes())).map_err(Into::into).boxed_unsync())
}

/// Sends these pieces and then nothing, and never ends.
fn endless(pieces: Vec<&'static str>) -> BoxedResponse {
    let frames = stream::iter(pieces).map(|piece| Ok(Frame::data(Bytes::from_static(piece.as_bytes()))));
    Response::new(StreamBody::new(frames.chain(stream::pending())).boxed_unsync())
}

const EMPTY_LIST: &str = r#"{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}"#;

fn maps(client: Client) -> Api<ConfigMap> {
    Api::namespaced(client, "ns")
}

fn reason_of(error: &kube::Error) -> &'static str {
    classify(error, "list", &vitivirt_api::Target::of_kind::<ConfigMap>(vitivirt_api::ObjectKey::namespaced("ns", "a")))
        .reason
}

#[tokio::test(start_paused = true)]
async fn a_missing_and_an_incomplete_response_fail_at_the_deadline() {
    for half in [false, true] {
        let api = maps(client(None, move |_| half.then(|| endless(vec!["{\"kind\":"]))));
        let begin = Instant::now();
        let error = api.list(&ListParams::default()).await.unwrap_err();
        assert_eq!(begin.elapsed(), Duration::from_secs(15));
        assert_eq!(reason_of(&error), vitivirt_api::reason::DEADLINE_EXCEEDED, "{error:?}");
    }
}

/// Tenants choose the size of objects, and a page is in memory as a whole.
#[tokio::test(start_paused = true)]
async fn a_page_with_too_many_bytes_is_asked_for_again_with_fewer_objects() {
    let asked_for = Arc::new(Mutex::new(Vec::new()));
    let seen = asked_for.clone();
    let api = maps(client(None, move |request| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let limit = query.split('&').find_map(|pair| pair.strip_prefix("limit=")).unwrap().parse::<usize>().unwrap();
        seen.lock().push(query);
        // Each object has a MiB.
        let object = format!(r#"{{"metadata":{{"name":"a"}},"data":{{"text":"{}"}}}}"#, "x".repeat(1024 * 1024));
        let body = EMPTY_LIST.replace("[]", &format!("[{}]", vec![object; limit].join(",")));
        Some(Response::new(Full::new(Bytes::from(body)).map_err(Into::into).boxed_unsync()))
    }));
    let page = ListParams::default().labels("a=b").limit(100);
    for _ in 0..2 {
        let error = api.list(&page).await.unwrap_err();
        assert!(root_cause(&error).contains("one page have more than"), "{error:?}");
    }
    for _ in 0..2 {
        assert_eq!(api.list(&page).await.unwrap().items.len(), 6);
    }
    // The objects may be smaller after some time. All pages of one list have the same size.
    tokio::time::advance(Duration::from_secs(600)).await;
    assert_eq!(api.list(&page.clone().continue_token("next")).await.unwrap().items.len(), 6);
    let error = api.list(&page).await.unwrap_err();
    assert!(root_cause(&error).contains("100 objects in one page"), "{error:?}");
    assert_eq!(api.list(&page.clone().limit(1)).await.unwrap().items.len(), 1, "a smaller page is not enlarged");
    let limits = asked_for.lock().iter().map(|query| query.replace("labelSelector=a%3Db", "S")).collect::<Vec<_>>();
    let (next, first) = ("S&continue=next&limit=6", "S&limit=100");
    assert_eq!(limits, [first, "S&limit=25", "S&limit=6", "S&limit=6", next, first, "S&limit=1"]);
}

/// Otherwise the server may execute a write that waits in it when another replica leads.
#[tokio::test(start_paused = true)]
async fn a_write_of_the_leader_names_its_deadline() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let client = client(None, move |request| {
        log.lock().push(request.uri().to_string());
        Some(full_response("{}"))
    });
    for uri in ["/api/v1/namespaces/ns/configmaps", "/api/v1/namespaces/ns/configmaps?fieldManager=test"] {
        let request = Request::post(uri).extension(WriteFence::open()).body(Body::empty()).unwrap();
        client.send(request).await.unwrap();
    }
    let expected = ["?timeout=15s", "?fieldManager=test&timeout=15s"]
        .map(|query| format!("/api/v1/namespaces/ns/configmaps{query}"));
    assert_eq!(*seen.lock(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_silent_watch_ends_after_its_timeout_and_a_margin_not_at_the_deadline() {
    let event = concat!(r#"{"type":"ADDED","object":{"metadata":{"name":"a","resourceVersion":"2"}}}"#, "\n");
    let api = maps(client(None, move |_| Some(endless(vec![event]))));
    let begin = Instant::now();
    let mut watch = api.watch(&WatchParams::default().timeout(60), "1").await.unwrap().boxed();
    assert!(watch.next().await.unwrap().is_ok());
    let error = watch.next().await.unwrap().unwrap_err();
    assert!(is_caused_by::<SilentWatch>(&error), "{error:?}");
    assert!(watch.next().await.is_none());
    assert_eq!(begin.elapsed(), Duration::from_secs(70));
}

#[tokio::test(start_paused = true)]
async fn opening_a_watch_fails_at_the_deadline() {
    let api = maps(client(None, |_| None));
    let begin = Instant::now();
    let error = api.watch(&WatchParams::default(), "1").await.err().unwrap();
    assert_eq!(begin.elapsed(), Duration::from_secs(15));
    assert_eq!(reason_of(&error), vitivirt_api::reason::DEADLINE_EXCEEDED);
}

#[tokio::test(start_paused = true)]
async fn the_deadline_begins_after_the_rate_limit_which_does_not_apply_to_watches() {
    tokio::time::advance(Duration::from_secs(3600)).await;
    let api = maps(client(Some(Rate { per_second: 1.0, burst: 1 }), |_| Some(full_response(EMPTY_LIST))));
    let begin = Instant::now();
    let lists = futures::future::join_all((0..31).map(|_| async { api.list(&ListParams::default()).await.is_ok() }));
    let watch = async {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let opened = api.watch(&WatchParams::default(), "1").await.is_ok();
        (opened, begin.elapsed())
    };
    let (lists, (opened, after)) = futures::future::join(lists, watch).await;
    assert!(lists.into_iter().all(|ok| ok) && opened);
    assert!(after < Duration::from_millis(10), "{after:?}");
    assert_eq!(begin.elapsed().as_secs(), 30);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_closes_every_watch_gets_a_limited_rate_of_requests() {
    let opened = Arc::new(Mutex::new(0));
    let count = opened.clone();
    let client = client(None, move |request| {
        if Verb::from_request(request.method(), request.uri()) == Verb::Watch {
            *count.lock() += 1;
            return Some(full_response(""));
        }
        Some(full_response(EMPTY_LIST))
    });
    let watching = kube::runtime::watcher(maps(client), kube::runtime::watcher::Config::default());
    let all = watching.for_each(|_| async {});
    assert!(tokio::time::timeout(Duration::from_secs(60), all).await.is_err());
    let opened = *opened.lock();
    assert!((500..=620).contains(&opened), "{opened}");
}

#[tokio::test(start_paused = true)]
async fn the_header_retry_after_reaches_the_failure() {
    let api = maps(client(None, |_| {
        let mut response = full_response("Too many requests, please try again later.\n");
        *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("4"));
        Some(response)
    }));
    let error = api.list(&ListParams::default()).await.unwrap_err();
    let failure = classify(
        &error,
        "list",
        &vitivirt_api::Target::of_kind::<ConfigMap>(vitivirt_api::ObjectKey::namespaced("ns", "a")),
    );
    assert_eq!(
        (failure.reason, failure.retry_after),
        (vitivirt_api::reason::TOO_MANY_REQUESTS, Some(Duration::from_secs(4)))
    );
}

/// The whole stack, over a real connection.
#[tokio::test]
async fn both_clients_send_the_user_agent() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url: http::Uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let agents = Arc::new(Mutex::new(Vec::new()));
    let seen = agents.clone();
    let server = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let seen = seen.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let agent = request.headers()[header::USER_AGENT].to_str().unwrap().to_owned();
                    seen.lock().push(agent);
                    async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(EMPTY_LIST.as_bytes())))) }
                });
                let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    let metrics = Arc::new(Metrics::new("test"));
    let clients = connect(&Config::new(url), "virt-operator/1.2.3", None, &metrics).unwrap();
    for client in [clients.rate_limited, clients.unlimited] {
        maps(client).list(&ListParams::default()).await.unwrap();
    }
    assert_eq!(*agents.lock(), ["virt-operator/1.2.3", "virt-operator/1.2.3"]);
    assert!(metrics.encode().unwrap().contains("test_api_requests_total{verb=\"list\",code=\"200\"} 2"));
    server.abort();
}

#[tokio::test]
async fn the_error_for_a_missing_kubeconfig_contains_its_path() {
    let error = configuration(Some(Path::new("/nowhere/config")), None).await.unwrap_err().to_string();
    assert_eq!(error, "invalid kubeconfig /nowhere/config: No such file or directory (os error 2)");
}

#[tokio::test]
async fn a_context_selects_its_cluster_and_an_unknown_one_is_an_error() {
    let file = std::env::temp_dir().join(format!("vitivirt-contexts-{}.yaml", std::process::id()));
    let text = r#"{
        "apiVersion": "v1", "kind": "Config", "current-context": "a",
        "clusters": [
            {"name": "one", "cluster": {"server": "http://one.example:1"}},
            {"name": "two", "cluster": {"server": "http://two.example:2"}}
        ],
        "users": [{"name": "user", "user": {}}],
        "contexts": [
            {"name": "a", "context": {"cluster": "one", "user": "user"}},
            {"name": "b", "context": {"cluster": "two", "user": "user", "namespace": "ns"}}
        ]
    }"#;
    std::fs::write(&file, text).unwrap();
    let current = configuration(Some(&file), None).await.unwrap();
    let selected = configuration(Some(&file), Some("b")).await.unwrap();
    let unknown = configuration(Some(&file), Some("x")).await.unwrap_err().to_string();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(current.cluster_url.host(), Some("one.example"));
    assert_eq!((selected.cluster_url.host(), selected.default_namespace.as_str()), (Some("two.example"), "ns"));
    assert_eq!(unknown, "context \"x\" not found in kubeconfig; available contexts: a, b");
}
