//! Requests and work queues under the names of KubeVirt's components, which the alerts and dashboards of a release query.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use http::Method;
use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{
        MetricType,
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};
use tokio::time::Instant;

use crate::verb::{Verb, resource};

const NONE: &str = "none";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClientRequestLabels {
    code: String,
    method: String,
    host: Arc<str>,
    resource: String,
    verb: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct QueueLabel {
    name: &'static str,
}

fn buckets() -> Histogram {
    Histogram::new(exponential_buckets(1e-8, 10.0, 10))
}

type Durations = Family<QueueLabel, Histogram, fn() -> Histogram>;

pub(super) struct KubeVirtMetrics {
    requests: Family<ClientRequestLabels, Counter>,
    depth: Family<QueueLabel, Gauge>,
    adds: Family<QueueLabel, Counter>,
    waits: Durations,
    work: Durations,
    retries: Family<QueueLabel, Counter>,
    running: Arc<RunningWork>,
}

/// One request, as the metrics describe it.
pub(crate) struct RequestDescription<'a> {
    pub(crate) verb: Verb,
    pub(crate) method: &'a Method,
    pub(crate) host: &'a Arc<str>,
    pub(crate) path: &'a str,
}

impl KubeVirtMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            depth: Family::default(),
            adds: Family::default(),
            waits: Family::new_with_constructor(buckets),
            work: Family::new_with_constructor(buckets),
            retries: Family::default(),
            running: Arc::default(),
        };
        registry.register(
            "kubevirt_rest_client_requests",
            "Requests to the API server, by status code, method, host, resource and verb",
            metrics.requests.clone(),
        );
        registry.register("kubevirt_workqueue_depth", "Objects waiting to be reconciled", metrics.depth.clone());
        registry.register("kubevirt_workqueue_adds", "Objects that were enqueued", metrics.adds.clone());
        registry.register(
            "kubevirt_workqueue_queue_duration_seconds",
            "Time that an object waits for a worker",
            metrics.waits.clone(),
        );
        registry.register(
            "kubevirt_workqueue_work_duration_seconds",
            "Duration of a reconcile of one object",
            metrics.work.clone(),
        );
        registry.register("kubevirt_workqueue_retries", "Reconciles that are retried", metrics.retries.clone());
        registry.register_collector(Box::new(metrics.running.clone()));
        metrics
    }

    pub(super) fn count_request(&self, request: &RequestDescription<'_>, code: u16) {
        let resource = resource(request.path);
        let verb = match (resource, request.verb) {
            (None, _) | (_, Verb::Other) => NONE,
            (_, Verb::Get) => "GET",
            (_, Verb::List) => "LIST",
            (_, Verb::Watch) => "WATCH",
            (_, Verb::Create) => "CREATE",
            (_, Verb::Update) => "UPDATE",
            (_, Verb::Patch) => "PATCH",
            (_, Verb::Delete) => "DELETE",
        };
        let labels = ClientRequestLabels {
            code: if code == 0 { "<error>".to_owned() } else { code.to_string() },
            method: request.method.to_string(),
            host: request.host.clone(),
            resource: resource.unwrap_or(NONE).to_owned(),
            verb,
        };
        self.requests.get_or_create(&labels).inc();
    }

    pub(super) fn queue(&self, name: &'static str) -> WorkqueueMetrics {
        let label = QueueLabel { name };
        WorkqueueMetrics {
            name,
            depth: self.depth.get_or_create_owned(&label),
            adds: self.adds.get_or_create_owned(&label),
            waits: self.waits.get_or_create_owned(&label),
            work: self.work.get_or_create_owned(&label),
            retries: self.retries.get_or_create_owned(&label),
            running: self.running.clone(),
        }
    }
}

/// The metrics of one queue.
pub(crate) struct WorkqueueMetrics {
    name: &'static str,
    pub(super) depth: Gauge,
    pub(super) adds: Counter,
    waits: Histogram,
    work: Histogram,
    retries: Counter,
    running: Arc<RunningWork>,
}

impl WorkqueueMetrics {
    pub(super) fn start(&self, waited: Duration) -> Work {
        self.waits.observe(waited.as_secs_f64());
        let (begin, id) = (Instant::now(), self.running.serial.fetch_add(1, Ordering::Relaxed));
        self.running.begins.lock().insert(id, (self.name, begin));
        Work { id, begin, work: self.work.clone(), running: self.running.clone() }
    }

    pub(super) fn count_retry(&self) {
        self.retries.inc();
    }
}

/// One running reconcile. Dropping it ends it.
pub(crate) struct Work {
    id: u64,
    begin: Instant,
    work: Histogram,
    running: Arc<RunningWork>,
}

impl Drop for Work {
    fn drop(&mut self) {
        self.running.begins.lock().remove(&self.id);
        self.work.observe(self.begin.elapsed().as_secs_f64());
    }
}

/// When each running reconcile began.
#[derive(Debug, Default)]
struct RunningWork {
    serial: AtomicU64,
    begins: Mutex<HashMap<u64, (&'static str, Instant)>>,
}

impl Collector for RunningWork {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut ages: HashMap<&'static str, (f64, f64)> = HashMap::new();
        for (name, begin) in self.begins.lock().values() {
            let (age, (sum, longest)) = (begin.elapsed().as_secs_f64(), ages.entry(name).or_default());
            *sum += age;
            *longest = longest.max(age);
        }
        let mut encode = |name: &str, help: &str, value: fn(&(f64, f64)) -> f64| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ages.iter().try_for_each(|(name, ages)| {
                ConstGauge::new(value(ages)).encode(family.encode_family(&QueueLabel { name })?)
            })
        };
        encode(
            "kubevirt_workqueue_unfinished_work_seconds",
            "Time that the running reconciles have taken so far",
            |(sum, _)| *sum,
        )?;
        encode(
            "kubevirt_workqueue_longest_running_processor_seconds",
            "Time that the longest running reconcile has taken so far",
            |(_, longest)| *longest,
        )
    }
}
