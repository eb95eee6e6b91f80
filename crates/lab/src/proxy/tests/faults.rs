//! The effect of every fault on a single request, for the client and for the server.

use std::{
    os::unix::process::ExitStatusExt as _,
    sync::Arc,
    time::{Duration, Instant},
};

use http::StatusCode;
use http_body_util::BodyExt as _;
use parking_lot::Mutex;

use super::{
    super::{Match, ProxyFault, ProxyRule, RequestOutcome, RequestVerb, Then, When},
    AGENT, PODS, Protocol, with_both_protocols,
};

fn fault_outcome(fault: &'static str, committed: Option<u16>) -> RequestOutcome {
    RequestOutcome::Fault { fault, committed }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_rules_requests_are_forwarded_unchanged() {
    with_both_protocols(async |fixture| {
        let mut client = fixture.client().await;
        let large = "x".repeat(3_000_000);
        let (status, body) = client.call("POST", "/api/v1/namespaces/ns/pods?dryRun=All", &large).await.unwrap();
        assert_eq!(status, StatusCode::CREATED);
        assert_eq!(body, format!("answer to {large}"));
        let (status, _) = client.call("GET", "/healthz", "").await.unwrap();
        assert_eq!(status, StatusCode::OK);

        let committed = fixture.api.committed();
        assert_eq!(committed[0].method, "POST");
        assert_eq!(committed[0].uri, "/api/v1/namespaces/ns/pods?dryRun=All");
        assert_eq!(committed[0].headers["authorization"], "Bearer secret");
        assert_eq!(committed[0].headers["user-agent"], AGENT);
        assert_eq!(committed[0].headers["host"], "localhost");
        assert_eq!(committed[1].uri, "/healthz");

        let records = fixture.proxy.requests();
        assert_eq!(records[0].caller.user_agent, AGENT);
        assert_eq!(records[0].caller.info.verb, RequestVerb::Create);
        assert_eq!(records[0].caller.info.resource, "pods");
        assert_eq!(records[0].caller.info.namespace, "ns");
        assert_eq!(fixture.outcomes(), [RequestOutcome::Status(201), RequestOutcome::Status(200)]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delayed_request_is_forwarded_after_the_delay_or_when_the_rule_is_removed() {
    with_both_protocols(async |fixture| {
        let mut client = fixture.client().await;
        let delay = Duration::from_millis(80);
        let short = fixture.proxy.add(ProxyRule::always(Match::writes(), ProxyFault::Delay(delay)));
        let start = Instant::now();
        assert_eq!(client.create("late").await.unwrap(), StatusCode::CREATED);
        assert!(start.elapsed() >= delay);
        short.remove();

        let long = fixture.proxy.add(ProxyRule::always(Match::writes(), ProxyFault::Delay(Duration::from_secs(3600))));
        let (status, ()) = tokio::join!(client.create("released"), async {
            long.wait_hit(1).await.unwrap();
            assert_eq!(fixture.api.committed_bodies(), ["late"]);
            fixture.proxy.clear();
        });
        assert_eq!(status.unwrap(), StatusCode::CREATED);
        assert_eq!(fixture.api.committed_bodies(), ["late", "released"]);
        assert_eq!(fixture.outcomes(), [fault_outcome("Delay", Some(201)), fault_outcome("Delay", Some(201))]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_request_is_held_until_the_rule_is_removed() {
    with_both_protocols(async |fixture| {
        let mut client = fixture.client().await;
        let rule = fixture.proxy.add(ProxyRule::always(Match::writes(), ProxyFault::Drop));
        let (answer, ()) = tokio::join!(client.create("lost"), async {
            rule.wait_hit(1).await.unwrap();
            tokio::time::sleep(super::SILENCE).await;
            rule.remove();
        });
        answer.unwrap_err();
        assert!(fixture.api.committed().is_empty());
        assert_eq!(fixture.outcomes(), [fault_outcome("Drop", None)]);
        assert_eq!(fixture.client().await.create("kept").await.unwrap(), StatusCode::CREATED);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_request_ends_when_its_client_disconnects() {
    with_both_protocols(async |fixture| {
        let rule = fixture.proxy.add(ProxyRule::always(Match::writes(), ProxyFault::Drop));
        let mut client = fixture.client().await;
        // Larger than all buffers: with unread bytes, the proxy would not detect the close of the connection.
        let body = "x".repeat(3_000_000);
        tokio::select! {
            answer = client.create(&body) => panic!("{answer:?}"),
            hit = rule.wait_hit(1) => hit.unwrap(),
        }
        drop(client);
        // The accept loop is the only remaining task.
        while fixture.proxy.tasks.len() > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_closes_the_connection_before_the_commit() {
    with_both_protocols(async |fixture| {
        let rule = fixture.proxy.add(ProxyRule::new(Match::writes(), When::Nth(1), ProxyFault::Cut));
        let error = fixture.client().await.create("cut").await.unwrap_err();
        if fixture.protocol == Protocol::Http1 {
            let cause = error.root_cause().downcast_ref::<std::io::Error>().map(std::io::Error::kind);
            assert_eq!(cause, Some(std::io::ErrorKind::ConnectionReset), "{error:?}");
        }
        assert_eq!(fixture.client().await.create("kept").await.unwrap(), StatusCode::CREATED);
        assert_eq!(fixture.api.committed_bodies(), ["kept"]);
        assert_eq!(rule.hits(), 1);
        assert_eq!(fixture.outcomes(), [fault_outcome("Cut", None), RequestOutcome::Status(201)]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_after_closes_the_connection_between_commit_and_response() {
    with_both_protocols(async |fixture| {
        let rule = fixture.proxy.add(ProxyRule::new(Match::writes(), When::Nth(1), ProxyFault::CutAfter));
        fixture.client().await.create("unknown").await.unwrap_err();
        assert_eq!(fixture.api.committed_bodies(), ["unknown"]);
        assert_eq!(rule.hits(), 1);
        assert_eq!(fixture.outcomes(), [fault_outcome("CutAfter", Some(201))]);
        assert_eq!(fixture.client().await.create("kept").await.unwrap(), StatusCode::CREATED);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_does_not_affect_other_requests_of_the_same_http2_connection() {
    with_both_protocols(async |fixture| {
        if fixture.protocol == Protocol::Http1 {
            return;
        }
        let mut client = fixture.client().await;
        let mut watch = client.watch().await;
        let _rule = fixture.proxy.add(ProxyRule::always(Match::writes(), ProxyFault::Cut));
        client.create("cut").await.unwrap_err();
        fixture.api.feed(0).await.send("still here\n".into()).unwrap();
        assert_eq!(watch.event().await, "still here");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_the_proxy_are_kubernetes_statuses() {
    let table = [
        (409, "POST", PODS, "AlreadyExists"),
        (409, "PATCH", "/api/v1/namespaces/ns/pods/p", "Conflict"),
        (429, "POST", PODS, "TooManyRequests"),
        (500, "GET", PODS, "InternalError"),
        (503, "DELETE", "/api/v1/namespaces/ns/pods/p", "ServiceUnavailable"),
        (504, "PUT", "/api/v1/namespaces/ns/pods/p", "Timeout"),
    ];
    with_both_protocols(async |fixture| {
        let mut client = fixture.client().await;
        for (code, method, path, reason) in table {
            let retry_after = (code == 429).then_some(7);
            let rule =
                fixture.proxy.add(ProxyRule::always(Match::any(), ProxyFault::Answer { status: code, retry_after }));
            // One client for all: an answer does not close the connection.
            let response = client.send(method, path, &"x".repeat(100_000)).await.unwrap();
            assert_eq!(response.status(), code);
            assert_eq!(response.headers()["content-type"], "application/json");
            let seconds = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
            assert_eq!(seconds, retry_after.map(|seconds| seconds.to_string()));
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["kind"], "Status");
            assert_eq!(body["apiVersion"], "v1");
            assert_eq!(body["status"], "Failure");
            assert_eq!(body["reason"], reason);
            assert_eq!(body["code"], code);
            assert_eq!(body["details"]["kind"], "pods");
            assert_eq!(body["details"]["retryAfterSeconds"].as_u64(), retry_after);
            assert_eq!(rule.hits(), 1);
        }
        assert!(fixture.api.committed().is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_after_commit_callback_runs_before_the_client_gets_the_response() {
    with_both_protocols(async |fixture| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let callback = {
            let (seen, log) = (Arc::clone(&seen), fixture.api.log());
            move || {
                let mut seen = seen.lock();
                seen.push(log.borrow().len());
                if seen.len() == 1 { Then::Deliver } else { Then::Cut }
            }
        };
        let rule = fixture.proxy.add(ProxyRule::always(Match::writes(), ProxyFault::AfterCommit(Arc::new(callback))));
        let (status, body) = fixture.client().await.call("POST", PODS, "first").await.unwrap();
        assert_eq!((status, &*body), (StatusCode::CREATED, b"answer to first".as_slice()));
        fixture.client().await.create("second").await.unwrap_err();
        assert_eq!(*seen.lock(), [1, 2], "requests committed when the callback ran");
        assert_eq!(rule.hits(), 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_kills_a_process_after_its_nth_write() {
    with_both_protocols(async |fixture| {
        let mut child = tokio::process::Command::new("sleep").arg("3600").kill_on_drop(true).spawn().unwrap();
        let fault = ProxyFault::kill(child.id().unwrap()).unwrap();
        let writes = Match::writes().user_agent("operator/").except(["leases"]);
        let rule = fixture.proxy.add(ProxyRule::new(writes, When::Nth(2), fault));
        let mut client = fixture.client().await;
        client.create("first").await.unwrap();
        client.call("PUT", "/apis/coordination.k8s.io/v1/namespaces/ns/leases/l", "renewed").await.unwrap();
        assert!(child.try_wait().unwrap().is_none());
        client.create("second").await.unwrap_err();
        assert_eq!(child.wait().await.unwrap().signal(), Some(9));
        assert_eq!(fixture.api.committed_bodies(), ["first", "renewed", "second"]);
        assert_eq!(rule.hits(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_counts_and_affects_only_matching_requests() {
    with_both_protocols(async |fixture| {
        let unavailable = ProxyFault::Answer { status: 503, retry_after: None };
        let _rule = fixture.proxy.add(ProxyRule::new(
            Match::verb(RequestVerb::Create).user_agent("operator/").resource("pods"),
            When::EveryNth(2),
            unavailable,
        ));
        let (mut client, mut other) = (fixture.client().await, fixture.client_as("kubectl/1.36").await);
        let mut statuses = Vec::new();
        for name in ["1", "2", "3", "4", "5"] {
            assert_eq!(other.create("other").await.unwrap(), StatusCode::CREATED);
            client.call("POST", "/api/v1/namespaces/ns/configmaps", "unmatched").await.unwrap();
            statuses.push(client.create(name).await.unwrap().as_u16());
        }
        assert_eq!(statuses, [201, 503, 201, 503, 201]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_applicable_rule_wins_and_all_matching_rules_count() {
    with_both_protocols(async |fixture| {
        let answer = |status| ProxyFault::Answer { status, retry_after: None };
        let first = fixture.proxy.add(ProxyRule::new(Match::writes(), When::Nth(2), answer(500)));
        let second = fixture.proxy.add(ProxyRule::new(Match::any(), When::From(2), answer(503)));
        let mut client = fixture.client().await;
        let mut statuses = Vec::new();
        for name in ["1", "2", "3"] {
            statuses.push(client.create(name).await.unwrap().as_u16());
        }
        assert_eq!(statuses, [201, 500, 503]);
        assert_eq!((first.hits(), second.hits()), (1, 1));
        fixture.proxy.clear();
        assert_eq!(client.create("4").await.unwrap(), StatusCode::CREATED);
        first.wait_hit(2).await.unwrap_err();
        first.wait_hit(1).await.unwrap();
    })
    .await;
}
