//! What the executor sends and makes of the answers, where a real server differs from a simple one.

use super::*;
use crate::{client::Bucket, watch::SyncState};

fn patch(uid: &str, operations: Vec<Operation>) -> Write {
    Write::Patch { target: target("a"), uid: uid.to_owned(), operations }
}

fn set(path: &str, value: &str) -> Operation {
    Operation::set(path, value.into())
}

async fn stopped(executor: &Executor, write: Write) -> Stop {
    executor.apply(&plan([Step::new("s").write(write)]), &Fence::open(), |_, _| false).await.stop
}

async fn failure(executor: &Executor, write: Write) -> (ErrorClass, &'static str) {
    match stopped(executor, write).await {
        Stop::Failed { failure, .. } => (failure.class, failure.reason),
        stop => panic!("{stop:?}"),
    }
}

fn live(server: &Server) -> Value {
    server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "value": "old" } }))
}

/// An executor with a cache that is in step.
async fn with_cache(server: &Arc<Server>) -> (Executor, Cache<Value>, Arc<Link>) {
    let (cache, following) = cache(server);
    tokio::spawn(following);
    cache.ready().await;
    let (client, link) = server.client();
    (Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache.clone())), cache, link)
}

#[tokio::test(start_paused = true)]
async fn an_apply_to_another_object_is_a_conflict_and_not_a_refusal() {
    let server = Server::new();
    let (executor, _link) = executor(&server);
    assert_eq!(failure(&executor, apply("a", "gone", "x")).await, (ErrorClass::Conflict, reason::OBJECT_GONE));
    live(&server);
    assert_eq!(failure(&executor, apply("a", "another", "x")).await, (ErrorClass::Conflict, reason::OBJECT_CHANGED));
}

#[tokio::test(start_paused = true)]
async fn a_patch_is_exact_tests_the_uid_and_is_laid_over_the_cache() {
    let server = Server::new();
    let uid = uid(&live(&server));
    let (executor, cache, link) = with_cache(&server).await;
    let done = patch(&uid, vec![Operation::set("/data", json!({ "other": "new" }))]);
    assert_eq!(stopped(&executor, done).await, Stop::Done);
    // The field that is not in it is gone, and the next pass knows it already.
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["data"], json!({ "other": "new" }));
    assert_eq!(*cache.get(&target("a").key).unwrap(), json!({ "other": "new" }));
    assert_eq!(link.count(Verb::Get), 0);
    let foreign = patch("another", vec![set("/data/value", "x")]);
    assert_eq!(failure(&executor, foreign).await, (ErrorClass::Conflict, reason::OBJECT_CHANGED));
    let refused = patch(&uid, vec![set("/data/not a key", "x")]);
    assert_eq!(failure(&executor, refused).await, (ErrorClass::Invalid, reason::INVALID_OBJECT));
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["data"], json!({ "other": "new" }));
}

#[tokio::test(start_paused = true)]
async fn a_patch_that_was_made_for_an_older_state_is_a_conflict() {
    let server = Server::new();
    let uid = uid(&live(&server));
    let (client, cut) = server.client();
    let none = |_: ConfigMap| Value::Null;
    let all = Api::<ConfigMap>::all(client);
    let (cache, following) = watch(all, WatchConfig::default(), &[], none, CancellationToken::new());
    tokio::spawn(following);
    cache.ready().await;
    let (client, _link) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache));
    let remove = || patch(&uid, vec![Operation::remove("/data/value")]);
    cut.cut();
    server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": {} }));
    assert_eq!(failure(&executor, remove()).await, (ErrorClass::Conflict, reason::OBJECT_CHANGED));
    cut.mend();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(failure(&executor, remove()).await, (ErrorClass::Invalid, reason::INVALID_OBJECT));
}

/// What it expects is written as Go writes it, which means the same.
#[tokio::test(start_paused = true)]
async fn a_patch_may_expect_any_text() {
    let server = Server::new();
    let text = "# R&D <ca@example.com> \u{2028} ä \"quoted\" \\ \n";
    let uid =
        uid(&server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "value": text } })));
    let (executor, _cache, _link) = with_cache(&server).await;
    let write = patch(&uid, vec![set("/data/value", "").expecting(text.into())]);
    assert_eq!(stopped(&executor, write).await, Stop::Done);
}

/// Somebody may undo what we write, in the very request that writes it.
#[tokio::test(start_paused = true)]
async fn a_patch_that_changes_nothing_is_not_sent_again_until_something_else_has_changed() {
    let server = Server::new();
    let uid = uid(&live(&server));
    let (executor, cache, link) = with_cache(&server).await;
    let executor = executor.skip_no_op_patches(Duration::from_secs(600));
    let sent = async |value: &str| {
        let before = link.count(Verb::Patch);
        let steps = [Step::new("s").write(patch(&uid, vec![set("/data/value", value)]))];
        let outcome = executor.apply(&plan(steps), &Fence::open(), |_, _| false).await;
        assert_eq!(outcome.stop, Stop::Done);
        assert_eq!(outcome.written, link.count(Verb::Patch) - before);
        outcome.written
    };
    assert_eq!((sent("old").await, sent("old").await, sent("old").await), (1, 0, 0));
    assert_eq!((sent("new").await, sent("old").await), (1, 1), "each changed something");
    assert_eq!((sent("old").await, sent("old").await), (1, 0));
    server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "value": "old", "x": "y" } }));
    while cache.get(&target("a").key).is_none_or(|have| have["x"] != "y") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!((sent("old").await, sent("old").await), (1, 0), "it is another version");
    tokio::time::sleep(Duration::from_secs(601)).await;
    assert_eq!((sent("old").await, sent("old").await), (1, 0), "whoever undid it may be gone");
}

#[tokio::test(start_paused = true)]
async fn a_patch_of_a_place_that_has_changed_changes_nothing() {
    let server = Server::new();
    let uid = uid(&live(&server));
    let (executor, _cache, _link) = with_cache(&server).await;
    let of =
        |seen: &str| patch(&uid, vec![set("/data/other", "new"), set("/data/value", "new").expecting(seen.into())]);
    assert_eq!(failure(&executor, of("older")).await.0, ErrorClass::Invalid);
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["data"], json!({ "value": "old" }));
    assert_eq!(stopped(&executor, of("old")).await, Stop::Done);
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["data"], json!({ "other": "new", "value": "new" }));
}

fn status(uid: &str, phase: &str) -> StatusWrite {
    let desired = json!({ "phase": phase });
    StatusWrite { target: target("a"), uid: uid.to_owned(), observed: Value::Null, desired }
}

/// The server takes any UID in a status of a custom resource. The object was made anew, and we do not know yet.
#[tokio::test(start_paused = true)]
async fn a_status_is_not_written_to_another_object() {
    let server = Server::new();
    let old = uid(&live(&server));
    let (client, cut) = server.client();
    let value = |map: ConfigMap| json!(map.data);
    let all = Api::<ConfigMap>::all(client);
    let (cache, following) = watch(all, WatchConfig::default(), &[], value, CancellationToken::new());
    tokio::spawn(following);
    cache.ready().await;
    let (client, link) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache));
    cut.cut();
    server.remove(MAPS, "ns", "a");
    let made = live(&server);
    let failure = executor.report(&status(&old, "Running"), &Fence::open()).await.unwrap_err();
    assert_eq!((failure.class, failure.reason), (ErrorClass::Conflict, reason::OBJECT_CHANGED));
    assert_eq!(server.get(MAPS, "ns", "a"), Some(made));
    assert_eq!(link.count(Verb::Get), 0);
}

/// Between the observation and the status, the pass itself wrote the object.
#[tokio::test(start_paused = true)]
async fn a_status_follows_a_write_of_the_same_pass() {
    let server = Server::new();
    let uid = uid(&live(&server));
    let (executor, _cache, link) = with_cache(&server).await;
    assert_eq!(stopped(&executor, apply("a", &uid, "changed")).await, Stop::Done);
    assert_eq!(executor.report(&status(&uid, "Running"), &Fence::open()).await, Ok(true));
    assert_eq!(executor.report(&status(&uid, "Stopped"), &Fence::open()).await, Ok(true));
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["status"]["phase"], "Stopped");
    assert_eq!((link.count(Verb::Get), link.writes()), (0, 3));
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_only_seems_to_be_gone_is_not_taken_for_a_deletion() {
    let server = Server::new();
    let uid = uid(&live(&server));
    let (executor, cache, _link) = with_cache(&server).await;
    server.serve_kind(MAPS, false);
    assert_eq!(failure(&executor, delete("a", &uid)).await, (ErrorClass::Transient, reason::API_NOT_INSTALLED));
    while cache.sync_state() != SyncState::KindNotServed {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(stopped(&executor, delete("a", &uid)).await, Stop::Done);
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_turn_comes_after_the_lease_is_not_sent() {
    tokio::time::advance(Duration::from_secs(60)).await;
    let server = Server::new();
    let (client, link) = server.client_at_rate(Some(Bucket::new(0.1, 1)));
    let executor = Executor::new(client, "tester");
    assert_eq!(stopped(&executor, create("a")).await, Stop::Done);
    let fence = Fence::open();
    let late = fence.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(3)).await;
        late.close_for_test();
    });
    let outcome = executor.apply(&plan([Step::new("s").write(create("b"))]), &fence, |_, _| false).await;
    assert!(matches!(outcome.stop, Stop::Failed { failure, .. } if failure.reason == reason::NOT_LEADING));
    assert_eq!(link.requests.lock().len(), 1);
}

/// Ours, but somebody took the label away by which the cache finds it.
#[tokio::test(start_paused = true)]
async fn an_object_of_ours_that_lost_its_labels_is_seen_once_and_repaired() {
    let server = Server::new();
    let uid = uid(&live(&server));
    let (client, _) = server.client();
    let labels = |map: ConfigMap| json!(map.metadata.labels);
    let ours = WatchConfig::labels("of=us");
    let all = Api::<ConfigMap>::all(client);
    let (cache, following) = watch(all, ours, &[], labels, CancellationToken::new());
    tokio::spawn(following);
    cache.ready().await;
    assert!(cache.is_empty());
    let (client, _) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache.clone()));
    // What is written outside of the selection stays outside.
    assert_eq!(stopped(&executor, create("foreign")).await, Stop::Done);
    assert_eq!(cache.len(), 0);
    let create = plan([Step::new("s").write(create("a"))]);
    executor.apply(&create, &Fence::open(), |_, _| true).await;
    assert_eq!(*cache.get(&target("a").key).unwrap(), Value::Null);
    let repaired = patch(&uid, vec![Operation::set("/metadata/labels", json!({ "of": "us" }))]);
    assert_eq!(stopped(&executor, repaired).await, Stop::Done);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(*cache.get(&target("a").key).unwrap(), json!({ "of": "us" }));
    // And what leaves the selection leaves the cache, when the watch says so.
    let left = patch(&uid, vec![Operation::set("/metadata/labels", json!({}))]);
    assert_eq!(stopped(&executor, left).await, Stop::Done);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(cache.is_empty());
}
