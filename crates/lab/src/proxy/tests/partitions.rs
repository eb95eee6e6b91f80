//! A partition affects all connections, and ends.

use http::StatusCode;

use super::{
    super::{Match, Partition, ProxyFault, ProxyRule},
    AGENT, DEADLINE, SILENCE, with_both_protocols,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole_freezes_connections_until_it_ends() {
    with_both_protocols(async |fixture| {
        let mut watch = fixture.client().await.watch().await;
        let mut client = fixture.client().await;
        client.create("before").await.unwrap();
        fixture.proxy.partition(Partition::BlackHole);

        fixture.api.feed(0).await.send("unseen\n".into()).unwrap();
        watch.assert_silent().await;
        let frozen = tokio::spawn(async move { client.create("frozen").await });
        let new_client = {
            let connecting = fixture.try_client(AGENT);
            tokio::pin!(connecting);
            assert!(tokio::time::timeout(SILENCE, &mut connecting).await.is_err(), "a new connection was answered");
            assert!(!frozen.is_finished());
            assert_eq!(fixture.api.committed_bodies(), ["", "before"]);

            fixture.proxy.partition(Partition::None);
            connecting.await
        };
        assert_eq!(frozen.await.unwrap().unwrap(), StatusCode::CREATED);
        assert_eq!(new_client.unwrap().create("after").await.unwrap(), StatusCode::CREATED);
        assert_eq!(watch.event().await, "unseen");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_reset_until_the_partition_ends() {
    with_both_protocols(async |fixture| {
        let mut watch = fixture.client().await.watch().await;
        let mut client = fixture.client().await;
        fixture.proxy.partition(Partition::Refuse);
        watch.next().await.unwrap_err();
        client.create("lost").await.unwrap_err();
        let new_client = async { fixture.try_client(AGENT).await?.create("lost").await };
        new_client.await.unwrap_err();

        fixture.proxy.partition(Partition::None);
        assert_eq!(fixture.client().await.create("after").await.unwrap(), StatusCode::CREATED);
        assert_eq!(fixture.api.committed_bodies(), ["", "after"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_can_change_its_kind() {
    with_both_protocols(async |fixture| {
        let mut client = fixture.client().await;
        client.create("before").await.unwrap();
        fixture.proxy.partition(Partition::BlackHole);
        fixture.proxy.partition(Partition::Refuse);
        client.create("lost").await.unwrap_err();
        fixture.proxy.partition(Partition::None);
        fixture.client().await.create("after").await.unwrap();
        assert_eq!(fixture.api.committed_bodies(), ["before", "after"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_read_before_a_partition_is_not_forwarded_during_it() {
    with_both_protocols(async |fixture| {
        let mut client = fixture.client().await;
        let delay = fixture.proxy.add(ProxyRule::always(Match::any(), ProxyFault::Delay(DEADLINE * 10)));
        let (status, ()) = tokio::join!(client.create("delayed"), async {
            delay.wait_hit(1).await.unwrap();
            fixture.proxy.partition(Partition::BlackHole);
            delay.remove();
            tokio::time::sleep(SILENCE).await;
            assert!(fixture.api.committed().is_empty());
            fixture.proxy.partition(Partition::None);
        });
        assert_eq!(status.unwrap(), StatusCode::CREATED);
    })
    .await;
}
