//! Watches stream, and rules stall and cut them: those that come, and those that are already open.

use super::{
    super::{Fault, Match, Outcome, Rule, Verb, When},
    both,
};

const STALL: Fault = Fault::StallWatch { after_events: 0 };
const CUT: Fault = Fault::CutWatch { after_events: 0 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_arrive_one_by_one_and_the_end_is_clean() {
    both(async |bench| {
        let mut watch = bench.client().await.watch().await;
        let feed = bench.api.feed(0).await;
        for event in ["one", "two", "three"] {
            feed.send(format!("{event}\n").into()).unwrap();
            assert_eq!(watch.event().await, event);
        }
        drop(feed);
        bench.api.forget_feeds();
        assert_eq!(watch.next().await.unwrap(), None);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stall_lets_n_events_pass_then_none_until_the_rule_goes() {
    both(async |bench| {
        let rule = bench.proxy.add(Rule::always(Match::any(), Fault::StallWatch { after_events: 2 }));
        let mut client = bench.client().await;
        let mut watch = client.watch().await;
        let feed = bench.api.feed(0).await;
        // Frames are not events: the second ends in the middle of one, and the third event is cut out of the last.
        for frame in ["o", "ne\ntw", "o\nthree\nfour\n"] {
            feed.send(frame.into()).unwrap();
        }
        assert_eq!(watch.event().await, "one");
        assert_eq!(watch.event().await, "two");
        rule.wait_hit(1).await.unwrap();
        watch.assert_silent().await;
        assert_eq!(bench.outcomes(), [Outcome::Fault { fault: "StallWatch", committed: Some(200) }]);

        rule.remove();
        assert_eq!(watch.event().await, "three");
        assert_eq!(watch.event().await, "four");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_watch_does_not_even_end() {
    both(async |bench| {
        let rule = bench.proxy.add(Rule::always(Match::any(), STALL));
        let mut watch = bench.client().await.watch().await;
        rule.wait_hit(1).await.unwrap();
        bench.api.kill().await;
        watch.assert_silent().await;
        rule.remove();
        watch.next().await.unwrap_err();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_watch_ends_when_its_client_gives_up() {
    both(async |bench| {
        let rule = bench.proxy.add(Rule::always(Match::any(), STALL));
        let mut client = bench.client().await;
        let watch = client.watch().await;
        let feed = bench.api.feed(0).await;
        rule.wait_hit(1).await.unwrap();
        drop((watch, client));
        feed.closed().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_lets_n_events_pass_then_breaks_the_watch() {
    both(async |bench| {
        let rule =
            bench.proxy.add(Rule::new(Match::verb(Verb::Watch), When::First(1), Fault::CutWatch { after_events: 2 }));
        let mut watch = bench.client().await.watch().await;
        let feed = bench.api.feed(0).await;
        feed.send("one\ntwo\nthree\n".into()).unwrap();
        assert_eq!(watch.event().await, "one");
        assert_eq!(watch.event().await, "two");
        watch.next().await.unwrap_err();
        assert_eq!(rule.hits(), 1);
        feed.closed().await;

        let mut again = bench.client().await.watch().await;
        bench.api.feed(1).await.send("one\ntwo\nthree\n".into()).unwrap();
        for event in ["one", "two", "three"] {
            assert_eq!(again.event().await, event);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_watches_are_struck_at_once() {
    both(async |bench| {
        let mut watch = bench.client().await.watch().await;
        let mut other = bench.client_as("kubectl/1.36").await.watch().await;
        let feeds = [bench.api.feed(0).await, bench.api.feed(1).await];
        let send = |event: &'static str| feeds.iter().for_each(|feed| feed.send(event.into()).unwrap());
        send("before\n");
        assert_eq!(watch.event().await, "before");
        assert_eq!(other.event().await, "before");

        let mine = Match::any().user_agent("operator/");
        let stall = bench.proxy.add(Rule::always(mine.clone(), STALL));
        stall.wait_hit(1).await.unwrap();
        send("during\n");
        watch.assert_silent().await;
        assert_eq!(other.event().await, "during");

        // A stalled watch can still be cut, as it would be in the end.
        let cut = bench.proxy.add(Rule::always(mine, CUT));
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
async fn open_watches_count_events_from_the_rule_on() {
    both(async |bench| {
        let mut watch = bench.client().await.watch().await;
        let feed = bench.api.feed(0).await;
        send_one(&feed, "one\n");
        assert_eq!(watch.event().await, "one");
        let rule = bench.proxy.add(Rule::always(Match::any(), Fault::StallWatch { after_events: 1 }));
        send_one(&feed, "two\nthree\n");
        assert_eq!(watch.event().await, "two");
        rule.wait_hit(1).await.unwrap();
        watch.assert_silent().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_watches_count_as_the_requests_that_they_are() {
    both(async |bench| {
        let mut client = bench.client().await;
        drop((client.watch().await, client));
        bench.api.feed(0).await.closed().await;
        let mut first = bench.client().await.watch().await;
        let mut second = bench.client().await.watch().await;
        // Of the two that are open the second: not one that has ended, and none that comes after.
        let _rule = bench.proxy.add(Rule::new(Match::any(), When::Nth(2), CUT));
        second.next().await.unwrap_err();
        let mut third = bench.client().await.watch().await;
        send_one(&bench.api.feed(1).await, "one\n");
        send_one(&bench.api.feed(3).await, "one\n");
        assert_eq!(first.event().await, "one");
        assert_eq!(third.event().await, "one");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_client_can_be_cut_off_by_rules() {
    both(async |bench| {
        let mut watch = bench.client().await.watch().await;
        let feed = bench.api.feed(0).await;
        let mine = Match::any().user_agent("operator/");
        let drop_all = bench.proxy.add(Rule::always(mine.clone(), Fault::Drop));
        let stall = bench.proxy.add(Rule::always(mine, STALL));
        stall.wait_hit(1).await.unwrap();
        send_one(&feed, "unseen\n");
        watch.assert_silent().await;
        let mut client = bench.client().await;
        tokio::select! {
            answer = client.create("lost") => panic!("{answer:?}"),
            hit = drop_all.wait_hit(1) => hit.unwrap(),
        }
        bench.client_as("kubectl/1.36").await.create("kept").await.unwrap();
        assert_eq!(bench.api.committed_bodies(), ["", "kept"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delayed_watch_is_a_watch_still() {
    both(async |bench| {
        let delay = Fault::Delay(std::time::Duration::from_millis(1));
        let _delay = bench.proxy.add(Rule::always(Match::any(), delay));
        let mut watch = bench.client().await.watch().await;
        let _cut = bench.proxy.add(Rule::always(Match::any(), CUT));
        watch.next().await.unwrap_err();
    })
    .await;
}
