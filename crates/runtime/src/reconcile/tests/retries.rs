//! When failed writes and failed reconciles are repeated, while watch events arrive.

use super::*;

/// An event every 20 ms for this time, as while pods start.
async fn events(test: &RunnerTest, name: &str, duration: Duration) {
    let end = Instant::now() + duration;
    while Instant::now() < end {
        test.add(name);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn reject_creates(test: &RunnerTest, code: u16) {
    let rejections = std::iter::repeat_with(|| LinkFault::Reject(Verb::Create, code)).take(1000);
    test.link.faults.lock().extend(rejections);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_starts_is_tried_within_a_second_however_many_events_arrive() {
    let test = runner_test(RunnerOptions::default());
    *test.controller.stubborn.lock() = true;
    reject_creates(&test, 503);
    events(&test, "a", Duration::from_secs(3)).await;
    // The delays are 100, 100, 200, 400, 800 and 1000 ms, each shortened by at most half.
    let attempts = test.link.count(Verb::Create);
    assert!((5..=12).contains(&attempts), "{attempts}");
    assert!(test.reconciles("a").len() > 70, "events still start reconciles");
    test.link.faults.lock().clear();
    tokio::time::sleep(Duration::from_millis(1_050)).await;
    assert!(test.server.get(MAPS, "ns", "a").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_stays_away_is_tried_less_often() {
    let test = runner_test(RunnerOptions::default());
    *test.controller.stubborn.lock() = true;
    reject_creates(&test, 503);
    events(&test, "a", Duration::from_secs(30)).await;
    let starting = test.link.count(Verb::Create);
    assert!((30..=70).contains(&starting), "{starting}");
    events(&test, "a", Duration::from_secs(600)).await;
    let later = test.link.count(Verb::Create) - starting;
    assert!((15..=32).contains(&later), "{later}");
}

#[tokio::test(start_paused = true)]
async fn the_delay_that_a_server_asks_for_holds_against_events() {
    let test = runner_test(RunnerOptions::default());
    *test.controller.stubborn.lock() = true;
    test.link.faults.lock().push_back(LinkFault::RetryAfter(Verb::Create, 10));
    events(&test, "a", Duration::from_millis(9_900)).await;
    assert_eq!(test.link.count(Verb::Create), 1);
    // Another content does not help an overloaded server.
    *test.controller.content.lock() = "changed";
    test.add("a");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(test.link.count(Verb::Create), 1);
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(test.link.count(Verb::Create), 2);
}

#[tokio::test(start_paused = true)]
async fn a_changed_write_is_sent_at_once() {
    let test = runner_test(RunnerOptions::default());
    *test.controller.stubborn.lock() = true;
    test.link.faults.lock().push_back(LinkFault::Reject(Verb::Create, 403));
    events(&test, "a", Duration::from_secs(5)).await;
    assert_eq!(test.link.count(Verb::Create), 1);
    *test.controller.content.lock() = "corrected";
    test.add("a");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(test.server.get(MAPS, "ns", "a").unwrap()["data"]["content"], "corrected");
}

#[tokio::test(start_paused = true)]
async fn a_write_that_failed_does_not_hold_the_others_back() {
    let server = TestApiServer::new();
    let (executor, link) = executor(&server);
    link.faults.lock().push_back(LinkFault::Reject(Verb::Create, 403));
    let both = plan([Step::new("s").write(create("a")).write(create("b"))]);
    let applied = executor.apply(&both, &WriteFence::open(), |_, _| false).await;
    assert_eq!((applied.outcome.written, link.count(Verb::Create)), (1, 2));
    let held = plan([Step::new("s").write(create("a")).write(create("c"))]);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let applied = executor.apply(&held, &WriteFence::open(), |_, _| false).await;
    assert_eq!((applied.outcome.written, link.count(Verb::Create)), (1, 3));
    let Retry::Write { after, sent: false } = applied.retry else { panic!("{:?}", applied.retry) };
    assert!((Duration::from_secs(10)..=Duration::from_secs(25)).contains(&after), "{after:?}");
    let Stop::Failed { failure, .. } = applied.outcome.stop else { panic!("{:?}", applied.outcome.stop) };
    assert_eq!((failure.reason, failure.failing_for), (reason::ADMISSION_REFUSED, Duration::from_secs(5)));
}

#[tokio::test(start_paused = true)]
async fn an_error_that_needs_a_user_is_reported_before_a_server_that_starts() {
    let server = TestApiServer::new();
    let (executor, link) = executor(&server);
    for code in [409, 503, 403] {
        link.faults.lock().push_back(LinkFault::Reject(Verb::Create, code));
    }
    let writes = plan([Step::new("s").write(create("a")).write(create("b")).write(create("c"))]);
    let applied = executor.apply(&writes, &WriteFence::open(), |_, _| false).await;
    assert!(
        matches!(&applied.outcome.stop, Stop::Failed { failure, .. } if failure.reason == reason::ADMISSION_REFUSED)
    );
    // The first of the three is sent again soon.
    assert!(matches!(applied.retry, Retry::Write { after, sent: true } if after <= Duration::from_millis(100)));
}

/// A failure that is not one of a write, such as a panic, is not repeated by events either.
#[tokio::test(start_paused = true)]
async fn a_reconcile_that_panics_waits_for_its_retry_and_an_urgent_change_does_not() {
    let test = runner_test(RunnerOptions::default());
    events(&test, "panics", Duration::from_secs(60)).await;
    // 1, 2, 4, 8, 16 and 32 seconds, each shortened by at most half.
    let reconciles = test.reconciles("panics");
    assert!((5..=8).contains(&reconciles.len()), "{}", reconciles.len());
    test.queue.add_urgent(ObjectKey::namespaced("ns", "panics"));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(test.reconciles("panics").len(), reconciles.len() + 1);
    // The urgent reconcile did not lengthen the delay: the seventh regular one follows within 64 seconds.
    events(&test, "panics", Duration::from_secs(64)).await;
    assert!(test.reconciles("panics").len() >= reconciles.len() + 2);
}
