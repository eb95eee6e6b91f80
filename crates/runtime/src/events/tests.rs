//! Events as the server receives them.

use std::time::Duration;

use vitivirt_api::{EventKind, EventSubject, ObjectKey};

use super::*;
use crate::{
    testing::{LinkFault, TestApiServer},
    verb::Verb,
};

fn event_record(name: &str, message: &str) -> EventRecord {
    event_record_in("shop", name, message)
}

fn event_record_in(namespace: &str, name: &str, message: &str) -> EventRecord {
    EventRecord {
        about: EventSubject {
            api_version: "vitistack.io/v1alpha1".to_owned(),
            kind: "Machine".to_owned(),
            key: ObjectKey::namespaced(namespace, name),
            uid: format!("uid-{name}"),
        },
        kind: EventKind::Warning,
        reason: "StorageClassNotFound",
        action: "Provision",
        message: message.to_owned(),
    }
}

fn reporter() -> Reporter {
    Reporter { controller: "kubevirt-operator".to_owned(), instance: "kubevirt-operator-0".to_owned() }
}

#[tokio::test(start_paused = true)]
async fn a_repeated_record_is_one_event_with_a_count() {
    let server = TestApiServer::new();
    let (client, link) = server.client();
    let (recorder, sending) = recorder(client, reporter(), Arc::new(Metrics::new("test")));
    tokio::spawn(sending);
    for _ in 0..60 {
        recorder.record(event_record("db", "no such class"));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(link.count(Verb::Create), 1);
    assert!((2..=3).contains(&link.count(Verb::Patch)), "{}", link.count(Verb::Patch));
    let uri = link.requests.lock().iter().find(|(verb, _)| *verb == Verb::Patch).map(|(_, uri)| uri.clone()).unwrap();
    let name = uri.split(['/', '?']).find(|part| part.starts_with("db.")).unwrap();
    let event = server.get("/apis/events.k8s.io/v1/events", "shop", name).unwrap();
    assert_eq!(event["series"]["count"], 60);
    assert_eq!(event["regarding"]["kind"], "Machine");
    assert_eq!(event["reason"], "StorageClassNotFound");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["reportingController"], "kubevirt-operator");
}

#[tokio::test(start_paused = true)]
async fn recording_never_waits_and_the_rate_of_events_is_limited() {
    let server = TestApiServer::new();
    let (client, link) = server.client();
    link.cut();
    let metrics = Arc::new(Metrics::new("test"));
    let (recorder, sending) = recorder(client, reporter(), metrics.clone());
    tokio::spawn(sending);
    let begin = Instant::now();
    for n in 0..10_000 {
        recorder.record(event_record(&format!("m{n}"), "x"));
    }
    assert_eq!(begin.elapsed(), Duration::ZERO);
    let dropped = metrics.encode().unwrap();
    assert!(dropped.contains(&format!("test_events_dropped_total {}", 10_000 - CAPACITY)), "{dropped}");
    link.restore();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(link.count(Verb::Create) <= 100 + 2 * 20 + 1, "{}", link.count(Verb::Create));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(link.count(Verb::Create), CAPACITY);
}

/// One namespace has its share of the memory and of the rate, not all of it.
#[tokio::test(start_paused = true)]
async fn a_flood_of_events_in_one_namespace_does_not_drop_or_delay_those_of_another() {
    let server = TestApiServer::new();
    let (client, link) = server.client();
    link.cut();
    let (recorder, sending) = recorder(client, reporter(), Arc::new(Metrics::new("test")));
    tokio::spawn(sending);
    for n in 0..1000 {
        recorder.record(event_record_in("flood", &format!("m{n}"), "x"));
    }
    for n in 0..50 {
        recorder.record(event_record_in("shop", &format!("m{n}"), "x"));
    }
    link.restore();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let requests = link.requests.lock();
    assert_eq!(requests.iter().filter(|(_, uri)| uri.contains("/namespaces/shop/")).count(), 50);
}

#[tokio::test(start_paused = true)]
async fn the_next_repetition_creates_an_event_that_does_not_exist() {
    let server = TestApiServer::new();
    let (client, link) = server.client();
    link.faults.lock().push_back(LinkFault::Reject(Verb::Create, 503));
    let (recorder, sending) = recorder(client, reporter(), Arc::new(Metrics::new("test")));
    tokio::spawn(sending);
    let events = || {
        let name = |uri: &str| uri.split(['/', '?']).find(|part| part.starts_with("db.")).map(ToOwned::to_owned);
        link.requests.lock().iter().filter(|(verb, _)| *verb == Verb::Patch).filter_map(|(_, uri)| name(uri)).next()
    };
    recorder.record(event_record("db", "no such class"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    recorder.record(event_record("db", "no such class"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(link.count(Verb::Create), 2);
    recorder.record(event_record("db", "no such class"));
    tokio::time::sleep(Duration::from_secs(60)).await;
    // The server deletes events after an hour.
    server.remove("/apis/events.k8s.io/v1/events", "shop", &events().unwrap());
    recorder.record(event_record("db", "no such class"));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((link.count(Verb::Create), link.count(Verb::Patch)), (2, 2));
    recorder.record(event_record("db", "no such class"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(link.count(Verb::Create), 3);
}

#[test]
fn only_the_first_missing_permission_is_a_warning() {
    let mut failures = FailureLog::default();
    let answer = |code| kube::Error::Api(kube::core::Status { code, ..kube::core::Status::default() }.boxed());
    assert!(!failures.is_first_refusal(&answer(503)));
    assert!(failures.is_first_refusal(&answer(403)));
    assert!(!failures.is_first_refusal(&answer(403)));
    assert!(!failures.is_first_refusal(&answer(409)));
}

#[test]
fn a_message_is_truncated_to_the_limit_of_the_server() {
    let record = truncate_message(event_record("db", &"ø".repeat(2000)));
    assert!(record.message.len() <= MAX_NOTE_BYTES && record.message.ends_with('…'));
}
