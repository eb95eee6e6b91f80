//! Restarts of the API server, and the shutdown of the proxy.

use std::sync::Arc;

use http::{Request, StatusCode};
use http_body_util::Full;
use tokio::net::TcpStream;

use super::{
    super::{FaultProxy, Match, ProxyFault, ProxyOptions, ProxyRule, RequestOutcome, Then},
    ApiServer, PODS, Pki, ProxyFixture, with_both_protocols,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_api_server_closes_connections_until_it_is_restarted() {
    with_both_protocols(async |mut fixture| {
        let mut client = fixture.client().await;
        client.create("before").await.unwrap();
        let mut watch = fixture.client().await.watch().await;
        fixture.api.feed(0).await;

        fixture.api.kill().await;
        watch.next().await.unwrap_err();
        let error = client.create("lost").await.unwrap_err();
        let error = format!("{error:?}");
        assert!(!error.contains("INTERNAL_ERROR") && !error.contains("CANCEL"), "a stream reset: {error}");
        client.create("lost").await.unwrap_err();
        fixture.client().await.create("lost").await.unwrap_err();
        assert_eq!(fixture.outcomes()[2], RequestOutcome::Unreachable);

        fixture.api = ApiServer::start(&fixture.pki, fixture.api.address).await;
        assert_eq!(fixture.client().await.create("after").await.unwrap(), StatusCode::CREATED);
        assert_eq!(fixture.api.committed_bodies(), ["after"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_the_api_server_between_requests_causes_no_error() {
    with_both_protocols(async |mut fixture| {
        let mut client = fixture.client().await;
        for round in ["first", "second", "third"] {
            assert_eq!(client.create(round).await.unwrap(), StatusCode::CREATED);
            fixture.api.kill().await;
            fixture.api = ApiServer::start(&fixture.pki, fixture.api.address).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_to_the_api_server_are_reused() {
    with_both_protocols(async |fixture| {
        let mut client = fixture.client().await;
        for _ in 0..20 {
            client.create("some").await.unwrap();
        }
        // A connection returns to the pool shortly after the end of its response, so sometimes a second one is needed.
        assert!(fixture.api.connections() <= 4, "{} connections for 20 requests", fixture.api.connections());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_watches_and_requests_share_one_client_connection() {
    with_both_protocols(async |fixture| {
        if fixture.protocol == super::Protocol::Http1 {
            return;
        }
        let mut client = fixture.client().await;
        let mut watches = Vec::new();
        for _ in 0..120 {
            watches.push(client.watch().await);
        }
        client.create("between").await.unwrap();
        for (n, watch) in watches.iter_mut().enumerate() {
            fixture.api.feed(n).await.send(format!("{n}\n").into()).unwrap();
            assert_eq!(watch.event().await, n.to_string());
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_with_an_untrusted_certificate_gets_no_requests() {
    with_both_protocols(async |mut fixture| {
        fixture.api.kill().await;
        fixture.api = ApiServer::start(&Pki::new(), fixture.api.address).await;
        fixture.client().await.create("secret").await.unwrap_err();
        assert!(fixture.api.committed().is_empty());
        assert_eq!(fixture.outcomes(), [RequestOutcome::Unreachable]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_requests_are_rejected() {
    with_both_protocols(async |fixture| {
        let mut client = fixture.client().await;
        let path = "/api/v1/namespaces/ns/pods/p/exec";
        let response = match fixture.protocol {
            super::Protocol::Http1 => {
                let request = Request::get(path)
                    .header("host", "localhost")
                    .header("connection", "Upgrade")
                    .header("upgrade", "websocket");
                client.request(request.body(Full::default()).unwrap()).await.unwrap()
            }
            super::Protocol::Http2 => return,
        };
        assert_eq!(response.status(), StatusCode::NOT_IMPLEMENTED);
        assert!(fixture.api.committed().is_empty());
        assert_eq!(fixture.outcomes(), [RequestOutcome::Refused]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_proxy_leaves_no_tasks_or_connections() {
    with_both_protocols(async |fixture| {
        let ProxyFixture { pki, api, proxy, protocol } = fixture;
        let address = proxy.addr();
        let marker = Arc::new(());
        let witness = Arc::downgrade(&marker);
        let callback = move || {
            let _ = &marker;
            Then::Deliver
        };
        let callback_rule =
            proxy.add(ProxyRule::always(Match::any().resource("unused"), ProxyFault::AfterCommit(Arc::new(callback))));
        let stall = proxy.add(ProxyRule::always(Match::any(), ProxyFault::StallWatch { after_events: 0 }));
        let hold = proxy.add(ProxyRule::always(Match::writes(), ProxyFault::Drop));
        let delay =
            proxy.add(ProxyRule::always(Match::any().resource("nodes"), ProxyFault::Delay(super::DEADLINE * 10)));
        let fixture = ProxyFixture { pki, api, proxy, protocol };
        let (mut idle, mut busy, mut late) = (fixture.client().await, fixture.client().await, fixture.client().await);
        let mut watching = fixture.client().await;
        idle.call("GET", PODS, "").await.unwrap();
        let mut watch = watching.watch().await;
        stall.wait_hit(1).await.unwrap();
        let held = tokio::spawn(async move { busy.create("held").await });
        hold.wait_hit(1).await.unwrap();
        let delayed = tokio::spawn(async move { late.call("GET", "/api/v1/nodes", "").await });
        delay.wait_hit(1).await.unwrap();
        let silent = TcpStream::connect(address).await.unwrap();

        let ProxyFixture { api, proxy, .. } = fixture;
        proxy.stop().await;
        held.await.unwrap().unwrap_err();
        delayed.await.unwrap().unwrap_err();
        watch.next().await.unwrap_err();
        idle.call("GET", PODS, "").await.unwrap_err();
        TcpStream::connect(address).await.unwrap_err();
        silent.readable().await.unwrap();
        api.wait_no_connections().await;
        assert_eq!(api.committed().len(), 2, "the delayed request must not be forwarded");
        hold.wait_hit(2).await.unwrap_err();
        drop((stall, hold, delay));
        assert!(witness.upgrade().is_some(), "a handle keeps its rule alive");
        drop(callback_rule);
        assert!(witness.upgrade().is_none());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_the_proxy_stops_it_even_during_a_partition() {
    with_both_protocols(async |fixture| {
        let ProxyFixture { pki, api, proxy, protocol } = fixture;
        let tasks = proxy.tasks.clone();
        let fixture = ProxyFixture { pki, api, proxy, protocol };
        let mut watch = fixture.client().await.watch().await;
        fixture.proxy.partition(super::super::Partition::BlackHole);
        let address = fixture.proxy.addr();
        let silent = TcpStream::connect(address).await.unwrap();
        let ProxyFixture { api, proxy, .. } = fixture;
        drop(proxy);
        tasks.wait().await;
        watch.next().await.unwrap_err();
        silent.readable().await.unwrap();
        TcpStream::connect(address).await.unwrap_err();
        api.wait_no_connections().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_options_are_reported() {
    let pki = Pki::new();
    let options = || ProxyOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        certificate: pki.certificate.clone(),
        key: pki.key.clone(),
        upstream: "127.0.0.1:1".parse().unwrap(),
        upstream_name: "localhost".to_owned(),
        upstream_ca: pki.ca.clone(),
    };
    let first = FaultProxy::start(options()).await.unwrap();
    let table = [
        (ProxyOptions { listen: first.addr(), ..options() }, "cannot listen on"),
        (ProxyOptions { certificate: String::new(), ..options() }, "the fault proxy's certificate"),
        (ProxyOptions { key: "x".to_owned(), ..options() }, "the fault proxy's key"),
        (ProxyOptions { upstream_ca: String::new(), ..options() }, "the API server's CA"),
        (ProxyOptions { upstream_name: "no name".to_owned(), ..options() }, "invalid server name"),
    ];
    for (options, expected) in table {
        let error = FaultProxy::start(options).await.err().expect(expected);
        assert!(format!("{error:#}").contains(expected), "{error:#}");
    }
}
