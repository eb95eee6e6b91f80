//! Leader election against a server with real resource versions, on a clock that the test controls.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde_json::json;
use tokio::task::JoinHandle;

use super::{elector::LeaseError, *};
use crate::{
    metrics::Metrics,
    testing::{Link, LinkFault, TestApiServer},
    verb::Verb,
};

const LEASES: &str = "/apis/coordination.k8s.io/v1/leases";

fn lease(holder: &str, version: &str, seconds: i32) -> Lease {
    serde_json::from_value(json!({
        "metadata": { "name": "l", "resourceVersion": version },
        "spec": { "holderIdentity": holder, "leaseDurationSeconds": seconds },
    }))
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_acquired_only_when_it_is_free_expired_or_deleted() {
    let timing = Timing::default();
    let t = Instant::now();
    let after = |seconds| t + Duration::from_secs(seconds);
    let mut view = LeaseView::default();
    assert_eq!(decide(&view, t, "me"), LeaseAction::WaitForView);

    view.observe(None, t, &timing);
    assert_eq!(decide(&view, t, "me"), LeaseAction::Create);

    view.observe(Some(lease("other", "1", 15)), t, &timing);
    assert_eq!(decide(&view, after(14), "me"), LeaseAction::WaitUntil(after(15)));
    assert_eq!(decide(&view, after(15), "me"), LeaseAction::Acquire);
    assert_eq!(decide(&view, t, "other"), LeaseAction::Acquire);

    // An unchanged Lease keeps its expiry time. A changed Lease gets a new one.
    view.observe(Some(lease("other", "1", 15)), after(10), &timing);
    assert_eq!(decide(&view, after(15), "me"), LeaseAction::Acquire);
    view.observe(Some(lease("other", "2", 15)), after(10), &timing);
    assert_eq!(decide(&view, after(15), "me"), LeaseAction::WaitUntil(after(25)));

    // It was deleted while it was held: its holder has not noticed yet.
    view.observe(None, after(11), &timing);
    assert_eq!(decide(&view, after(25), "me"), LeaseAction::WaitUntil(after(26)));
    assert_eq!(decide(&view, after(26), "me"), LeaseAction::Create);

    view.observe(Some(lease("", "3", 1)), after(30), &timing);
    assert_eq!(decide(&view, after(30), "me"), LeaseAction::Acquire);

    // A longer duration of the holder counts, up to a limit. A shorter one does not.
    view.observe(Some(lease("other", "4", 60)), t, &timing);
    assert_eq!(decide(&view, t, "me"), LeaseAction::WaitUntil(after(60)));
    view.observe(Some(lease("other", "5", 1)), t, &timing);
    assert_eq!(decide(&view, t, "me"), LeaseAction::WaitUntil(after(15)));
    view.observe(Some(lease("other", "6", i32::MAX)), t, &timing);
    assert_eq!(decide(&view, t, "me"), LeaseAction::WaitUntil(after(300)));
}

/// Records what each replica did, and how many worked at the same time.
#[derive(Default)]
struct Journal {
    working: AtomicUsize,
    most: AtomicUsize,
    entries: Mutex<Vec<(Instant, String, &'static str)>>,
}

struct Working {
    journal: Arc<Journal>,
    name: String,
}

impl Drop for Working {
    fn drop(&mut self) {
        self.journal.working.fetch_sub(1, Ordering::SeqCst);
        self.journal.record(&self.name, "stopped");
    }
}

impl Journal {
    fn record(&self, name: &str, what: &'static str) {
        self.entries.lock().push((Instant::now(), name.to_owned(), what));
    }

    fn begin(self: &Arc<Self>, name: &str) -> Working {
        let now = self.working.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.record(name, "began");
        Working { journal: self.clone(), name: name.to_owned() }
    }

    fn time_of(&self, name: &str, what: &str) -> Option<Instant> {
        self.entries.lock().iter().rev().find(|(_, by, did)| by == name && *did == what).map(|(at, ..)| *at)
    }

    async fn wait_for(&self, name: &str, what: &str) -> Instant {
        loop {
            if let Some(at) = self.time_of(name, what) {
                return at;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

struct Replica {
    leader: CurrentLeader,
    link: Arc<Link>,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), LeaseError>>,
}

fn elector(client: kube::Client, name: &str) -> Elector {
    Elector {
        client,
        namespace: "ns".to_owned(),
        name: "l".to_owned(),
        identity: name.to_owned(),
        timing: Timing::default(),
        drain: Duration::from_secs(2),
        metrics: Arc::new(Metrics::new("test")),
        leader: CurrentLeader::default(),
    }
}

/// `obedient`: the work stops when it is asked to. Otherwise it ends only when it is dropped.
fn replica(server: &Arc<TestApiServer>, journal: &Arc<Journal>, name: &'static str, obedient: bool) -> Replica {
    let (client, link) = server.client();
    let (shutdown, journal) = (CancellationToken::new(), journal.clone());
    let elector = elector(client, name);
    let (token, leader) = (shutdown.clone(), elector.leader.clone());
    let task = tokio::spawn(async move {
        let lead = |leadership: Leadership| {
            let working = journal.begin(name);
            async move {
                let _working = working;
                if obedient {
                    leadership.stop.cancelled().await;
                } else {
                    std::future::pending::<()>().await;
                }
            }
        };
        elector.run(&token, lead).await
    });
    Replica { leader, link, shutdown, task }
}

fn holder_of(server: &TestApiServer) -> String {
    let lease = server.get(LEASES, "ns", "l").unwrap();
    lease["spec"]["holderIdentity"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn a_dead_holder_is_replaced_within_17_seconds() {
    let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
    let a = replica(&server, &journal, "a", true);
    journal.wait_for("a", "began").await;
    let _b = replica(&server, &journal, "b", true);
    tokio::time::sleep(Duration::from_millis(31_900)).await;
    // Like kill -9: the replica writes nothing more and does not release the lease.
    a.link.cut();
    a.task.abort();
    let death = Instant::now();
    let acquired = journal.wait_for("b", "began").await;
    assert!(acquired - death <= Duration::from_secs(17), "{:?}", acquired - death);
    assert_eq!(journal.most.load(Ordering::SeqCst), 1);
    assert_eq!(holder_of(&server), "b");
}

#[tokio::test(start_paused = true)]
async fn after_a_signal_another_replica_leads_within_3_seconds_even_if_the_work_does_not_stop() {
    for obedient in [true, false] {
        let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
        let a = replica(&server, &journal, "a", obedient);
        journal.wait_for("a", "began").await;
        let _b = replica(&server, &journal, "b", true);
        tokio::time::sleep(Duration::from_secs(30)).await;
        a.shutdown.cancel();
        let signal = Instant::now();
        let acquired = journal.wait_for("b", "began").await;
        assert!(acquired - signal < Duration::from_secs(3), "{:?}", acquired - signal);
        assert_eq!(journal.most.load(Ordering::SeqCst), 1);
        assert!(a.task.await.unwrap().is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_without_connection_stops_before_another_replica_can_acquire_the_lease() {
    for obedient in [true, false] {
        let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
        let a = replica(&server, &journal, "a", obedient);
        journal.wait_for("a", "began").await;
        let _b = replica(&server, &journal, "b", true);
        tokio::time::sleep(Duration::from_millis(30_500)).await;
        a.link.cut();
        let cut = Instant::now();
        let stopped = journal.wait_for("a", "stopped").await;
        let acquired = journal.wait_for("b", "began").await;
        assert!(stopped < acquired);
        assert!(stopped - cut <= Duration::from_secs(if obedient { 10 } else { 14 }), "{:?}", stopped - cut);
        assert_eq!(journal.most.load(Ordering::SeqCst), 1);
        // With its connection restored it is on standby.
        a.link.restore();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(holder_of(&server), "b");
        assert!(!a.task.is_finished());
    }
}

#[tokio::test(start_paused = true)]
async fn every_replica_knows_which_one_leads() {
    let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
    let a = replica(&server, &journal, "a", true);
    journal.wait_for("a", "began").await;
    let b = replica(&server, &journal, "b", true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!((a.leader.get().as_deref(), b.leader.get().as_deref()), (Some("a"), Some("a")));
    a.shutdown.cancel();
    journal.wait_for("b", "began").await;
    assert_eq!((a.leader.get(), b.leader.get().as_deref()), (None, Some("b")));
}

#[tokio::test(start_paused = true)]
async fn a_lost_response_does_not_lose_the_lease() {
    let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
    let a = replica(&server, &journal, "a", true);
    journal.wait_for("a", "began").await;
    let _b = replica(&server, &journal, "b", true);
    for _ in 0..10 {
        a.link.faults.lock().push_back(LinkFault::LoseResponse(Verb::Update));
        tokio::time::sleep(Duration::from_secs(12)).await;
    }
    for _ in 0..10 {
        a.link.faults.lock().push_back(LinkFault::Reject(Verb::Update, 500));
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    assert_eq!(journal.time_of("a", "stopped"), None);
    assert_eq!(holder_of(&server), "a");
}

#[tokio::test(start_paused = true)]
async fn the_holder_creates_a_deleted_lease_again() {
    let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
    let _a = replica(&server, &journal, "a", true);
    journal.wait_for("a", "began").await;
    let _b = replica(&server, &journal, "b", true);
    tokio::time::sleep(Duration::from_millis(20_700)).await;
    server.remove(LEASES, "ns", "l");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(holder_of(&server), "a");
    assert_eq!(journal.time_of("b", "began"), None);
}

#[tokio::test(start_paused = true)]
async fn a_replica_on_standby_sends_no_requests_and_a_holder_only_renewals() {
    let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
    let a = replica(&server, &journal, "a", true);
    journal.wait_for("a", "began").await;
    let b = replica(&server, &journal, "b", true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    a.link.requests.lock().clear();
    b.link.requests.lock().clear();
    tokio::time::sleep(Duration::from_secs(240)).await;
    let all = a.link.requests.lock().len();
    let renewals = a.link.count(Verb::Update);
    assert_eq!(b.link.requests.lock().len(), 0);
    assert_eq!(all, renewals);
    assert!((119..=121).contains(&renewals), "{renewals}");
}

#[tokio::test(start_paused = true)]
async fn the_fence_closes_when_its_time_is_over() {
    let fence = WriteFence::until(Instant::now() + Duration::from_secs(10));
    tokio::time::advance(Duration::from_millis(9_999)).await;
    assert!(fence.may_write());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(!fence.may_write());
    fence.extend(Instant::now() + Duration::from_secs(1));
    assert!(fence.may_write());
    fence.close();
    assert!(!fence.may_write());
}

/// Three replicas, whose connections fail at random: never two work at the same time, and in the end one does.
#[tokio::test(start_paused = true)]
async fn at_most_one_replica_works_under_random_network_faults() {
    for seed in 0..30 {
        let mut random = SmallRng::seed_from_u64(seed);
        let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
        let all: Vec<Replica> = [("a", true), ("b", false), ("c", true)]
            .into_iter()
            .map(|(name, obedient)| replica(&server, &journal, name, obedient))
            .collect();
        for _ in 0..40 {
            let link = &all[random.random_range(0..all.len())].link;
            match random.random_range(0..6) {
                0 | 1 => link.cut(),
                2 | 3 => link.restore(),
                4 => link.faults.lock().push_back(LinkFault::LoseResponse(Verb::Update)),
                _ => link.faults.lock().push_back(LinkFault::Reject(Verb::Update, 503)),
            }
            tokio::time::sleep(Duration::from_millis(random.random_range(10..9_000))).await;
        }
        all.iter().for_each(|replica| replica.link.restore());
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(journal.most.load(Ordering::SeqCst), 1, "seed {seed}");
        assert_eq!(journal.working.load(Ordering::SeqCst), 1, "seed {seed}");
        all.iter().for_each(|replica| replica.task.abort());
    }
}

/// Without the namespace the Lease can be neither renewed nor created, and the server rejects the requests at once.
#[tokio::test(start_paused = true)]
async fn a_missing_namespace_causes_no_request_storm() {
    let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
    let a = replica(&server, &journal, "a", true);
    journal.wait_for("a", "began").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    server.remove_namespace("ns");
    a.link.requests.lock().clear();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let requests = a.link.requests.lock().len();
    assert!((10..100).contains(&requests), "{requests} requests in a minute");
    assert!(journal.time_of("a", "stopped").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_signal_stops_a_replica_on_standby_within_a_second() {
    // Either the connection is cut, or the request that acquires the lease hangs.
    for hanging in [false, true] {
        let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
        let a = replica(&server, &journal, "a", true);
        if hanging {
            a.link.faults.lock().push_back(LinkFault::LoseResponse(Verb::Create));
        } else {
            a.link.cut();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        a.shutdown.cancel();
        let signal = Instant::now();
        assert!(a.task.await.unwrap().is_ok());
        assert!(signal.elapsed() <= Duration::from_secs(1), "{:?}", signal.elapsed());
        // A lease that was acquired without a response is released: no replica has to wait until it expires.
        if hanging {
            assert_eq!(holder_of(&server), "");
        }
        assert_eq!(journal.time_of("a", "began"), None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_signal_stops_a_holder_without_connection_within_the_release_timeout() {
    // The signal arrives while the holder reads a changed Lease over a cut connection. It gives up the release.
    let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
    let a = replica(&server, &journal, "a", true);
    journal.wait_for("a", "began").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    a.link.faults.lock().push_back(LinkFault::Reject(Verb::Update, 409));
    a.link.faults.lock().push_back(LinkFault::LoseResponse(Verb::Get));
    while a.link.count(Verb::Get) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    a.link.cut();
    a.shutdown.cancel();
    let signal = Instant::now();
    assert!(a.task.await.unwrap().is_ok());
    assert!(signal.elapsed() <= Duration::from_millis(1010), "{:?}", signal.elapsed());
}

/// Spawned tasks may run for some time after the work itself was dropped. Until they end, the work has not stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn the_elector_waits_for_tracked_tasks_of_the_work() {
    let server = TestApiServer::new();
    let (client, link) = server.client();
    let timing = Timing {
        duration: Duration::from_millis(900),
        renew_deadline: Duration::from_millis(500),
        retry_period: Duration::from_millis(50),
    };
    let elector = Elector { timing, ..elector(client, "a") };
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = Arc::new(Mutex::new(blocked));
    let cut = link.clone();
    let lead = |leadership: Leadership| {
        let blocked = blocked.clone();
        cut.cut();
        async move {
            let mut reconciles = tokio::task::JoinSet::new();
            reconciles.spawn(leadership.track(async move {
                let _ = blocked.lock().recv();
            }));
            std::future::pending::<()>().await;
        }
    };
    let begin = Instant::now();
    let shutdown = CancellationToken::new();
    let result = tokio::time::timeout(Duration::from_secs(5), elector.run(&shutdown, lead)).await;
    assert!(matches!(result, Ok(Err(LeaseError::WorkStuck))));
    assert!(begin.elapsed() < Duration::from_millis(900), "{:?}", begin.elapsed());
    drop(release);
}

/// Work that blocks its thread cannot be stopped. The elector returns an error in time, so that the process exits.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn work_that_blocks_its_thread_is_an_error_before_the_lease_expires() {
    let server = TestApiServer::new();
    let (client, link) = server.client();
    let timing = Timing {
        duration: Duration::from_millis(900),
        renew_deadline: Duration::from_millis(500),
        retry_period: Duration::from_millis(50),
    };
    let elector = Elector { timing, ..elector(client, "a") };
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = Arc::new(Mutex::new(blocked));
    let cut = link.clone();
    let lead = |_: Leadership| {
        let blocked = blocked.clone();
        cut.cut();
        async move {
            let _ = blocked.lock().recv();
        }
    };
    let result = elector.run(&CancellationToken::new(), lead).await;
    assert!(matches!(result, Err(LeaseError::WorkStuck)));
    drop(release);
}

/// The other replica works already, so there is no time to finish anything.
#[tokio::test(start_paused = true)]
async fn a_leader_that_sees_another_holder_aborts_its_work_at_once() {
    let (server, journal) = (TestApiServer::new(), Arc::new(Journal::default()));
    let _a = replica(&server, &journal, "a", false);
    journal.wait_for("a", "began").await;
    let mut lease = server.get(LEASES, "ns", "l").unwrap();
    lease["spec"]["holderIdentity"] = "b".into();
    server.put(LEASES, lease);
    let replaced = Instant::now();
    let stopped = journal.wait_for("a", "stopped").await;
    assert!(stopped - replaced <= Timing::default().retry_period, "{:?}", stopped - replaced);
}
