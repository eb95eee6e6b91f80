//! Watches are streamed, and rules stall and cut new and open watches.

use super::{
    super::{Match, ProxyFault, ProxyRule, RequestOutcome, RequestVerb, When},
    with_both_protocols,
};

const STALL: ProxyFault = ProxyFault::StallWatch { after_events: 0 };
const CUT: ProxyFault = ProxyFault::CutWatch { after_events: 0 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_streamed_and_the_watch_ends_cleanly() {
    with_both_protocols(async |fixture| {
        let mut watch = fixture.client().await.watch().await;
        let feed = fixture.api.feed(0).await;
        for event in ["one", "two", "three"] {
            feed.send(format!("{event}\n").into()).unwrap();
            assert_eq!(watch.event().await, event);
        }
        drop(feed);
        fixture.api.forget_feeds();
        assert_eq!(watch.next().await.unwrap(), None);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stall_lets_n_events_pass_then_none_until_the_rule_is_removed() {
    with_both_protocols(async |fixture| {
        let rule = fixture.proxy.add(ProxyRule::always(Match::any(), ProxyFault::StallWatch { after_events: 2 }));
        let mut client = fixture.client().await;
        let mut watch = client.watch().await;
        let feed = fixture.api.feed(0).await;
        // Frames are not events: the second frame ends in the middle of an event, and the last contains several events.
        for frame in ["o", "ne\ntw", "o\nthree\nfour\n"] {
            feed.send(frame.into()).unwrap();
        }
        assert_eq!(watch.event().await, "one");
        assert_eq!(watch.event().await, "two");
        rule.wait_hit(1).await.unwrap();
        watch.assert_silent().await;
        assert_eq!(fixture.outcomes(), [RequestOutcome::Fault { fault: "StallWatch", committed: Some(200) }]);

        rule.remove();
        assert_eq!(watch.event().await, "three");
        assert_eq!(watch.event().await, "four");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_watch_does_not_end_with_the_api_server() {
    with_both_protocols(async |fixture| {
        let rule = fixture.proxy.add(ProxyRule::always(Match::any(), STALL));
        let mut watch = fixture.client().await.watch().await;
        rule.wait_hit(1).await.unwrap();
        fixture.api.kill().await;
        watch.assert_silent().await;
        rule.remove();
        watch.next().await.unwrap_err();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_watch_ends_when_its_client_disconnects() {
    with_both_protocols(async |fixture| {
        let rule = fixture.proxy.add(ProxyRule::always(Match::any(), STALL));
        let mut client = fixture.client().await;
        let watch = client.watch().await;
        let feed = fixture.api.feed(0).await;
        rule.wait_hit(1).await.unwrap();
        drop((watch, client));
        feed.closed().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_lets_n_events_pass_then_closes_the_watch() {
    with_both_protocols(async |fixture| {
        let rule = fixture.proxy.add(ProxyRule::new(
            Match::verb(RequestVerb::Watch),
            When::First(1),
            ProxyFault::CutWatch { after_events: 2 },
        ));
        let mut watch = fixture.client().await.watch().await;
        let feed = fixture.api.feed(0).await;
        feed.send("one\ntwo\nthree\n".into()).unwrap();
        assert_eq!(watch.event().await, "one");
        assert_eq!(watch.event().await, "two");
        watch.next().await.unwrap_err();
        assert_eq!(rule.hits(), 1);
        feed.closed().await;

        let mut again = fixture.client().await.watch().await;
        fixture.api.feed(1).await.send("one\ntwo\nthree\n".into()).unwrap();
        for event in ["one", "two", "three"] {
            assert_eq!(again.event().await, event);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_rule_affects_open_watches_immediately() {
    with_both_protocols(async |fixture| {
        let mut watch = fixture.client().await.watch().await;
        let mut other = fixture.client_as("kubectl/1.36").await.watch().await;
        let feeds = [fixture.api.feed(0).await, fixture.api.feed(1).await];
        let send = |event: &'static str| feeds.iter().for_each(|feed| feed.send(event.into()).unwrap());
        send("before\n");
        assert_eq!(watch.event().await, "before");
        assert_eq!(other.event().await, "before");

        let mine = Match::any().user_agent("operator/");
        let stall = fixture.proxy.add(ProxyRule::always(mine.clone(), STALL));
        stall.wait_hit(1).await.unwrap();
        send("during\n");
        watch.assert_silent().await;
        assert_eq!(other.event().await, "during");

        // A stalled watch can still be cut.
        let cut = fixture.proxy.add(ProxyRule::always(mine, CUT));
        watch.next().await.unwrap_err();
        assert_eq!((stall.hits(), cut.hits()), (1, 1));
        send_one(&feeds[1], "after\n");
        assert_eq!(other.event().await, "after");
    })
    .await;
}

fn send_one(feed: &super::api_server::Feed, event: &'static str) {
    feed.send(event.into()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_an_open_watch_count_from_the_time_of_the_rule() {
    with_both_protocols(async |fixture| {
        let mut watch = fixture.client().await.watch().await;
        let feed = fixture.api.feed(0).await;
        send_one(&feed, "one\n");
        assert_eq!(watch.event().await, "one");
        let rule = fixture.proxy.add(ProxyRule::always(Match::any(), ProxyFault::StallWatch { after_events: 1 }));
        send_one(&feed, "two\nthree\n");
        assert_eq!(watch.event().await, "two");
        rule.wait_hit(1).await.unwrap();
        watch.assert_silent().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_rule_counts_open_watches_as_requests() {
    with_both_protocols(async |fixture| {
        let mut client = fixture.client().await;
        drop((client.watch().await, client));
        fixture.api.feed(0).await.closed().await;
        let mut first = fixture.client().await.watch().await;
        let mut second = fixture.client().await.watch().await;
        // Affects the second open watch, not the watch that has ended and not later watches.
        let _rule = fixture.proxy.add(ProxyRule::new(Match::any(), When::Nth(2), CUT));
        second.next().await.unwrap_err();
        let mut third = fixture.client().await.watch().await;
        send_one(&fixture.api.feed(1).await, "one\n");
        send_one(&fixture.api.feed(3).await, "one\n");
        assert_eq!(first.event().await, "one");
        assert_eq!(third.event().await, "one");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_can_isolate_one_client() {
    with_both_protocols(async |fixture| {
        let mut watch = fixture.client().await.watch().await;
        let feed = fixture.api.feed(0).await;
        let mine = Match::any().user_agent("operator/");
        let drop_all = fixture.proxy.add(ProxyRule::always(mine.clone(), ProxyFault::Drop));
        let stall = fixture.proxy.add(ProxyRule::always(mine, STALL));
        stall.wait_hit(1).await.unwrap();
        send_one(&feed, "unseen\n");
        watch.assert_silent().await;
        let mut client = fixture.client().await;
        tokio::select! {
            answer = client.create("lost") => panic!("{answer:?}"),
            hit = drop_all.wait_hit(1) => hit.unwrap(),
        }
        fixture.client_as("kubectl/1.36").await.create("kept").await.unwrap();
        assert_eq!(fixture.api.committed_bodies(), ["", "kept"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delayed_watch_can_still_be_cut() {
    with_both_protocols(async |fixture| {
        let delay = ProxyFault::Delay(std::time::Duration::from_millis(1));
        let _delay = fixture.proxy.add(ProxyRule::always(Match::any(), delay));
        let mut watch = fixture.client().await.watch().await;
        let _cut = fixture.proxy.add(ProxyRule::always(Match::any(), CUT));
        watch.next().await.unwrap_err();
    })
    .await;
}
