//! The number of nodes that can run VMs. The replicas of virt-api follow it.
//!
//! Nodes are not watched for that: virt-handler writes a heartbeat to each node every minute, so a watch of thousands of
//! nodes would deliver a hundred events per second. Nodes appear and disappear together with their virt-handler pods.
//! So the leader counts them when the DaemonSet of virt-handler changes, and otherwise every ten minutes.

use std::time::Duration;

use http::header::{ACCEPT, HeaderValue};
use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use kube::{Client, Resource, api::ListParams, core::Request};
use parking_lot::Mutex;
use serde::{Deserialize, de::IgnoredAny};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};
use vitivirt_api::{Failure, ObjectKey, Target, reason};
use vitivirt_install::{HeldNodes, NodeHistory};
use vitivirt_runtime::reconcile::classify;

use crate::cache::schedulable_selector;

/// The longest time between two counts.
const EVERY: Duration = Duration::from_secs(600);
/// The delay after a change of the DaemonSet. virt-handler sets the label of its node about when it becomes ready. It
/// doubles as long as the number differs from that of the ready pods.
const SOON: Duration = Duration::from_secs(1);
/// After a failed count, reconciles do not count again for this time.
const AGAIN: Duration = Duration::from_secs(10);
const PAGE: u32 = 500;
/// The server prints nodes as rows of a table, without the objects.
const TABLE: HeaderValue = HeaderValue::from_static("application/json;as=Table;v=v1;g=meta.k8s.io");

pub(crate) struct NodeCount {
    client: Client,
    count: Mutex<Option<usize>>,
    /// The numbers that the last reconciles observed.
    history: Mutex<NodeHistory>,
    failed: Mutex<Option<Instant>>,
    changed: Notify,
}

#[derive(Deserialize)]
struct Table {
    #[serde(default)]
    metadata: TableMetadata,
    #[serde(default)]
    rows: Option<Vec<IgnoredAny>>,
}

#[derive(Default, Deserialize)]
struct TableMetadata {
    #[serde(rename = "continue")]
    next: Option<String>,
}

impl NodeCount {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client,
            count: Mutex::default(),
            history: Mutex::default(),
            failed: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// The last count, or a new one if there is none. `None`: nodes cannot be counted.
    pub(crate) async fn get(&self) -> Option<usize> {
        let (known, failed) = (*self.count.lock(), *self.failed.lock());
        if known.is_some() || failed.is_some_and(|time| time.elapsed() < AGAIN) {
            return known;
        }
        self.try_count().await
    }

    /// The number that counts now, although fewer nodes may be schedulable. `live_replicas` are those of virt-api.
    pub(crate) fn hold(&self, now: Timestamp, nodes: usize, live_replicas: impl FnOnce() -> Option<i64>) -> HeldNodes {
        let mut history = self.history.lock();
        let live_replicas = if history.is_empty() { live_replicas() } else { None };
        history.observe(now, nodes, live_replicas)
    }

    /// A new leader counts again, and the numbers of an earlier leadership say nothing about the last minutes.
    pub(crate) fn clear(&self) {
        *self.count.lock() = None;
        *self.history.lock() = NodeHistory::default();
        *self.failed.lock() = None;
    }

    /// Nodes may have changed.
    pub(crate) fn count_soon(&self) {
        self.changed.notify_one();
    }

    /// Counts until it is dropped. `ready_pods` is the number of ready pods of virt-handler.
    pub(crate) async fn run(&self, ready_pods: impl Fn() -> usize, on_change: impl Fn()) {
        let mut delay = SOON;
        loop {
            if timeout(delay, self.changed.notified()).await.is_ok() {
                // Several pods change at about the same time.
                delay = SOON;
                sleep(delay).await;
            }
            let before = *self.count.lock();
            let count = self.try_count().await;
            if count.is_some() && count != before {
                on_change();
            }
            delay = if count == Some(ready_pods()) { EVERY } else { (delay * 2).min(EVERY) };
        }
    }

    async fn try_count(&self) -> Option<usize> {
        match self.count().await {
            Ok(count) => Some(count),
            Err(failure) => {
                tracing::warn!(error = failure.message, "cannot count nodes");
                *self.failed.lock() = Some(Instant::now());
                None
            }
        }
    }

    async fn count(&self) -> Result<usize, Failure> {
        let mut parameters = ListParams::default().labels_from(&schedulable_selector()).limit(PAGE);
        let mut count = 0;
        loop {
            let page = self.page(&parameters).await?;
            count += page.rows.map_or(0, |rows| rows.len());
            let Some(next) = page.metadata.next.filter(|next| !next.is_empty()) else { break };
            parameters = parameters.continue_token(&next);
        }
        *self.count.lock() = Some(count);
        Ok(count)
    }

    async fn page(&self, parameters: &ListParams) -> Result<Table, Failure> {
        let target = || Target::of_kind::<Node>(ObjectKey::cluster("*"));
        let request = Request::new(Node::url_path(&(), None)).list(parameters);
        let request = request.map_err(|error| Failure::bug(reason::BAD_REQUEST, format!("cannot list nodes: {error}")));
        let (mut parts, body) = request?.into_parts();
        let query = parts.uri.query().unwrap_or_default();
        let uri = format!("{}?{query}&includeObject=None", parts.uri.path());
        parts.uri =
            uri.parse().map_err(|error| Failure::bug(reason::BAD_REQUEST, format!("cannot list nodes: {error}")))?;
        parts.headers.insert(ACCEPT, TABLE);
        let response = self.client.request(http::Request::from_parts(parts, body)).await;
        response.map_err(|error| classify(&error, "list", &target()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    };

    use bytes::Bytes;
    use http_body_util::Full;
    use kube::client::Body;
    use serde_json::json;
    use tower::{BoxError, service_fn};

    use super::*;

    #[derive(Default)]
    struct Cluster {
        nodes: AtomicUsize,
        ready_pods: AtomicUsize,
        requests: Mutex<Vec<String>>,
        changes: AtomicUsize,
        fails: AtomicBool,
    }

    /// A server that prints tables of at most `PAGE` rows.
    fn start() -> (Arc<Cluster>, Arc<NodeCount>) {
        let cluster = Arc::<Cluster>::default();
        let server = cluster.clone();
        let service = service_fn(move |request: http::Request<Body>| {
            let uri = request.uri().to_string();
            let from = uri.split_once("continue=").map_or("0", |(_, rest)| rest.split('&').next().unwrap_or_default());
            let from: usize = from.parse().unwrap();
            let rows = (server.nodes.load(SeqCst) - from).min(500);
            let next = if from + rows < server.nodes.load(SeqCst) { (from + rows).to_string() } else { String::new() };
            let rows: Vec<_> = (0..rows).map(|_| json!({"cells": ["node"], "object": null})).collect();
            let table = json!({"kind": "Table", "metadata": {"continue": next}, "rows": rows}).to_string();
            assert!(request.headers()[ACCEPT].to_str().unwrap().contains("as=Table"));
            server.requests.lock().push(uri);
            let fails = server.fails.load(SeqCst);
            async move {
                if fails {
                    return Err(BoxError::from("connection refused"));
                }
                Ok(http::Response::new(Full::new(Bytes::from(table))))
            }
        });
        let count = Arc::new(NodeCount::new(Client::new(service, "default")));
        let (counting, watched) = (count.clone(), cluster.clone());
        tokio::spawn(async move {
            let ready_pods = || watched.ready_pods.load(SeqCst);
            let on_change = || {
                watched.changes.fetch_add(1, SeqCst);
            };
            counting.run(ready_pods, on_change).await;
        });
        (cluster, count)
    }

    #[tokio::test(start_paused = true)]
    async fn a_quiet_cluster_is_counted_every_ten_minutes_and_a_change_within_seconds() {
        let (cluster, count) = start();
        cluster.nodes.store(1200, SeqCst);
        cluster.ready_pods.store(1200, SeqCst);
        assert_eq!(count.get().await, Some(1200));
        assert_eq!(cluster.requests.lock().len(), 3, "pages");
        assert!(cluster.requests.lock().iter().all(|uri| uri.contains("includeObject=None")));
        sleep(Duration::from_secs(10)).await;
        cluster.requests.lock().clear();
        assert_eq!((count.get().await, cluster.changes.load(SeqCst)), (Some(1200), 0));
        sleep(Duration::from_secs(580)).await;
        assert!(cluster.requests.lock().is_empty());
        sleep(Duration::from_secs(20)).await;
        assert_eq!(cluster.requests.lock().len(), 3);
        // A pod becomes ready, and its virt-handler sets the label six seconds later.
        cluster.ready_pods.store(1201, SeqCst);
        count.count_soon();
        sleep(Duration::from_secs(6)).await;
        cluster.nodes.store(1201, SeqCst);
        sleep(Duration::from_secs(10)).await;
        assert_eq!((count.get().await, cluster.changes.load(SeqCst)), (Some(1201), 1));
        cluster.requests.lock().clear();
        sleep(Duration::from_secs(580)).await;
        assert!(cluster.requests.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_stays_unschedulable_is_counted_less_and_less_often() {
        let (cluster, count) = start();
        cluster.nodes.store(1, SeqCst);
        cluster.ready_pods.store(2, SeqCst);
        count.count_soon();
        sleep(Duration::from_secs(3600)).await;
        let requests = cluster.requests.lock().len();
        assert!((10..=18).contains(&requests), "{requests}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_leadership_does_not_hold_the_nodes_of_an_earlier_one() {
        let (_, count) = start();
        let held = |second: i64, nodes: usize, replicas: i64| {
            let held = count.hold(Timestamp::from_second(second).unwrap(), nodes, || Some(replicas));
            (held.count, held.until.is_some())
        };
        assert_eq!(held(1_000_000, 60, 6), (60, false));
        assert_eq!(held(1_000_010, 59, 6), (60, true), "a short dip");
        count.clear();
        // Another replica has led for an hour, and the cluster has become smaller.
        assert_eq!(held(1_003_600, 10, 2), (10, false));
        count.clear();
        assert_eq!(held(1_007_200, 1, 2), (2, true), "the live replicas show a dip");
    }

    #[tokio::test(start_paused = true)]
    async fn reconciles_do_not_repeat_a_count_that_has_just_failed() {
        let (cluster, count) = start();
        cluster.nodes.store(3, SeqCst);
        cluster.fails.store(true, SeqCst);
        for _ in 0..20 {
            assert_eq!(count.get().await, None);
        }
        assert_eq!(cluster.requests.lock().len(), 1);
        cluster.fails.store(false, SeqCst);
        sleep(Duration::from_secs(11)).await;
        assert_eq!(count.get().await, Some(3));
    }
}
