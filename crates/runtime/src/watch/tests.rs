//! Caches against a server with real resource versions: sync, absence, own writes, cut connections.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, core::PartialObjectMeta};
use parking_lot::Mutex;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    client::Verb,
    testing::{Fault, Link, Server},
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

type Told = Arc<Mutex<Vec<String>>>;

fn cache(server: &Arc<Server>, page_size: u32) -> (Cache<String>, Told, Arc<Link>, CancellationToken) {
    let (client, link) = server.client();
    let (told, stop) = (Told::default(), CancellationToken::new());
    let telling = told.clone();
    let selection = WatchConfig { page_size, ..WatchConfig::default() };
    let (cache, following) = watch(
        Api::<ConfigMap>::all(client),
        selection,
        &[("value", |_, value: &String| vec![value.as_str().into()])],
        value_of,
        stop.clone(),
    );
    cache.subscribe(move |change| {
        let side = |value: &Option<Arc<String>>| value.as_ref().map_or("-".to_owned(), ToString::to_string);
        telling.lock().push(format!("{} {}>{}", change.key.name(), side(&change.old), side(&change.new)));
    });
    tokio::spawn(following);
    (cache, told, link, stop)
}

async fn until(what: impl Fn() -> bool) {
    tokio::time::timeout(Duration::from_secs(600), async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("it did not come to that");
}

#[tokio::test(start_paused = true)]
async fn lists_in_pages_and_follows() {
    let server = Server::new();
    for n in 0..25 {
        server.put(MAPS, map(&format!("m{n:02}"), "old"));
    }
    let (cache, told, link, _stop) = cache(&server, 10);
    assert_eq!(cache.sync_state(), SyncState::Pending);
    assert!(!cache.is_complete());
    cache.ready().await;
    assert_eq!((cache.len(), cache.sync_state(), cache.is_complete()), (25, SyncState::Synced, true));
    assert_eq!(link.count(Verb::List), 3);
    told.lock().clear();
    server.put(MAPS, map("m03", "new"));
    until(|| cache.get(&key("m03")).is_some_and(|value| *value == "new")).await;
    server.remove(MAPS, "ns", "m04");
    until(|| cache.get(&key("m04")).is_none()).await;
    // A change of what is not kept is no news.
    let mut same = map("m05", "old");
    same["data"]["large"] = "y".into();
    server.put(MAPS, same);
    server.put(MAPS, map("m06", "last"));
    until(|| cache.get(&key("m06")).is_some_and(|value| *value == "last")).await;
    assert_eq!(*told.lock(), ["m03 old>new", "m04 old>-", "m06 old>last"]);
    assert_eq!(cache.by_index("value", "new").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_own_write_is_seen_at_once_and_told_once() {
    let server = Server::new();
    let (cache, told, link, _stop) = cache(&server, 10);
    cache.ready().await;
    link.cut();
    let written = server.put(MAPS, map("mine", "1"));
    cache.on_written(&written);
    assert_eq!(cache.get(&key("mine")).as_deref().map(String::as_str), Some("1"));
    link.mend();
    server.put(MAPS, map("end", "x"));
    until(|| cache.get(&key("end")).is_some()).await;
    assert_eq!(*told.lock(), ["mine ->1", "end ->x"]);
    let uid = written["metadata"]["uid"].as_str().unwrap().to_owned();
    link.cut();
    server.remove(MAPS, "ns", "mine");
    cache.on_deleted(&key("mine"), &uid);
    assert_eq!(cache.get(&key("mine")), None);
}

#[tokio::test(start_paused = true)]
async fn a_kind_may_come_go_and_come_back() {
    let server = Server::new();
    server.serve_kind(MAPS, false);
    let (cache, told, link, _stop) = cache(&server, 10);
    cache.ready().await;
    assert_eq!((cache.sync_state(), cache.is_complete()), (SyncState::KindNotServed, true));
    tokio::time::sleep(Duration::from_secs(600)).await;
    let asked = link.count(Verb::List);
    assert!((8..40).contains(&asked), "{asked} lists in ten minutes");

    server.serve_kind(MAPS, true);
    server.put(MAPS, map("a", "1"));
    until(|| cache.sync_state() == SyncState::Synced).await;
    assert!(cache.get(&key("a")).is_some());

    server.serve_kind(MAPS, false);
    // The watch is silent about it until it is opened again; the server closes it at its time.
    until(|| cache.sync_state() == SyncState::KindNotServed).await;
    assert!(cache.is_empty());
    assert_eq!(*told.lock(), ["a ->1", "a 1>-"]);

    server.serve_kind(MAPS, true);
    server.put(MAPS, map("b", "2"));
    let asked = Instant::now();
    cache.retry_now();
    until(|| cache.get(&key("b")).is_some()).await;
    // Not at once: what was just stored is not served yet, and to be asked in vain costs the server too.
    assert!((1..2).contains(&asked.elapsed().as_secs()), "{:?}", asked.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_failing_server_is_asked_less_and_less_and_completeness_waits() {
    let server = Server::new();
    server.put(MAPS, map("a", "1"));
    let (cache, _told, link, _stop) = cache(&server, 10);
    for _ in 0..6 {
        link.faults.lock().push_back(Fault::Refuse(Verb::List, 503));
    }
    let begin = Instant::now();
    cache.ready().await;
    // 0.5 + 1 + 2 + 4 + 8 + 16 seconds, each at least half.
    assert!(begin.elapsed() >= Duration::from_secs(15), "{:?}", begin.elapsed());
    assert!(cache.is_complete());
    // The watch breaks: what is in the cache is no ground for a deletion until it is known to work again.
    for _ in 0..3 {
        link.faults.lock().push_back(Fault::Refuse(Verb::Watch, 500));
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
async fn metadata_alone_can_be_followed() {
    let server = Server::new();
    server.put(MAPS, map("a", "secret"));
    let (client, link) = server.client();
    let (cache, following) = watch(
        Api::<PartialObjectMeta<ConfigMap>>::all(client),
        WatchConfig::default(),
        &[],
        |object: PartialObjectMeta<ConfigMap>| object.metadata.labels.unwrap_or_default().len(),
        CancellationToken::new(),
    );
    tokio::spawn(following);
    cache.ready().await;
    assert_eq!(cache.get(&key("a")).as_deref(), Some(&0));
    let mut labelled = map("a", "secret");
    labelled["metadata"]["labels"] = json!({ "x": "y" });
    let written = server.put(MAPS, labelled);
    cache.on_written(&written);
    assert_eq!(cache.get(&key("a")).as_deref(), Some(&1));
    assert!(link.writes() == 0);
}

/// A connection that went silent is given up a little after the server should have closed it, and news is not lost.
#[tokio::test(start_paused = true)]
async fn a_dead_watch_is_opened_again() {
    let server = Server::new();
    let (cache, _told, link, _stop) = cache(&server, 10);
    cache.ready().await;
    until(|| link.count(Verb::Watch) == 1).await;
    link.cut();
    server.put(MAPS, map("a", "1"));
    tokio::time::sleep(Duration::from_secs(310)).await;
    assert!(link.count(Verb::Watch) > 1);
    assert!(cache.is_empty());
    link.mend();
    until(|| !cache.is_empty()).await;
    assert_eq!(link.count(Verb::List), 1);
}

/// What the watcher cannot read it would pass over in silence.
#[tokio::test(start_paused = true)]
async fn an_event_that_cannot_be_read_is_followed_by_a_list() {
    let server = Server::new();
    server.put(MAPS, map("a", "old"));
    let (cache, _told, link, _stop) = cache(&server, 10);
    cache.ready().await;
    until(|| link.count(Verb::Watch) == 1).await;
    let mut nonsense = map("a", "new");
    nonsense["data"] = "canary".into();
    server.put_unreadably(MAPS, map("a", "new"), nonsense);
    until(|| cache.get(&key("a")).is_some_and(|value| *value == "new")).await;
    assert_eq!(link.count(Verb::List), 2);
}
