//! Passes against a server: what is written, in which order, what stops them, and that one object's trouble stays its own.

mod writes;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use parking_lot::Mutex;
use rand::{SeedableRng, rngs::SmallRng};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use vitivirt_api::{
    Body, EventKind, EventRecord, EventSubject, Operation, Propagation, StatusWrite, Step, Wait, Write,
};

use super::*;
use crate::{
    client::Verb,
    events::{Reporter, recorder},
    health::Health,
    lease::Leadership,
    metrics::Metrics,
    queue::Queue,
    testing::{Fault, Link, Server},
    watch::{Cache, WatchConfig, watch},
};

const MAPS: &str = "/api/v1/configmaps";

fn target(name: &str) -> Target {
    Target::of::<ConfigMap>(ObjectKey::namespaced("ns", name))
}

fn create(name: &str) -> Write {
    Write::Create { target: target(name), body: json!({ "data": { "value": "new" } }).into() }
}

fn apply(name: &str, uid: &str, value: &str) -> Write {
    Write::Apply { target: target(name), uid: uid.to_owned(), body: json!({ "data": { "value": value } }).into() }
}

fn delete(name: &str, uid: &str) -> Write {
    Write::Delete { target: target(name), uid: uid.to_owned(), propagation: Propagation::Background }
}

fn plan(steps: impl IntoIterator<Item = Step>) -> Plan {
    Plan { steps: steps.into_iter().collect() }
}

fn executor(server: &Arc<Server>) -> (Executor, Arc<Link>) {
    let (client, link) = server.client();
    (Executor::new(client, "tester"), link)
}

fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn steps_are_done_in_order_until_one_must_wait() {
    let server = Server::new();
    let (executor, link) = executor(&server);
    let wait = Wait { reason: "Booting", message: "it boots".to_owned(), requeue_after: None };
    let plan = plan([
        Step::new("disks").write(create("a")).write(create("b")),
        Step::new("machine").write(create("c")).wait(wait.clone()),
        Step::new("network").write(create("d")),
    ]);
    let outcome = executor.apply(&plan, &Fence::open(), |_, _| false).await;
    assert_eq!(outcome, Outcome { stop: Stop::Waiting { step: "machine", wait }, written: 3 });
    assert_eq!(link.requests.lock().len(), 3);
    assert!(server.get(MAPS, "ns", "d").is_none());
    let made = server.get(MAPS, "ns", "a").unwrap();
    assert_eq!((made["kind"].as_str(), made["apiVersion"].as_str()), (Some("ConfigMap"), Some("v1")));
}

#[tokio::test(start_paused = true)]
async fn a_taken_name_is_handed_back_and_nothing_is_done_to_it() {
    let server = Server::new();
    let foreign =
        server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "whose": "theirs" } }));
    let (executor, link) = executor(&server);
    let plan = plan([Step::new("first").write(create("a")).write(create("b")), Step::new("second").write(create("c"))]);
    let outcome = executor.apply(&plan, &Fence::open(), |_, live| live["data"]["whose"] == "ours").await;
    // The other writes of the step are done; the next step is not begun.
    assert_eq!(outcome.written, 1);
    let Stop::NameConflict { target: taken, live, .. } = outcome.stop else { panic!("{:?}", outcome.stop) };
    assert_eq!((taken, live.json()), (target("a"), &foreign));
    assert_eq!(server.get(MAPS, "ns", "a"), Some(foreign));
    assert!(server.get(MAPS, "ns", "c").is_none());
    assert_eq!((link.count(Verb::Create), link.count(Verb::Get)), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn our_own_create_whose_answer_was_lost_is_found_again() {
    let server = Server::new();
    server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "whose": "ours" } }));
    let (cache, following) = cache(&server);
    tokio::spawn(following);
    let (client, _link) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache.clone()));
    let plan = plan([Step::new("first").write(create("a"))]);
    let outcome = executor.apply(&plan, &Fence::open(), |_, live| live["data"]["whose"] == "ours").await;
    // Known at once, although the cache has not been listed yet; the next pass goes on from there.
    assert!(cache.get(&target("a").key).is_some());
    assert!(matches!(outcome.stop, Stop::Failed { failure, .. } if failure.class == ErrorClass::Conflict));
}

fn cache(server: &Arc<Server>) -> (Cache<Value>, impl Future<Output = ()> + Send + use<>) {
    let (client, _link) = server.client();
    let value = |map: ConfigMap| json!(map.data);
    watch(Api::<ConfigMap>::all(client), WatchConfig::default(), &[], value, CancellationToken::new())
}

#[tokio::test(start_paused = true)]
async fn a_recreated_object_is_neither_changed_nor_deleted() {
    let server = Server::new();
    let old = server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" } }));
    server.remove(MAPS, "ns", "a");
    let foreign = server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" }, "data": { "value": "x" } }));
    assert_ne!(uid(&old), uid(&foreign));
    let (executor, _link) = executor(&server);
    for write in [apply("a", &uid(&old), "mine"), delete("a", &uid(&old))] {
        let outcome = executor.apply(&plan([Step::new("s").write(write)]), &Fence::open(), |_, _| false).await;
        assert!(matches!(outcome.stop, Stop::Failed { failure, .. } if failure.class == ErrorClass::Conflict));
    }
    assert_eq!(server.get(MAPS, "ns", "a"), Some(foreign));
}

#[tokio::test(start_paused = true)]
async fn writes_are_laid_over_the_cache() {
    let server = Server::new();
    let (cache, following) = cache(&server);
    tokio::spawn(following);
    cache.ready().await;
    let (client, link) = server.client();
    let executor = Executor::new(client, "tester").observe_writes(&target("a").resource, Arc::new(cache.clone()));
    let key = target("a").key;
    let run = async |write: Write| {
        let outcome = executor.apply(&plan([Step::new("s").write(write)]), &Fence::open(), |_, _| false).await;
        assert_eq!(outcome.stop, Stop::Done);
    };
    run(create("a")).await;
    let entry = cache.entry(&key).unwrap();
    assert_eq!(entry.value["value"], "new");
    run(apply("a", &entry.uid.to_string(), "changed")).await;
    assert_eq!(cache.get(&key).unwrap()["value"], "changed");
    run(delete("a", &entry.uid.to_string())).await;
    assert_eq!(cache.get(&key), None);
    // Deleting what is gone is done already.
    run(delete("a", &entry.uid.to_string())).await;
    assert_eq!(link.writes(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_does_not_lead_writes_nothing() {
    let server = Server::new();
    let (executor, link) = executor(&server);
    let fence = Fence::open();
    fence.close_for_test();
    let outcome = executor.apply(&plan([Step::new("s").write(create("a"))]), &fence, |_, _| false).await;
    assert!(matches!(outcome.stop, Stop::Failed { failure, .. } if failure.reason == reason::NOT_LEADING));
    assert!(link.requests.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_status_is_written_once_and_only_when_it_differs() {
    let server = Server::new();
    let live = server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" } }));
    let (executor, link) = executor(&server);
    let mut status = StatusWrite {
        target: target("a"),
        uid: uid(&live),
        observed: json!({ "phase": "Pending" }),
        desired: json!({ "phase": "Pending" }),
    };
    assert_eq!(executor.report(&status, &Fence::open()).await, Ok(false));
    assert_eq!(link.requests.lock().len(), 0);
    status.desired = json!({ "phase": "Running" });
    assert_eq!(executor.report(&status, &Fence::open()).await, Ok(true));
    assert_eq!(server.get(MAPS, "ns", "a").unwrap()["status"]["phase"], "Running");
    // No cache knows its version, therefore it is read.
    assert_eq!((link.count(Verb::Get), link.writes()), (1, 1));
    assert!(link.requests.lock()[1].1.contains("/a/status?"));
    status.uid = "of another".to_owned();
    assert_eq!(executor.report(&status, &Fence::open()).await.unwrap_err().class, ErrorClass::Conflict);
}

/// Makes one config map per key, and misbehaves for some keys.
struct Maker {
    reconciles: Mutex<Vec<(Instant, String)>>,
    under_way: AtomicUsize,
    most: AtomicUsize,
    /// Makes it in every pass, not only in the first.
    stubborn: Mutex<bool>,
}

impl Controller for Maker {
    type Observed = ObjectKey;
    type Status = Value;
    const NAME: &'static str = "Maker";

    async fn observe(&self, key: &ObjectKey) -> Result<Option<ObjectKey>, Failure> {
        self.reconciles.lock().push((Instant::now(), key.name().to_owned()));
        self.most.fetch_max(self.under_way.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(10)).await;
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        match key.name() {
            "hangs" => std::future::pending().await,
            "invalid" => Err(Failure::invalid("Wrong", "it cannot be")),
            "slow" => {
                tokio::time::sleep(Duration::from_secs(5)).await;
                Ok(Some(key.clone()))
            }
            "gone" => Ok(None),
            _ => Ok(Some(key.clone())),
        }
    }

    fn plan(&self, observed: &ObjectKey) -> Result<Plan, Failure> {
        assert_ne!(observed.name(), "panics", "as the test wants it");
        if !*self.stubborn.lock()
            && self.reconciles.lock().iter().filter(|(_, name)| name == observed.name()).count() > 1
        {
            return Ok(Plan::default());
        }
        Ok(plan([Step::new("make")
            .write(Write::Create { target: target(observed.name()), body: Body::from(json!({ "data": {} })) })]))
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
        let worth_telling = outcome.written > 0 || observed.name() == "talkative";
        let events = worth_telling.then(|| EventRecord {
            about,
            kind: EventKind::Normal,
            reason: "Made",
            action: "Make",
            message: "made".to_owned(),
        });
        Report {
            status: None,
            events: events.into_iter().collect(),
            requeue_after: Some(Duration::from_secs(1)).filter(|_| observed.name() == "eager"),
            error: observed.name().starts_with("told").then_some("Told"),
        }
    }
}

struct Bench {
    server: Arc<Server>,
    link: Arc<Link>,
    events: Arc<Link>,
    maker: Arc<Maker>,
    queue: Queue<ObjectKey>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    running: tokio::task::JoinHandle<()>,
    runner: Arc<Runner<Maker>>,
    leadership: Leadership,
}

async fn lead(runner: Arc<Runner<Maker>>, leadership: Leadership) {
    runner.run(leadership).await;
}

fn bench(options: RunnerOptions) -> Bench {
    bench_on(Server::new(), options)
}

fn bench_on(server: Arc<Server>, options: RunnerOptions) -> Bench {
    let (client, link) = server.client();
    let metrics = Arc::new(Metrics::new("test"));
    let reporter = Reporter { controller: "test".to_owned(), instance: "test-1".to_owned() };
    let (event_client, events_link) = server.client();
    let (events, sending) = recorder(event_client, reporter, metrics.clone());
    tokio::spawn(sending);
    let maker = Arc::new(Maker {
        reconciles: Mutex::default(),
        under_way: 0.into(),
        most: 0.into(),
        stubborn: Mutex::default(),
    });
    let queue = Queue::default();
    let runner = Runner {
        controller: maker.clone(),
        queue: queue.clone(),
        executor: Arc::new(Executor::new(client, "tester")),
        events,
        metrics: metrics.clone(),
        health: Arc::new(Health::default()),
        options,
    };
    let (runner, stop) = (Arc::new(runner), CancellationToken::new());
    let leadership = Leadership::unopposed(stop.clone());
    let running = tokio::spawn(lead(runner.clone(), leadership.clone()));
    Bench { server, link, events: events_link, maker, queue, metrics, stop, running, runner, leadership }
}

impl Bench {
    fn add(&self, name: &str) {
        self.queue.add(ObjectKey::namespaced("ns", name));
    }

    fn reconciles(&self, name: &str) -> Vec<Instant> {
        self.maker.reconciles.lock().iter().filter(|(_, of)| of == name).map(|(at, _)| *at).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn one_objects_trouble_is_its_own() {
    let bench = bench(RunnerOptions { workers: 3, reconcile_deadline: Duration::from_secs(30), resync: None });
    for name in ["panics", "hangs", "invalid", "gone", "good-1", "good-2"] {
        bench.add(name);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(bench.server.get(MAPS, "ns", "good-1").is_some() && bench.server.get(MAPS, "ns", "good-2").is_some());
    tokio::time::sleep(Duration::from_secs(600)).await;
    // A panic and a hang are tried again, less and less often, and what is invalid seldom.
    assert!((5..30).contains(&bench.reconciles("panics").len()), "{}", bench.reconciles("panics").len());
    assert!(bench.reconciles("hangs").len() > 3);
    assert!((4..=6).contains(&bench.reconciles("invalid").len()), "{}", bench.reconciles("invalid").len());
    assert_eq!([bench.reconciles("gone").len(), bench.reconciles("good-1").len()], [1, 1]);
    let text = bench.metrics.encode().unwrap();
    for line in [
        "test_reconciliation_errors_total{controller=\"Maker\",error_type=\"Wrong\"}",
        "test_reconciliation_errors_by_class_total{controller=\"Maker\",class=\"Invalid\"}",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert!(text.contains("error_type=\"Panic\"") && text.contains("error_type=\"ReconcileDeadlineExceeded\""));
    // The two that were made, and nothing from the ones in trouble.
    assert_eq!(bench.events.count(Verb::Create), 2);
}

/// The condition and the number say the same, whether a request failed or nothing was even tried.
#[tokio::test(start_paused = true)]
async fn what_a_report_calls_wrong_is_counted_once_and_by_that_name() {
    let bench = bench(RunnerOptions::default());
    let count = |line: &str| {
        let text = bench.metrics.encode().unwrap();
        let name = format!("test_reconciliation_errors{line} ");
        text.lines().find_map(|have| have.strip_prefix(&name)?.parse::<u64>().ok()).unwrap_or_default()
    };
    let counts = || {
        let by_type = ["Told", "AdmissionRefused"];
        let by_type = by_type.map(|name| count(&format!("_total{{controller=\"Maker\",error_type=\"{name}\"}}")));
        (by_type, count("_by_class_total{controller=\"Maker\",class=\"Invalid\"}"))
    };
    bench.add("told");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(counts(), ([1, 0], 0), "nothing failed");
    bench.link.faults.lock().push_back(Fault::Refuse(Verb::Create, 403));
    bench.add("told-of-a-refusal");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(counts(), ([2, 0], 1), "the class is the failure's");
    bench.link.faults.lock().push_back(Fault::Refuse(Verb::Create, 403));
    bench.add("says-nothing");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(counts(), ([2, 1], 2), "a failure that nobody tells of has its own name");
}

/// As when the lease is lost: the work is dropped, and some time later this replica leads again.
#[tokio::test(start_paused = true)]
async fn a_pass_that_was_dropped_is_begun_again_by_the_next_leadership() {
    let bench = bench(RunnerOptions::default());
    bench.add("slow");
    tokio::time::sleep(Duration::from_secs(1)).await;
    bench.running.abort();
    bench.leadership.ended().await;
    assert_eq!((bench.reconciles("slow").len(), bench.link.writes()), (1, 0));
    bench.server.put(MAPS, json!({ "metadata": { "name": "unrelated", "namespace": "ns" } }));
    tokio::spawn(lead(bench.runner.clone(), Leadership::unopposed(CancellationToken::new())));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(bench.reconciles("slow").len(), 2);
    // Woken while it runs, it is served once more and no further.
    bench.add("slow");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(bench.reconciles("slow").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_taken_name_is_tried_again_seldom_and_more_often_with_a_short_resync() {
    for (resync, reconciles) in [(None, 4..=6), (Some(Duration::from_secs(10)), 55..=80)] {
        let server = Server::new();
        server.put(MAPS, json!({ "metadata": { "name": "a", "namespace": "ns" } }));
        let bench = bench_on(server, RunnerOptions { resync, ..RunnerOptions::default() });
        *bench.maker.stubborn.lock() = true;
        bench.add("a");
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(reconciles.contains(&bench.reconciles("a").len()), "{}", bench.reconciles("a").len());
        assert!(bench.metrics.encode().unwrap().contains("error_type=\"NameTaken\""));
        // It leaves: nobody needs to touch our object.
        bench.server.remove(MAPS, "ns", "a");
        tokio::time::sleep(Duration::from_secs(310)).await;
        assert!(bench.server.get(MAPS, "ns", "a").is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn a_report_does_not_undercut_what_a_failure_asks_for() {
    let bench = bench(RunnerOptions::default());
    *bench.maker.stubborn.lock() = true;
    for _ in 0..8 {
        bench.link.faults.lock().push_back(Fault::Refuse(Verb::Create, 403));
    }
    bench.add("eager");
    tokio::time::sleep(Duration::from_secs(100)).await;
    // Refused by admission, as far as one can tell: 30 seconds, a minute, and so on.
    assert!((2..=4).contains(&bench.reconciles("eager").len()), "{}", bench.reconciles("eager").len());
}

#[tokio::test(start_paused = true)]
async fn who_does_not_lead_tells_nothing() {
    let bench = bench(RunnerOptions::default());
    bench.leadership.fence.close_for_test();
    bench.add("talkative");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!bench.reconciles("talkative").is_empty());
    assert_eq!((bench.link.writes(), bench.events.writes()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn workers_are_limited_and_the_rest_is_drained_at_the_end() {
    let bench = bench(RunnerOptions { workers: 3, ..RunnerOptions::default() });
    for n in 0..50 {
        bench.add(&format!("m{n}"));
    }
    tokio::time::sleep(Duration::from_millis(15)).await;
    bench.stop.cancel();
    bench.running.await.unwrap();
    assert_eq!(bench.maker.most.load(Ordering::SeqCst), 3);
    assert_eq!(bench.maker.under_way.load(Ordering::SeqCst), 0);
    let begun = bench.maker.reconciles.lock().len();
    assert!((3..=6).contains(&begun), "{begun}");
    // What was begun was ended.
    assert_eq!(bench.link.count(Verb::Create), begun);
}

#[tokio::test(start_paused = true)]
async fn a_failing_write_is_retried_and_success_forgets_it() {
    let bench = bench(RunnerOptions { resync: Some(Duration::from_secs(30)), ..RunnerOptions::default() });
    bench.link.faults.lock().push_back(Fault::Refuse(Verb::Create, 503));
    bench.add("a");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let reconciles = bench.reconciles("a");
    assert_eq!(reconciles.len(), 2);
    assert!(reconciles[1] - reconciles[0] >= Duration::from_millis(125));
    // Then every resync, and no request.
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!((11..=15).contains(&bench.reconciles("a").len()), "{}", bench.reconciles("a").len());
    assert_eq!(bench.link.requests.lock().len(), 1);
}

#[test]
fn the_class_decides_when_to_try_again() {
    let mut random = SmallRng::seed_from_u64(1);
    let mut delay = |class, failures| retry_delay(&Failure::new(class, "R", "m"), failures, &mut random);
    assert!(delay(ErrorClass::Transient, 0) <= Duration::from_millis(250));
    assert!(delay(ErrorClass::Transient, 50) <= Duration::from_secs(60));
    assert!(delay(ErrorClass::Conflict, 0) <= Duration::from_millis(20));
    assert!(
        delay(ErrorClass::Invalid, 0) >= Duration::from_secs(15)
            && delay(ErrorClass::Invalid, 50) <= Duration::from_secs(300)
    );
    assert!(delay(ErrorClass::Forbidden, 0) >= Duration::from_millis(2_500));
    assert!(delay(ErrorClass::Bug, 9) >= Duration::from_secs(150));
    let asked = Failure::transient("R", "m").retry_after(Duration::from_secs(7));
    assert_eq!(retry_delay(&asked, 0, &mut random), Duration::from_secs(7));
}
