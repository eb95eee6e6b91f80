//! Reconciles against a server: what they write, in which order, what stops them, and that the failure of one object
//! does not affect others.

mod load;
mod retries;
mod writes;

use std::{
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use vitivirt_api::{Body, EventKind, EventRecord, EventSubject, Operation, StatusWrite, Step, Wait, Write};

use super::*;
use crate::{
    events::{Reporter, recorder},
    health::Health,
    lease::Leadership,
    metrics::Metrics,
    queue::Queue,
    testing::{Link, LinkFault, TestApiServer},
    verb::Verb,
    watch::{Cache, WatchConfig, watch},
};

const MAPS: &str = "/api/v1/configmaps";

fn target(name: &str) -> Target {
    Target::of_kind::<ConfigMap>(ObjectKey::namespaced("ns", name))
}

fn create(name: &str) -> Write {
    Write::Create { target: target(name), body: json!({ "data": { "value": "new" } }).into() }
}

fn apply(name: &str, uid: &str, value: &str) -> Write {
    Write::Apply { target: target(name), uid: uid.to_owned(), body: json!({ "data": { "value": value } }).into() }
}

fn delete(name: &str, uid: &str) -> Write {
    Write::Delete { target: target(name), uid: uid.to_owned(), resource_version: None }
}

fn plan(steps: impl IntoIterator<Item = Step>) -> Plan {
    Plan { steps: steps.into_iter().collect() }
}

fn executor(server: &Arc<TestApiServer>) -> (Executor, Arc<Link>) {
    let (client, link) = server.client();
    (Executor::new(client, "tester"), link)
}

fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn steps_are_applied_in_order_until_one_must_wait() {
    let server = TestApiServer::new();
    let (executor, link) = executor(&server);
    let wait = Wait { reason: "Booting", message: "it boots".to_owned(), requeue_after: None };
    let plan = plan([
        Step::new("disks").write(create("a")).write(create("b")),
        Step::new("machine").write(create("c")).wait(wait.clone()),
        Step::new("network").write(create("d")),
    ]);
    let outcome = executor.apply(&plan, &WriteFence::open(), |_, _| false).await.outcome;
    assert_eq!(outcome, Outcome { stop: Stop::Waiting { step: "machine", wait }, written: 3 });
    assert_eq!(link.requests.lock().len(), 3);
    assert!(server.get(MAPS, "ns", "d").is_none());
    let created = server.get(MAPS, "ns", "a").unwrap();
    assert_eq!((created["kind"].as_str(), created["apiVersion"].as_str()), (Some("ConfigMap"), Some("v1")));
}

#[tokio::test(start_paused = true)]
async fn an_existing_foreign_object_is_a_name_conflict_and_stays_unchanged() {
    let server = TestApiServer::new();
    let foreign =
        server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "whose": "theirs" } }));
    let (executor, link) = executor(&server);
    let plan = plan([Step::new("first").write(create("a")).write(create("b")), Step::new("second").write(create("c"))]);
    let outcome = executor.apply(&plan, &WriteFence::open(), |_, live| live["data"]["whose"] == "ours").await.outcome;
    // The other writes of the step are sent. The next step does not begin.
    assert_eq!(outcome.written, 1);
    let Stop::NameConflict { target: conflict, live, .. } = outcome.stop else { panic!("{:?}", outcome.stop) };
    assert_eq!((conflict, live.json()), (target("a"), &foreign));
    assert_eq!(server.get(MAPS, "ns", "a"), Some(foreign));
    assert!(server.get(MAPS, "ns", "c").is_none());
    assert_eq!((link.count(Verb::Create), link.count(Verb::Get)), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn the_cache_learns_of_a_create_whose_response_was_lost() {
    let server = TestApiServer::new();
    server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "whose": "ours" } }));
    let (cache, watching) = cache(&server);
    tokio::spawn(watching);
    let (client, _link) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache.clone()));
    let plan = plan([Step::new("first").write(create("a"))]);
    let outcome = executor.apply(&plan, &WriteFence::open(), |_, live| live["data"]["whose"] == "ours").await.outcome;
    // The cache has it at once, before its first list. The next reconcile continues from there.
    assert!(cache.get(&target("a").key).is_some());
    assert!(matches!(outcome.stop, Stop::Failed { failure, .. } if failure.class == ErrorClass::Conflict));
}

fn cache(server: &Arc<TestApiServer>) -> (Cache<Value>, impl Future<Output = ()> + Send + use<>) {
    let (client, _link) = server.client();
    let value = |map: ConfigMap| json!(map.data);
    watch(Api::<ConfigMap>::all(client), WatchConfig::default(), &[], value, CancellationToken::new())
}

#[tokio::test(start_paused = true)]
async fn an_object_that_was_created_again_is_neither_changed_nor_deleted() {
    let server = TestApiServer::new();
    let old = server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" } }));
    server.remove(MAPS, "ns", "a");
    let foreign = server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "value": "x" } }));
    assert_ne!(uid(&old), uid(&foreign));
    let (executor, _link) = executor(&server);
    for write in [apply("a", &uid(&old), "mine"), delete("a", &uid(&old))] {
        let outcome =
            executor.apply(&plan([Step::new("s").write(write)]), &WriteFence::open(), |_, _| false).await.outcome;
        assert!(matches!(outcome.stop, Stop::Failed { failure, .. } if failure.class == ErrorClass::Conflict));
    }
    assert_eq!(server.get(MAPS, "ns", "a"), Some(foreign));
}

#[tokio::test(start_paused = true)]
async fn an_object_that_changed_since_the_decision_is_not_deleted() {
    let server = TestApiServer::new();
    let read = server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" } }));
    let (executor, _link) = executor(&server);
    let version = read["metadata"]["resourceVersion"].as_str().map(str::to_owned);
    let write = Write::Delete { target: target("a"), uid: uid(&read), resource_version: version };
    let step = plan([Step::new("s").write(write)]);
    let changed = apply("a", &uid(&read), "bound");
    executor.apply(&plan([Step::new("s").write(changed)]), &WriteFence::open(), |_, _| false).await;
    let outcome = executor.apply(&step, &WriteFence::open(), |_, _| false).await.outcome;
    assert!(matches!(outcome.stop, Stop::Failed { failure, .. } if failure.class == ErrorClass::Conflict));
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["data"]["value"], "bound");
}

#[tokio::test(start_paused = true)]
async fn the_cache_contains_writes_of_the_operator_at_once() {
    let server = TestApiServer::new();
    let (cache, watching) = cache(&server);
    tokio::spawn(watching);
    cache.ready().await;
    let (client, link) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache.clone()));
    let key = target("a").key;
    let run = async |write: Write| {
        let outcome =
            executor.apply(&plan([Step::new("s").write(write)]), &WriteFence::open(), |_, _| false).await.outcome;
        assert_eq!(outcome.stop, Stop::Done);
    };
    run(create("a")).await;
    let entry = cache.entry(&key).unwrap();
    assert_eq!(entry.value["value"], "new");
    run(apply("a", &entry.uid.to_string(), "changed")).await;
    assert_eq!(cache.get(&key).unwrap()["value"], "changed");
    run(delete("a", &entry.uid.to_string())).await;
    assert_eq!(cache.get(&key), None);
    // Deleting an object that does not exist succeeds.
    run(delete("a", &entry.uid.to_string())).await;
    assert_eq!(link.writes(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_is_not_the_leader_writes_nothing() {
    let server = TestApiServer::new();
    let (executor, link) = executor(&server);
    let fence = WriteFence::open();
    fence.close_for_test();
    let outcome = executor.apply(&plan([Step::new("s").write(create("a"))]), &fence, |_, _| false).await.outcome;
    assert!(matches!(outcome.stop, Stop::Failed { failure, .. } if failure.reason == reason::NOT_LEADING));
    assert!(link.requests.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_status_is_written_once_and_only_when_it_differs() {
    let server = TestApiServer::new();
    let live = server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" } }));
    let (executor, link) = executor(&server);
    let mut status = StatusWrite {
        target: target("a"),
        uid: uid(&live),
        observed: json!({ "phase": "Pending" }),
        desired: json!({ "phase": "Pending" }),
    };
    assert_eq!(executor.report(&status, &WriteFence::open()).await, Ok(false));
    assert_eq!(link.requests.lock().len(), 0);
    status.desired = json!({ "phase": "Running" });
    assert_eq!(executor.report(&status, &WriteFence::open()).await, Ok(true));
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["status"]["phase"], "Running");
    // No cache knows its version, so the executor reads it.
    assert_eq!((link.count(Verb::Get), link.writes()), (1, 1));
    assert!(link.requests.lock()[1].1.contains("/a/status?"));
    status.uid = "of another".to_owned();
    assert_eq!(executor.report(&status, &WriteFence::open()).await.unwrap_err().class, ErrorClass::Conflict);
}

/// Creates one ConfigMap per key, and misbehaves for some keys.
struct TestController {
    reconciles: Mutex<Vec<(Instant, String)>>,
    running: AtomicUsize,
    most: AtomicUsize,
    /// Creates it in every reconcile, not only in the first one.
    stubborn: Mutex<bool>,
    /// The content of the ConfigMap.
    content: Mutex<&'static str>,
}

impl Controller for TestController {
    type Observed = ObjectKey;
    type Status = Value;
    const NAME: &'static str = "TestController";

    async fn observe(&self, key: &ObjectKey) -> Result<Option<ObjectKey>, Failure> {
        self.reconciles.lock().push((Instant::now(), key.name().to_owned()));
        self.most.fetch_max(self.running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(10)).await;
        self.running.fetch_sub(1, Ordering::SeqCst);
        match key.name() {
            name if name.starts_with("hangs") => std::future::pending().await,
            "invalid" => Err(Failure::invalid("Wrong", "invalid by design")),
            "slow" => {
                tokio::time::sleep(Duration::from_secs(5)).await;
                Ok(Some(key.clone()))
            }
            "gone" => Ok(None),
            _ => Ok(Some(key.clone())),
        }
    }

    fn plan(&self, observed: &ObjectKey) -> Result<Plan, Failure> {
        assert_ne!(observed.name(), "panics", "requested by the test");
        if !*self.stubborn.lock()
            && self.reconciles.lock().iter().filter(|(_, name)| name == observed.name()).count() > 1
        {
            return Ok(Plan::default());
        }
        let body = Body::from(json!({ "data": { "content": *self.content.lock() } }));
        Ok(plan([
            Step::new("create").write(Write::Create { target: Target::of_kind::<ConfigMap>(observed.clone()), body })
        ]))
    }

    fn owns(&self, _: &ObjectKey, _: &Target, _: &Value) -> bool {
        false
    }

    fn report(&self, observed: &ObjectKey, _: &Plan, outcome: &Outcome) -> Report {
        let about = EventSubject {
            api_version: "v1".to_owned(),
            kind: "ConfigMap".to_owned(),
            key: observed.clone(),
            uid: "u".to_owned(),
        };
        let has_event = outcome.written > 0 || observed.name() == "talkative";
        let events = has_event.then(|| EventRecord {
            about,
            kind: EventKind::Normal,
            reason: "Created",
            action: "Create",
            message: "created".to_owned(),
        });
        Report {
            status: None,
            events: events.into_iter().collect(),
            requeue_after: Some(Duration::from_secs(1)).filter(|_| observed.name() == "eager"),
            error: observed.name().starts_with("reported").then_some("Reported"),
        }
    }
}

struct RunnerTest {
    server: Arc<TestApiServer>,
    link: Arc<Link>,
    events: Arc<Link>,
    controller: Arc<TestController>,
    queue: Queue<ObjectKey>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    running: tokio::task::JoinHandle<()>,
    runner: Arc<Runner<TestController>>,
    leadership: Leadership,
}

async fn lead(runner: Arc<Runner<TestController>>, leadership: Leadership) {
    runner.run(leadership).await;
}

fn runner_test(options: RunnerOptions) -> RunnerTest {
    runner_test_on(TestApiServer::new(), options)
}

fn runner_test_on(server: Arc<TestApiServer>, options: RunnerOptions) -> RunnerTest {
    let (client, link) = server.client();
    let metrics = Arc::new(Metrics::new("test"));
    let reporter = Reporter { controller: "test".to_owned(), instance: "test-1".to_owned() };
    let (event_client, events_link) = server.client();
    let (events, sending) = recorder(event_client, reporter, metrics.clone());
    tokio::spawn(sending);
    let controller = Arc::new(TestController {
        reconciles: Mutex::default(),
        running: 0.into(),
        most: 0.into(),
        stubborn: Mutex::default(),
        content: Mutex::default(),
    });
    let queue = Queue::default();
    let executor = Executor::new(client, "tester");
    let runner = Runner {
        controller: controller.clone(),
        queue: queue.clone(),
        executor: Arc::new(match options.resync {
            Some(resync) => executor.retry_invalid_within(resync),
            None => executor,
        }),
        events,
        metrics: metrics.clone(),
        health: Arc::new(Health::default()),
        options,
    };
    let (runner, stop) = (Arc::new(runner), CancellationToken::new());
    let leadership = Leadership::without_lease(stop.clone());
    let running = tokio::spawn(lead(runner.clone(), leadership.clone()));
    RunnerTest { server, link, events: events_link, controller, queue, metrics, stop, running, runner, leadership }
}

impl RunnerTest {
    fn add(&self, name: &str) {
        self.queue.add(ObjectKey::namespaced("ns", name));
    }

    fn reconciles(&self, name: &str) -> Vec<Instant> {
        self.controller.reconciles.lock().iter().filter(|(_, of)| of == name).map(|(at, _)| *at).collect()
    }
}

/// The reconciles of an invalid object within 601 s. The delays are 30, 60, 120, 240 and then 300 s, each shortened by
/// at most half: at least 0, 30, 90, 210, 450 s, and at most 0, 15, 45, 105, 225, 375, 525 s.
const SLOW_RETRIES: RangeInclusive<usize> = 5..=7;

#[tokio::test(start_paused = true)]
async fn a_failing_object_does_not_affect_others() {
    let test = runner_test(RunnerOptions {
        workers: 3,
        reconcile_deadline: Duration::from_secs(30),
        ..RunnerOptions::default()
    });
    for name in ["panics", "hangs", "invalid", "gone", "good-1", "good-2"] {
        test.add(name);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(test.server.get(MAPS, "ns", "good-1").is_some() && test.server.get(MAPS, "ns", "good-2").is_some());
    tokio::time::sleep(Duration::from_secs(600)).await;
    // A panic and a hang are retried with increasing delays, and an invalid object slowly.
    assert!((5..30).contains(&test.reconciles("panics").len()), "{}", test.reconciles("panics").len());
    assert!(test.reconciles("hangs").len() > 3);
    assert!(SLOW_RETRIES.contains(&test.reconciles("invalid").len()), "{}", test.reconciles("invalid").len());
    assert_eq!([test.reconciles("gone").len(), test.reconciles("good-1").len()], [1, 1]);
    let text = test.metrics.encode().unwrap();
    for line in [
        "test_reconciliation_errors_total{controller=\"TestController\",error_type=\"Wrong\"}",
        "test_reconciliation_errors_by_class_total{controller=\"TestController\",class=\"Invalid\"}",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert!(text.contains("error_type=\"Panic\"") && text.contains("error_type=\"ReconcileDeadlineExceeded\""));
    // Two events for the two created objects, and none for the failing ones.
    assert_eq!(test.events.count(Verb::Create), 2);
}

#[tokio::test(start_paused = true)]
async fn reconciles_of_one_namespace_that_hang_do_not_stop_another() {
    let test = runner_test(RunnerOptions {
        workers: 2,
        slow_after: Some(Duration::from_millis(500)),
        ..RunnerOptions::default()
    });
    for number in 0..50 {
        test.queue.add(ObjectKey::namespaced("attacker", &format!("hangs-{number}")));
    }
    for number in 0..10 {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let name = format!("good-{number}");
        test.add(&name);
        let begin = Instant::now();
        while test.server.get(MAPS, "ns", &name).is_none() {
            assert!(begin.elapsed() < Duration::from_secs(2), "{name}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let hanging = test.controller.reconciles.lock().iter().filter(|(_, name)| name.starts_with("hangs")).count();
    assert!(hanging <= 4, "{hanging} reconciles of one namespace at the same time");
}

/// The metric has the reason of the condition, whether a request failed or no request was sent.
#[tokio::test(start_paused = true)]
async fn an_error_of_the_report_is_counted_once_by_its_reason() {
    let test = runner_test(RunnerOptions::default());
    let count = |line: &str| {
        let text = test.metrics.encode().unwrap();
        let name = format!("test_reconciliation_errors{line} ");
        text.lines().find_map(|have| have.strip_prefix(&name)?.parse::<u64>().ok()).unwrap_or_default()
    };
    let counts = || {
        let by_type = ["Reported", "AdmissionRefused"];
        let by_type =
            by_type.map(|name| count(&format!("_total{{controller=\"TestController\",error_type=\"{name}\"}}")));
        (by_type, count("_by_class_total{controller=\"TestController\",class=\"Invalid\"}"))
    };
    test.add("reported");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(counts(), ([1, 0], 0), "nothing failed");
    test.link.faults.lock().push_back(LinkFault::Reject(Verb::Create, 403));
    test.add("reported-rejection");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(counts(), ([2, 0], 1), "the class is that of the failure");
    test.link.faults.lock().push_back(LinkFault::Reject(Verb::Create, 403));
    test.add("not-in-the-report");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(counts(), ([2, 1], 2), "a failure without a condition is counted by its own reason");
}

/// As after the loss of the lease: the work is dropped, and some time later this replica leads again.
#[tokio::test(start_paused = true)]
async fn the_next_leadership_repeats_a_reconcile_that_was_dropped() {
    let test = runner_test(RunnerOptions::default());
    test.add("slow");
    tokio::time::sleep(Duration::from_secs(1)).await;
    test.running.abort();
    test.leadership.ended().await;
    assert_eq!((test.reconciles("slow").len(), test.link.writes()), (1, 0));
    test.server.put(MAPS, json!({ "metadata": { "name": "unrelated", "namespace": "ns" } }));
    tokio::spawn(lead(test.runner.clone(), Leadership::without_lease(CancellationToken::new())));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(test.reconciles("slow").len(), 2);
    // A key that is enqueued again is reconciled once more.
    test.add("slow");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(test.reconciles("slow").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_name_conflict_is_retried_slowly_and_more_often_with_a_short_resync() {
    for (resync, reconciles) in [(None, SLOW_RETRIES), (Some(Duration::from_secs(10)), 55..=80)] {
        let server = TestApiServer::new();
        server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" } }));
        let test = runner_test_on(server, RunnerOptions { resync, ..RunnerOptions::default() });
        *test.controller.stubborn.lock() = true;
        test.add("a");
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(reconciles.contains(&test.reconciles("a").len()), "{}", test.reconciles("a").len());
        assert!(test.metrics.encode().unwrap().contains("error_type=\"NameTaken\""));
        // After the conflicting object is deleted, the retry succeeds without a change of the reconciled object.
        test.server.remove(MAPS, "ns", "a");
        tokio::time::sleep(Duration::from_secs(310)).await;
        assert!(test.server.get(MAPS, "ns", "a").is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn the_requeue_delay_of_a_report_does_not_shorten_the_retry_delay_of_a_failure() {
    let test = runner_test(RunnerOptions::default());
    *test.controller.stubborn.lock() = true;
    for _ in 0..8 {
        test.link.faults.lock().push_back(LinkFault::Reject(Verb::Create, 403));
    }
    test.add("eager");
    tokio::time::sleep(Duration::from_secs(100)).await;
    // A 403 without an authorization message counts as rejected by admission: 30 seconds, a minute, and so on.
    assert!((2..=4).contains(&test.reconciles("eager").len()), "{}", test.reconciles("eager").len());
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_is_not_the_leader_sends_no_events_and_no_status() {
    let test = runner_test(RunnerOptions::default());
    test.leadership.fence.close_for_test();
    test.add("talkative");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!test.reconciles("talkative").is_empty());
    assert_eq!((test.link.writes(), test.events.writes()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn workers_are_limited_and_running_reconciles_end_before_the_runner() {
    let test = runner_test(RunnerOptions { workers: 3, ..RunnerOptions::default() });
    for n in 0..50 {
        test.add(&format!("m{n}"));
    }
    tokio::time::sleep(Duration::from_millis(15)).await;
    test.stop.cancel();
    test.running.await.unwrap();
    assert_eq!(test.controller.most.load(Ordering::SeqCst), 3);
    assert_eq!(test.controller.running.load(Ordering::SeqCst), 0);
    let started = test.controller.reconciles.lock().len();
    assert!((3..=6).contains(&started), "{started}");
    // Every started reconcile has ended.
    assert_eq!(test.link.count(Verb::Create), started);
}

#[tokio::test(start_paused = true)]
async fn a_failed_write_is_retried_until_it_succeeds() {
    let test = runner_test(RunnerOptions { resync: Some(Duration::from_secs(30)), ..RunnerOptions::default() });
    test.link.faults.lock().push_back(LinkFault::Reject(Verb::Create, 500));
    test.add("a");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let reconciles = test.reconciles("a");
    assert_eq!(reconciles.len(), 2);
    assert!(reconciles[1] - reconciles[0] >= Duration::from_millis(125));
    // After that only the resync reconciles it, without a request.
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!((11..=15).contains(&test.reconciles("a").len()), "{}", test.reconciles("a").len());
    assert_eq!(test.link.requests.lock().len(), 1);
}

#[test]
fn a_failed_status_write_replaces_only_causes_that_are_retried_slowly() {
    let failure = |class| Failure::new(class, "Cause", "m");
    let status_error = Failure::transient("Status", "m");
    for (class, expected) in [
        (ErrorClass::Transient, "Cause"),
        (ErrorClass::Conflict, "Cause"),
        (ErrorClass::Bug, "Cause"),
        (ErrorClass::Invalid, "Status"),
        (ErrorClass::Forbidden, "Status"),
    ] {
        let cause = (failure(class), Retry::Write { after: Duration::from_secs(9), sent: true });
        let resolved = resolve_failure(Some(cause.clone()), Some(status_error.clone()));
        let retry = if expected == "Cause" { cause.1 } else { Retry::Backoff };
        assert_eq!(resolved.map(|(failure, retry)| (failure.reason, retry)), Some((expected, retry)), "{class:?}");
        assert_eq!(resolve_failure(Some(cause.clone()), None), Some(cause));
    }
    assert_eq!(resolve_failure(None, Some(status_error.clone())), Some((status_error, Retry::Backoff)));
    assert_eq!(resolve_failure(None, None), None);
}
