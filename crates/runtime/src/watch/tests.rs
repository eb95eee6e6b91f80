//! Caches against a server with real resource versions: sync, kinds that are not served, the operator's writes, cut
//! connections.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, core::PartialObjectMeta};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    testing::{Link, LinkFault, TestApiServer},
    verb::Verb,
};

const MAPS: &str = "/api/v1/configmaps";

fn map(name: &str, value: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name, "namespace": "ns" },
        "data": { "value": value, "large": "x".repeat(100) },
    })
}

fn value_of(map: ConfigMap) -> String {
    map.data.unwrap_or_default().remove("value").unwrap_or_default()
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::namespaced("ns", name)
}

/// The changes as lines such as `name old>new`.
type ChangeLog = Arc<Mutex<Vec<String>>>;

fn cache(server: &Arc<TestApiServer>, page_size: u32) -> (Cache<String>, ChangeLog, Arc<Link>, CancellationToken) {
    let (client, link) = server.client();
    let (changes, stop) = (ChangeLog::default(), CancellationToken::new());
    let log = changes.clone();
    let config = WatchConfig { page_size, ..WatchConfig::default() };
    let (cache, watching) = watch(
        Api::<ConfigMap>::all(client),
        config,
        &[("value", |_, value: &String| vec![value.as_str().into()])],
        value_of,
        stop.clone(),
    );
    cache.subscribe(move |change| {
        let side = |value: &Option<Arc<String>>| value.as_ref().map_or("-".to_owned(), ToString::to_string);
        log.lock().push(format!("{} {}>{}", change.key.name(), side(&change.old), side(&change.new)));
    });
    tokio::spawn(watching);
    (cache, changes, link, stop)
}

async fn until(condition: impl Fn() -> bool) {
    tokio::time::timeout(Duration::from_secs(600), async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the condition did not become true");
}

#[tokio::test(start_paused = true)]
async fn a_cache_lists_in_pages_and_then_watches() {
    let server = TestApiServer::new();
    for n in 0..25 {
        server.put(MAPS, map(&format!("m{n:02}"), "old"));
    }
    let (cache, changes, link, _stop) = cache(&server, 10);
    assert_eq!(cache.sync_state(), SyncState::Pending);
    assert!(!cache.is_complete());
    cache.ready().await;
    assert_eq!((cache.len(), cache.sync_state(), cache.is_complete()), (25, SyncState::Synced, true));
    assert_eq!(link.count(Verb::List), 3);
    changes.lock().clear();
    server.put(MAPS, map("m03", "new"));
    until(|| cache.get(&key("m03")).is_some_and(|value| *value == "new")).await;
    server.remove(MAPS, "ns", "m04");
    until(|| cache.get(&key("m04")).is_none()).await;
    // A change of a field that the cache does not keep is not reported.
    let mut same = map("m05", "old");
    same["data"]["large"] = "y".into();
    server.put(MAPS, same);
    server.put(MAPS, map("m06", "last"));
    until(|| cache.get(&key("m06")).is_some_and(|value| *value == "last")).await;
    assert_eq!(*changes.lock(), ["m03 old>new", "m04 old>-", "m06 old>last"]);
    assert_eq!(cache.by_index("value", "new").len(), 1);
}

/// A worker and the watch change one object at the same time. A subscriber that counts objects would miscount forever
/// if it saw the changes in another order than the cache.
#[tokio::test]
async fn subscribers_see_the_changes_of_an_object_in_the_order_of_the_cache() {
    let server = TestApiServer::new();
    let (cache, _changes, _link, _stop) = cache(&server, 10);
    cache.ready().await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (began, first_began) = std::sync::mpsc::channel();
    let (arrived, second_arrived) = std::sync::mpsc::channel();
    let (log, second_arrived) = (seen.clone(), Mutex::new(second_arrived));
    cache.subscribe(move |change| {
        let new = change.new.as_deref().cloned().unwrap_or_default();
        if new == "1" {
            began.send(()).unwrap();
            // Without the order, the second change arrives in this time.
            let _ = second_arrived.lock().recv_timeout(Duration::from_millis(200));
        } else {
            arrived.send(()).unwrap();
        }
        log.lock().push(new);
    });
    let version = |value: &str, version: &str| {
        let mut map = map("mine", value);
        map["metadata"]["uid"] = "u".into();
        map["metadata"]["resourceVersion"] = version.into();
        map
    };
    let first = std::thread::spawn({
        let (cache, object) = (cache.clone(), version("1", "1001"));
        move || cache.on_written(&object)
    });
    first_began.recv().unwrap();
    cache.on_written(&version("2", "1002"));
    first.join().unwrap();
    assert_eq!(*seen.lock(), ["1", "2"]);
}

#[tokio::test(start_paused = true)]
async fn a_write_of_the_operator_is_in_the_cache_at_once_and_reported_once() {
    let server = TestApiServer::new();
    let (cache, changes, link, _stop) = cache(&server, 10);
    cache.ready().await;
    link.cut();
    let written = server.put(MAPS, map("mine", "1"));
    cache.on_written(&written);
    assert_eq!(cache.get(&key("mine")).as_deref().map(String::as_str), Some("1"));
    link.restore();
    server.put(MAPS, map("end", "x"));
    until(|| cache.get(&key("end")).is_some()).await;
    assert_eq!(*changes.lock(), ["mine ->1", "end ->x"]);
    let uid = written["metadata"]["uid"].as_str().unwrap().to_owned();
    link.cut();
    server.remove(MAPS, "ns", "mine");
    cache.on_deleted(&key("mine"), &uid);
    assert_eq!(cache.get(&key("mine")), None);
}

#[tokio::test(start_paused = true)]
async fn a_kind_may_become_served_not_served_and_served_again() {
    let server = TestApiServer::new();
    server.serve_kind(MAPS, false);
    let (cache, changes, link, _stop) = cache(&server, 10);
    cache.ready().await;
    assert_eq!((cache.sync_state(), cache.is_complete()), (SyncState::KindNotServed, true));
    tokio::time::sleep(Duration::from_secs(600)).await;
    let lists = link.count(Verb::List);
    assert!((8..40).contains(&lists), "{lists} lists in ten minutes");

    server.serve_kind(MAPS, true);
    server.put(MAPS, map("a", "1"));
    until(|| cache.sync_state() == SyncState::Synced).await;
    assert!(cache.get(&key("a")).is_some());

    server.serve_kind(MAPS, false);
    // The open watch does not show it. The next one does, after the server has closed this one.
    until(|| cache.sync_state() == SyncState::KindNotServed).await;
    assert!(cache.is_empty());
    assert_eq!(*changes.lock(), ["a ->1", "a 1>-"]);

    server.serve_kind(MAPS, true);
    server.put(MAPS, map("b", "2"));
    let begin = Instant::now();
    cache.retry_now();
    until(|| cache.get(&key("b")).is_some()).await;
    // Not at once, because the server does not serve a new kind immediately.
    assert!((1..2).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_is_known_to_be_absent_is_listed_only_when_that_changes() {
    let server = TestApiServer::new();
    server.serve_kind(MAPS, false);
    let (client, link) = server.client();
    let absent = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let flag = absent.clone();
    let known_absent = KnownAbsent::new(move || flag.load(std::sync::atomic::Ordering::Relaxed));
    let config = WatchConfig { known_absent: Some(known_absent), ..WatchConfig::default() };
    let (cache, watching) = watch(Api::<ConfigMap>::all(client), config, &[], value_of, CancellationToken::new());
    tokio::spawn(watching);
    cache.ready().await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(link.count(Verb::List), 1);
    absent.store(false, std::sync::atomic::Ordering::Relaxed);
    server.serve_kind(MAPS, true);
    cache.retry_now();
    until(|| cache.sync_state() == SyncState::Synced).await;
}

#[tokio::test(start_paused = true)]
async fn errors_are_retried_with_increasing_delays_and_the_cache_is_incomplete_meanwhile() {
    let server = TestApiServer::new();
    server.put(MAPS, map("a", "1"));
    let (cache, _changes, link, _stop) = cache(&server, 10);
    for _ in 0..6 {
        link.faults.lock().push_back(LinkFault::Reject(Verb::List, 503));
    }
    let begin = Instant::now();
    cache.ready().await;
    // 0.5 + 1 + 2 + 4 + 8 + 16 seconds, each at least half.
    assert!(begin.elapsed() >= Duration::from_secs(15), "{:?}", begin.elapsed());
    assert!(cache.is_complete());
    // The watch fails: the cache must not justify a deletion until the watch is known to work again.
    for _ in 0..3 {
        link.faults.lock().push_back(LinkFault::Reject(Verb::Watch, 500));
    }
    until(|| link.faults.lock().is_empty()).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert!(!cache.is_complete());
    assert_eq!(cache.len(), 1);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!cache.is_complete(), "the pause of a failing watch and its opening may take 45 seconds");
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert!(cache.is_complete());
}

#[tokio::test(start_paused = true)]
async fn a_cache_of_metadata_accepts_responses_with_complete_objects() {
    let server = TestApiServer::new();
    server.put(MAPS, map("a", "secret"));
    let (client, link) = server.client();
    let (cache, watching) = watch(
        Api::<PartialObjectMeta<ConfigMap>>::all(client),
        WatchConfig::default(),
        &[],
        |object: PartialObjectMeta<ConfigMap>| object.metadata.labels.unwrap_or_default().len(),
        CancellationToken::new(),
    );
    tokio::spawn(watching);
    cache.ready().await;
    assert_eq!(cache.get(&key("a")).as_deref(), Some(&0));
    let mut labelled = map("a", "secret");
    labelled["metadata"]["labels"] = json!({ "x": "y" });
    let written = server.put(MAPS, labelled);
    cache.on_written(&written);
    assert_eq!(cache.get(&key("a")).as_deref(), Some(&1));
    assert!(link.writes() == 0);
}

/// A connection on which not even a bookmark arrives is closed, and no change is lost.
#[tokio::test(start_paused = true)]
async fn a_dead_watch_is_resumed_without_a_list() {
    let server = TestApiServer::new();
    let (cache, _changes, link, _stop) = cache(&server, 10);
    cache.ready().await;
    until(|| link.count(Verb::Watch) == 1).await;
    link.cut();
    server.put(MAPS, map("a", "1"));
    tokio::time::sleep(Duration::from_secs(95)).await;
    assert!(link.count(Verb::Watch) > 1);
    assert!(cache.is_empty());
    link.restore();
    until(|| !cache.is_empty()).await;
    assert_eq!(link.count(Verb::List), 1);
}

/// The API server accepts any depth in `managedFields`, and `serde_json` fails at a depth of 128.
#[tokio::test(start_paused = true)]
async fn an_object_of_any_depth_does_not_stop_the_others() {
    let deep = |name: &str| {
        let fields = (0..5000).fold(json!({}), |inner, _| json!({ "f:a": inner }));
        let mut object = map(name, "deep");
        object["metadata"]["managedFields"] = json!([{ "manager": "x", "fieldsType": "FieldsV1", "fieldsV1": fields }]);
        object
    };
    let server = TestApiServer::new();
    server.put(MAPS, deep("a"));
    server.put(MAPS, map("b", "1"));
    let (cache, _changes, link, _stop) = cache(&server, 10);
    cache.ready().await;
    assert_eq!((cache.len(), cache.unreadable_count()), (2, 0));
    until(|| link.count(Verb::Watch) == 1).await;
    server.put(MAPS, deep("c"));
    server.put(MAPS, map("b", "2"));
    until(|| cache.get(&key("b")).is_some_and(|value| *value == "2")).await;
    assert_eq!((cache.len(), cache.unreadable_count(), link.count(Verb::List)), (3, 0, 1));
    assert_eq!(cache.get(&key("c")).as_deref(), Some(&"deep".to_owned()));
}

/// As after the restore of etcd from a backup: the version to resume from is in the future.
#[tokio::test(start_paused = true)]
async fn a_watch_that_is_silent_again_after_it_was_resumed_is_replaced_by_a_list() {
    let server = TestApiServer::new();
    let (cache, _changes, link, _stop) = cache(&server, 10);
    link.faults.lock().extend([LinkFault::DeafWatch, LinkFault::DeafWatch]);
    cache.ready().await;
    until(|| link.count(Verb::Watch) == 1).await;
    server.put(MAPS, map("a", "1"));
    tokio::time::sleep(Duration::from_secs(95)).await;
    assert!(cache.is_empty() && link.count(Verb::List) == 1, "it is resumed first");
    tokio::time::sleep(Duration::from_secs(95)).await;
    assert_eq!((cache.len(), link.count(Verb::List), link.count(Verb::Watch)), (1, 2, 3));
}

/// One object of another form does not stop the others.
#[tokio::test(start_paused = true)]
async fn an_unreadable_object_is_skipped_and_counted_until_it_is_corrected_or_deleted() {
    let unreadable = |name: &str| {
        let mut object = map(name, "");
        object["data"] = "canary".into();
        object
    };
    let server = TestApiServer::new();
    for n in 0..25 {
        server.put(MAPS, map(&format!("m{n:02}"), "old"));
    }
    server.put(MAPS, unreadable("m03"));
    server.put(MAPS, unreadable("m04"));
    let (cache, _changes, link, _stop) = cache(&server, 10);
    cache.ready().await;
    assert_eq!((cache.len(), cache.unreadable_count(), cache.is_complete()), (23, 2, false));
    until(|| link.count(Verb::Watch) == 1).await;
    // What was known of an object that becomes unreadable stays.
    server.put(MAPS, unreadable("m05"));
    server.put(MAPS, map("m06", "new"));
    until(|| cache.get(&key("m06")).is_some_and(|value| *value == "new")).await;
    assert_eq!((cache.unreadable_count(), cache.get(&key("m05")).as_deref()), (3, Some(&"old".to_owned())));
    server.put(MAPS, map("m03", "new"));
    server.remove(MAPS, "ns", "m04");
    server.remove(MAPS, "ns", "m05");
    until(|| cache.unreadable_count() == 0).await;
    assert_eq!(cache.get(&key("m03")).as_deref(), Some(&"new".to_owned()));
    assert_eq!((cache.len(), cache.is_complete(), link.count(Verb::List)), (23, true, 3));
}

/// kube's watcher would skip an event that does not name its object.
#[tokio::test(start_paused = true)]
async fn an_unreadable_event_causes_a_list() {
    let server = TestApiServer::new();
    server.put(MAPS, map("a", "old"));
    let (cache, _changes, link, _stop) = cache(&server, 10);
    cache.ready().await;
    until(|| link.count(Verb::Watch) == 1).await;
    let mut nonsense = map("a", "new");
    nonsense["metadata"]["name"] = 7.into();
    server.put_unreadably(MAPS, map("a", "new"), nonsense);
    until(|| cache.get(&key("a")).is_some_and(|value| *value == "new")).await;
    assert_eq!(link.count(Verb::List), 2);
}

/// On an idle kind no event arrives between two outages.
#[tokio::test(start_paused = true)]
async fn a_second_outage_of_an_idle_kind_begins_with_a_short_delay() {
    let server = TestApiServer::new();
    let (cache, _changes, link, _stop) = cache(&server, 10);
    cache.ready().await;
    let fail_watches = async |failures: usize| {
        link.faults.lock().extend((0..failures).map(|_| LinkFault::Reject(Verb::Watch, 503)));
        until(|| link.faults.lock().is_empty()).await;
    };
    fail_watches(8).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    fail_watches(1).await;
    let (failed, watches) = (Instant::now(), link.count(Verb::Watch));
    until(|| link.count(Verb::Watch) > watches).await;
    assert!(failed.elapsed() < Duration::from_secs(1), "{:?}", failed.elapsed());
    assert_eq!(link.count(Verb::List), 1);
}

/// A server that was restored to an older state may refuse the version that a watch resumes from.
#[tokio::test(start_paused = true)]
async fn a_watch_that_the_server_refuses_again_and_again_is_replaced_by_a_list() {
    let server = TestApiServer::new();
    let (cache, _changes, link, _stop) = cache(&server, 10);
    cache.ready().await;
    link.faults.lock().extend((0..20).map(|_| LinkFault::Reject(Verb::Watch, 500)));
    until(|| link.count(Verb::List) == 2).await;
    let watches = link.count(Verb::Watch);
    assert!((5..=7).contains(&watches), "{watches}");
}
