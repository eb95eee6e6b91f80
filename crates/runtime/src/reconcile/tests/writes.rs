//! What the executor sends, and how it handles the responses of a real server in special cases.

use super::*;
use crate::{
    client::Bucket,
    watch::{Expression, SyncState},
};

fn patch(uid: &str, operations: Vec<Operation>) -> Write {
    Write::Patch { target: target("a"), uid: uid.to_owned(), operations }
}

fn set(path: &str, value: &str) -> Operation {
    Operation::set(path, value.into())
}

async fn stopped(executor: &Executor, write: Write) -> Stop {
    executor.apply(&plan([Step::new("s").write(write)]), &WriteFence::open(), |_, _| false).await.outcome.stop
}

async fn failure(executor: &Executor, write: Write) -> (ErrorClass, &'static str) {
    match stopped(executor, write).await {
        Stop::Failed { failure, .. } => (failure.class, failure.reason),
        stop => panic!("{stop:?}"),
    }
}

fn live(server: &TestApiServer) -> Value {
    server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "value": "old" } }))
}

/// An executor with a synced cache.
async fn with_cache(server: &Arc<TestApiServer>) -> (Executor, Cache<Value>, Arc<Link>) {
    let (cache, watching) = cache(server);
    tokio::spawn(watching);
    cache.ready().await;
    let (client, link) = server.client();
    (Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache.clone())), cache, link)
}

#[tokio::test(start_paused = true)]
async fn an_apply_to_an_object_with_another_uid_is_a_conflict() {
    let server = TestApiServer::new();
    let (executor, _link) = executor(&server);
    assert_eq!(failure(&executor, apply("a", "gone", "x")).await, (ErrorClass::Conflict, reason::OBJECT_GONE));
    live(&server);
    assert_eq!(failure(&executor, apply("a", "another", "x")).await, (ErrorClass::Conflict, reason::OBJECT_CHANGED));
}

#[tokio::test(start_paused = true)]
async fn a_patch_without_changes_succeeds_if_the_object_is_gone_or_was_replaced() {
    let server = TestApiServer::new();
    let (executor, _link) = executor(&server);
    assert_eq!(stopped(&executor, patch("gone", Vec::new())).await, Stop::Done);
    live(&server);
    assert_eq!(stopped(&executor, patch("another", Vec::new())).await, Stop::Done);
    let change = patch("another", vec![Operation::set("/data", json!({}))]);
    assert_eq!(failure(&executor, change).await, (ErrorClass::Conflict, reason::OBJECT_CHANGED));
}

#[tokio::test(start_paused = true)]
async fn a_patch_replaces_the_field_tests_the_uid_and_updates_the_cache() {
    let server = TestApiServer::new();
    let uid = uid(&live(&server));
    let (executor, cache, link) = with_cache(&server).await;
    let done = patch(&uid, vec![Operation::set("/data", json!({ "other": "new" }))]);
    assert_eq!(stopped(&executor, done).await, Stop::Done);
    // The patch removes other content of the field, and the cache knows it already.
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["data"], json!({ "other": "new" }));
    assert_eq!(*cache.get(&target("a").key).unwrap(), json!({ "other": "new" }));
    assert_eq!(link.count(Verb::Get), 0);
    let foreign = patch("another", vec![set("/data/value", "x")]);
    assert_eq!(failure(&executor, foreign).await, (ErrorClass::Conflict, reason::OBJECT_CHANGED));
    let rejected = patch(&uid, vec![set("/data/not a key", "x")]);
    assert_eq!(failure(&executor, rejected).await, (ErrorClass::Invalid, reason::INVALID_OBJECT));
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["data"], json!({ "other": "new" }));
}

/// The watch may deliver the deletion later, and the next reconcile must not repeat the patch.
#[tokio::test(start_paused = true)]
async fn an_object_whose_last_finalizer_is_removed_leaves_the_cache_at_once() {
    let server = TestApiServer::new();
    let metadata = json!({
        "name": "a", "namespace": "ns", "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x/y", "ours"],
    });
    let uid = uid(&server.put(MAPS, json!({ "metadata": metadata })));
    let (executor, cache, _link) = with_cache(&server).await;
    let one_less = patch(&uid, vec![Operation::set("/metadata/finalizers", json!(["ours"]))]);
    assert_eq!(stopped(&executor, one_less).await, Stop::Done);
    assert!(cache.get(&target("a").key).is_some());
    let none = patch(&uid, vec![Operation::set("/metadata/finalizers", json!([]))]);
    assert_eq!(stopped(&executor, none).await, Stop::Done);
    assert!(cache.get(&target("a").key).is_none() && server.get(MAPS, "ns", "a").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_rejected_patch_for_an_older_version_is_a_conflict() {
    let server = TestApiServer::new();
    let uid = uid(&live(&server));
    let (client, cut) = server.client();
    let none = |_: ConfigMap| Value::Null;
    let all = Api::<ConfigMap>::all(client);
    let (cache, watching) = watch(all, WatchConfig::default(), &[], none, CancellationToken::new());
    tokio::spawn(watching);
    cache.ready().await;
    let (client, _link) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache));
    let remove = || patch(&uid, vec![Operation::remove("/data/value")]);
    let invalid = || patch(&uid, vec![set("/data/a/b/c", "the parent does not exist")]);
    cut.cut();
    server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": {} }));
    assert_eq!(failure(&executor, remove()).await, (ErrorClass::Conflict, reason::OBJECT_CHANGED));
    assert_eq!(failure(&executor, invalid()).await, (ErrorClass::Conflict, reason::OBJECT_CHANGED));
    cut.restore();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(failure(&executor, invalid()).await, (ErrorClass::Invalid, reason::INVALID_OBJECT));
    // The cache may have changed after the plan was made.
    assert_eq!(failure(&executor, remove()).await, (ErrorClass::Conflict, reason::OBJECT_CHANGED));
}

/// The expected value is encoded as Go encodes JSON.
#[tokio::test(start_paused = true)]
async fn a_patch_may_expect_a_text_with_special_characters() {
    let server = TestApiServer::new();
    let text = "# R&D <ca@example.com> \u{2028} ä \"quoted\" \\ \n";
    let uid =
        uid(&server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "value": text } })));
    let (executor, _cache, _link) = with_cache(&server).await;
    let write = patch(&uid, vec![set("/data/value", "").expecting(text.into())]);
    assert_eq!(stopped(&executor, write).await, Stop::Done);
}

/// A webhook may undo a write in the same request.
#[tokio::test(start_paused = true)]
async fn a_no_op_patch_is_not_sent_again_until_the_object_changes_or_its_ttl_ends() {
    let server = TestApiServer::new();
    let uid = uid(&live(&server));
    let (executor, cache, link) = with_cache(&server).await;
    let executor = executor.skip_no_op_patches(Duration::from_secs(600));
    let sent = async |value: &str| {
        let before = link.count(Verb::Patch);
        let steps = [Step::new("s").write(patch(&uid, vec![set("/data/value", value)]))];
        let outcome = executor.apply(&plan(steps), &WriteFence::open(), |_, _| false).await.outcome;
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
    assert_eq!((sent("old").await, sent("old").await), (1, 0), "the object has another version");
    tokio::time::sleep(Duration::from_secs(601)).await;
    assert_eq!((sent("old").await, sent("old").await), (1, 0), "the TTL has ended");
}

#[tokio::test(start_paused = true)]
async fn a_patch_with_an_outdated_expected_value_changes_nothing() {
    let server = TestApiServer::new();
    let uid = uid(&live(&server));
    let (executor, _cache, _link) = with_cache(&server).await;
    let expecting =
        |value: &str| patch(&uid, vec![set("/data/other", "new"), set("/data/value", "new").expecting(value.into())]);
    // A cache may have changed between the plan and the write.
    assert_eq!(failure(&executor, expecting("older")).await.0, ErrorClass::Conflict);
    assert_eq!(failure(&executor, patch(&uid, vec![Operation::remove("/data/gone")])).await.0, ErrorClass::Conflict);
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["data"], json!({ "value": "old" }));
    assert_eq!(stopped(&executor, expecting("old")).await, Stop::Done);
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["data"], json!({ "other": "new", "value": "new" }));
}

fn status(uid: &str, phase: &str) -> StatusWrite {
    let desired = json!({ "phase": phase });
    StatusWrite { target: target("a"), uid: uid.to_owned(), observed: Value::Null, desired }
}

/// The server accepts any UID in a status of a custom resource. Here the object was created again, and the cache does
/// not know it yet.
#[tokio::test(start_paused = true)]
async fn a_status_is_not_written_to_an_object_that_was_created_again() {
    let server = TestApiServer::new();
    let old = uid(&live(&server));
    let (client, cut) = server.client();
    let value = |map: ConfigMap| json!(map.data);
    let all = Api::<ConfigMap>::all(client);
    let (cache, watching) = watch(all, WatchConfig::default(), &[], value, CancellationToken::new());
    tokio::spawn(watching);
    cache.ready().await;
    let (client, link) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache));
    cut.cut();
    server.remove(MAPS, "ns", "a");
    let created = live(&server);
    let failure = executor.report(&status(&old, "Running"), &WriteFence::open()).await.unwrap_err();
    assert_eq!((failure.class, failure.reason), (ErrorClass::Conflict, reason::OBJECT_CHANGED));
    assert_eq!(server.get(MAPS, "ns", "a"), Some(created));
    assert_eq!(link.count(Verb::Get), 0);
}

/// The reconcile itself changed the object after it observed it.
#[tokio::test(start_paused = true)]
async fn a_status_can_be_written_after_a_write_of_the_same_reconcile() {
    let server = TestApiServer::new();
    let uid = uid(&live(&server));
    let (executor, _cache, link) = with_cache(&server).await;
    assert_eq!(stopped(&executor, apply("a", &uid, "changed")).await, Stop::Done);
    assert_eq!(executor.report(&status(&uid, "Running"), &WriteFence::open()).await, Ok(true));
    assert_eq!(executor.report(&status(&uid, "Stopped"), &WriteFence::open()).await, Ok(true));
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["status"]["phase"], "Stopped");
    assert_eq!((link.count(Verb::Get), link.writes()), (0, 3));
}

#[tokio::test(start_paused = true)]
async fn a_delete_of_a_kind_that_is_not_served_succeeds_only_if_the_cache_agrees() {
    let server = TestApiServer::new();
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
async fn a_write_that_waits_for_the_rate_limit_longer_than_the_lease_is_not_sent() {
    tokio::time::advance(Duration::from_secs(60)).await;
    let server = TestApiServer::new();
    let (client, link) = server.client_at_rate(Some(Bucket::new(0.1, 1)));
    let executor = Executor::new(client, "tester");
    assert_eq!(stopped(&executor, create("a")).await, Stop::Done);
    let fence = WriteFence::open();
    let closing = fence.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(3)).await;
        closing.close_for_test();
    });
    let outcome = executor.apply(&plan([Step::new("s").write(create("b"))]), &fence, |_, _| false).await.outcome;
    assert!(matches!(outcome.stop, Stop::Failed { failure, .. } if failure.reason == reason::NOT_LEADING));
    assert_eq!(link.requests.lock().len(), 1);
}

/// Another client removed the label that the cache selects.
#[tokio::test(start_paused = true)]
async fn an_object_of_the_operator_that_lost_its_labels_is_found_and_repaired() {
    let server = TestApiServer::new();
    let uid = uid(&live(&server));
    let (client, _) = server.client();
    let labels = |map: ConfigMap| json!(map.metadata.labels);
    let ours = WatchConfig::labels(Expression::Equal("of".to_owned(), "us".to_owned()));
    let all = Api::<ConfigMap>::all(client);
    let (cache, watching) = watch(all, ours, &[], labels, CancellationToken::new());
    tokio::spawn(watching);
    cache.ready().await;
    assert!(cache.is_empty());
    let (client, _) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache.clone()));
    // A write that the watch does not select does not enter the cache.
    assert_eq!(stopped(&executor, create("foreign")).await, Stop::Done);
    assert_eq!(cache.len(), 0);
    let create = plan([Step::new("s").write(create("a"))]);
    executor.apply(&create, &WriteFence::open(), |_, _| true).await;
    assert_eq!(*cache.get(&target("a").key).unwrap(), Value::Null);
    let repaired = patch(&uid, vec![Operation::set("/metadata/labels", json!({ "of": "us" }))]);
    assert_eq!(stopped(&executor, repaired).await, Stop::Done);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(*cache.get(&target("a").key).unwrap(), json!({ "of": "us" }));
    // When an object no longer matches the selector, the watch removes it from the cache.
    let left = patch(&uid, vec![Operation::set("/metadata/labels", json!({}))]);
    assert_eq!(stopped(&executor, left).await, Stop::Done);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(cache.is_empty());
}

/// The upstream operator, with the same field manager, wrote the status by updates.
#[tokio::test(start_paused = true)]
async fn status_fields_of_a_replaced_operator_are_removed_and_those_of_other_clients_stay() {
    let server = TestApiServer::new();
    let update = |manager: &str, fields: Value| json!({ "manager": manager, "operation": "Update", "subresource": "status", "fieldsV1": { "f:status": fields } });
    let live = server.put(
        MAPS,
        json!({
            "metadata": { "name": "a", "namespace": "ns", "managedFields": [
                update("tester", json!({ "f:phase": {}, "f:addresses": {}, "f:shared": {} })),
                update("other", json!({ "f:shared": {}, "f:theirs": {} })),
            ] },
            "status": { "phase": "Old", "addresses": ["10.0.0.1"], "shared": 1, "theirs": 2 },
        }),
    );
    let (executor, link) = executor(&server);
    let (observed, desired) = (json!({ "phase": "Old", "addresses": ["10.0.0.1"] }), json!({ "phase": "New" }));
    let status = StatusWrite { target: target("a"), uid: uid(&live), observed, desired };
    assert_eq!(executor.report(&status, &WriteFence::open()).await, Ok(true));
    let status = server.get(MAPS, "ns", "a").unwrap()["status"].clone();
    assert_eq!(status, json!({ "phase": "New", "shared": 1, "theirs": 2 }));
    assert_eq!(link.writes(), 2);
}
