//! The metrics of both programs. Names begin with the program's prefix. The number of label values is bounded: they are
//! verbs, codes, classes, reasons and controllers, never names of objects.
//!
//! virt-operator has requests and work queues under KubeVirt's names instead (`kubevirt`).
//!
//! `prometheus-client` appends `_total` to the names of counters, so this module registers them without it.

mod format;
mod kubevirt;
mod process;
mod unreadable;

use std::{sync::Arc, time::Duration};

use http::Method;
use parking_lot::Mutex;
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::Registry,
};
use vitivirt_api::{ErrorClass, EventKind};

pub(crate) use self::{
    format::MetricsFormat,
    kubevirt::{RequestDescription, Work},
    unreadable::{ResourceLabel, encode_unreadable},
};
use self::{
    kubevirt::{KubeVirtMetrics, WorkqueueMetrics},
    process::ProcessCollector,
    unreadable::UnreadableSample,
};
use crate::verb::Verb;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ControllerLabel {
    controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabels {
    controller: &'static str,
    error_type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClassLabels {
    controller: &'static str,
    class: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EventLabels {
    r#type: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    verb: &'static str,
    code: u16,
}

/// A named function, because the type of a family contains its constructor. A reconcile takes between a tenth of a
/// millisecond and its deadline.
fn duration_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 3.0, 12))
}

pub struct Metrics {
    registry: Mutex<Registry>,
    prefix: String,
    reconcile_duration: Family<ControllerLabel, Histogram, fn() -> Histogram>,
    reconcile_errors: Family<ErrorLabels, Counter>,
    reconcile_error_classes: Family<ClassLabels, Counter>,
    queue_depth: Family<ControllerLabel, Gauge>,
    leader: Gauge,
    requests: Requests,
    events: Family<EventLabels, Counter>,
    events_dropped: Counter,
}

enum Requests {
    Own(Family<RequestLabels, Counter>),
    KubeVirt(KubeVirtMetrics),
}

/// The metrics of the queue of one controller.
pub(crate) struct QueueMetrics {
    depth: Gauge,
    workqueue: Option<WorkqueueMetrics>,
}

impl QueueMetrics {
    /// `added`: how many keys were enqueued so far.
    pub(crate) fn observe_queue(&self, depth: usize, added: u64) {
        let depth = i64::try_from(depth).unwrap_or(i64::MAX);
        self.depth.set(depth);
        if let Some(workqueue) = &self.workqueue {
            workqueue.depth.set(depth);
            workqueue.adds.inc_by(added);
        }
    }

    /// A reconcile begins. It ends when the result is dropped.
    pub(crate) fn start(&self, waited: Duration) -> Option<Work> {
        self.workqueue.as_ref().map(|workqueue| workqueue.start(waited))
    }

    pub(crate) fn count_retry(&self) {
        if let Some(workqueue) = &self.workqueue {
            workqueue.count_retry();
        }
    }
}

impl Metrics {
    /// `prefix` begins every name, without the underscore that follows it.
    pub fn new(prefix: &str) -> Self {
        Self::build(prefix, |registry| {
            let requests = Family::default();
            registry.sub_registry_with_prefix(prefix).register(
                "api_requests",
                "Requests to the API server, by verb and HTTP status code; code 0 means no response",
                requests.clone(),
            );
            Requests::Own(requests)
        })
    }

    /// Requests and work queues have the names that KubeVirt's components give them.
    pub fn with_kubevirt_names(prefix: &str) -> Self {
        Self::build(prefix, |registry| Requests::KubeVirt(KubeVirtMetrics::register(registry)))
    }

    fn build(prefix: &str, requests: impl FnOnce(&mut Registry) -> Requests) -> Self {
        let mut root = Registry::default();
        root.register_collector(Box::new(ProcessCollector));
        let requests = requests(&mut root);
        let registry = root.sub_registry_with_prefix(prefix);
        let metrics = Self {
            reconcile_duration: Family::new_with_constructor(duration_buckets),
            reconcile_errors: Family::default(),
            reconcile_error_classes: Family::default(),
            queue_depth: Family::default(),
            leader: Gauge::default(),
            requests,
            events: Family::default(),
            events_dropped: Counter::default(),
            registry: Mutex::default(),
            prefix: prefix.to_owned(),
        };
        registry.register(
            "reconciliation_duration_seconds",
            "Duration of a reconcile of one object",
            metrics.reconcile_duration.clone(),
        );
        registry.register(
            "reconciliation_errors",
            "Reconciles that ended with an error, by the reason of the object's condition, or by the reason of the \
             failure if the condition has none",
            metrics.reconcile_errors.clone(),
        );
        registry.register(
            "reconciliation_errors_by_class",
            "Failed reconciles by error class, which determines the retry delay",
            metrics.reconcile_error_classes.clone(),
        );
        registry.register("queue_depth", "Objects waiting to be reconciled", metrics.queue_depth.clone());
        registry.register("leader", "1 if this replica is the leader, 0 otherwise", metrics.leader.clone());
        registry.register("events", "Events that were recorded, by type and reason", metrics.events.clone());
        registry.register(
            "events_dropped",
            "Events that were dropped because too many were recorded at once",
            metrics.events_dropped.clone(),
        );
        *metrics.registry.lock() = root;
        metrics
    }

    /// Registers metrics of one program, with the prefix.
    pub fn register<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(self.registry.lock().sub_registry_with_prefix(&self.prefix))
    }

    /// Registers metrics whose names are defined elsewhere, without the prefix.
    pub fn register_as_named<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(&mut self.registry.lock())
    }

    /// The metrics as OpenMetrics.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry.lock())?;
        Ok(out)
    }

    pub(crate) fn encode_as(&self, format: MetricsFormat) -> Result<String, std::fmt::Error> {
        let open_metrics = self.encode()?;
        match format {
            MetricsFormat::OpenMetrics => Ok(open_metrics),
            MetricsFormat::Text => format::to_text_format(&open_metrics),
        }
    }

    /// `error` is the error type that users see, `class` the class of the failure. Each may be present without the
    /// other.
    pub(crate) fn observe_reconcile(
        &self,
        controller: &'static str,
        seconds: f64,
        error: Option<&'static str>,
        class: Option<ErrorClass>,
    ) {
        self.reconcile_duration.get_or_create(&ControllerLabel { controller }).observe(seconds);
        if let Some(error_type) = error {
            self.reconcile_errors.get_or_create(&ErrorLabels { controller, error_type }).inc();
        }
        if let Some(class) = class.map(ErrorClass::as_str) {
            self.reconcile_error_classes.get_or_create(&ClassLabels { controller, class }).inc();
        }
    }

    /// `queue`: the name of the queue among those of KubeVirt's components.
    pub(crate) fn queue(&self, controller: &'static str, queue: &'static str) -> QueueMetrics {
        let workqueue = match &self.requests {
            Requests::Own(_) => None,
            Requests::KubeVirt(metrics) => Some(metrics.queue(queue)),
        };
        QueueMetrics { depth: self.queue_depth.get_or_create_owned(&ControllerLabel { controller }), workqueue }
    }

    /// The version of the program, in the labels of a metric that is always 1.
    pub(crate) fn set_build(&self, version: &'static str) {
        self.register(|registry| {
            registry.register("build", "Version of the program", Info::new([("version", version)]));
        });
    }

    pub(crate) fn set_leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    pub(crate) fn count_request(&self, request: &RequestDescription<'_>, code: u16) {
        match &self.requests {
            Requests::Own(requests) => {
                requests.get_or_create(&RequestLabels { verb: request.verb.as_str(), code }).inc();
            }
            Requests::KubeVirt(metrics) => metrics.count_request(request, code),
        }
    }

    pub(crate) fn count_event(&self, kind: EventKind, reason: &'static str) {
        self.events.get_or_create(&EventLabels { r#type: kind.as_str(), reason }).inc();
    }

    pub(crate) fn count_dropped_event(&self) {
        self.events_dropped.inc();
    }

    /// The metrics as OpenMetrics, with at least one series of each, so that a reference can list their labels. The
    /// values mean nothing.
    pub fn encode_samples(&self) -> Result<String, std::fmt::Error> {
        self.set_build("");
        self.observe_reconcile("", 0.0, Some(""), Some(ErrorClass::Transient));
        self.count_event(EventKind::Normal, "");
        let host: Arc<str> = "".into();
        let request = RequestDescription { verb: Verb::Get, method: &Method::GET, host: &host, path: "/version" };
        self.count_request(&request, 0);
        self.register(|registry| registry.register_collector(Box::new(UnreadableSample)));
        // The metrics of running reconciles have series while one runs.
        let _running = self.queue("", "").start(Duration::ZERO);
        self.encode()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    #[test]
    fn metrics_have_their_documented_names_and_labels() {
        let metrics = Metrics::new("kubevirt_operator");
        metrics.observe_reconcile("Machine", 0.2, Some("ApiServerUnreachable"), Some(ErrorClass::Transient));
        metrics.queue("Machine", "queue").observe_queue(3, 5);
        metrics.set_leader(true);
        metrics.set_build("1.2.3");
        metrics.count_event(EventKind::Warning, "RepeatedDrift");
        metrics.count_request(&request(Verb::Patch, &Method::PATCH, "/api/v1/pods"), 200);
        let text = metrics.encode().unwrap();
        for line in [
            "kubevirt_operator_reconciliation_duration_seconds_count{controller=\"Machine\"} 1",
            "kubevirt_operator_reconciliation_errors_total{controller=\"Machine\",error_type=\"ApiServerUnreachable\"} 1",
            "kubevirt_operator_reconciliation_errors_by_class_total{controller=\"Machine\",class=\"Transient\"} 1",
            "kubevirt_operator_queue_depth{controller=\"Machine\"} 3",
            "kubevirt_operator_leader 1",
            "kubevirt_operator_api_requests_total{verb=\"patch\",code=\"200\"} 1",
            "kubevirt_operator_build_info{version=\"1.2.3\"} 1",
            "kubevirt_operator_events_total{type=\"Warning\",reason=\"RepeatedDrift\"} 1",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
        }
        for name in ["cpu_seconds_total", "resident_memory_bytes", "start_time_seconds", "open_fds", "max_fds"] {
            assert!(text.lines().any(|have| have.starts_with(&format!("process_{name} "))), "{name}: {text}");
        }
        assert!(!text.contains("kubevirt_workqueue") && !text.contains("rest_client"), "{text}");
    }

    #[test]
    fn samples_have_a_series_of_each_metric() {
        for metrics in [Metrics::new("a"), Metrics::with_kubevirt_names("a")] {
            let text = metrics.encode_samples().unwrap();
            let described = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
            for name in described {
                assert!(text.lines().any(|line| line.starts_with(name)), "{name} has no series in\n{text}");
            }
        }
    }

    fn request<'a>(verb: Verb, method: &'a Method, path: &'a str) -> RequestDescription<'a> {
        static HOST: LazyLock<Arc<str>> = LazyLock::new(|| "10.0.0.1:443".into());
        RequestDescription { verb, method, host: &HOST, path }
    }

    /// The names and labels of KubeVirt v1.8.4, which the alert VirtOperatorRESTErrorsBurst reads.
    #[tokio::test(start_paused = true)]
    async fn metrics_with_the_names_of_kubevirt_have_its_labels() {
        let metrics = Metrics::with_kubevirt_names("virt_operator");
        for (verb, method, path, code) in [
            (Verb::Create, Method::POST, "/apis/apps/v1/namespaces/kubevirt/deployments", 201),
            (Verb::List, Method::GET, "/api/v1/nodes", 200),
            (Verb::Patch, Method::PATCH, "/apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts/kubevirt/status", 503),
            (Verb::Get, Method::GET, "/version", 0),
        ] {
            metrics.count_request(&request(verb, &method, path), code);
        }
        let queue = metrics.queue("KubeVirt", "virt-operator");
        queue.observe_queue(1, 2);
        let work = queue.start(Duration::from_millis(20));
        tokio::time::advance(Duration::from_secs(3)).await;
        let text = metrics.encode().unwrap();
        drop(work);
        queue.count_retry();
        let text = text + &metrics.encode().unwrap();
        let requests = "kubevirt_rest_client_requests_total";
        for line in [
            format!(
                "{requests}{{code=\"201\",method=\"POST\",host=\"10.0.0.1:443\",resource=\"deployments\",verb=\"CREATE\"}} 1"
            ),
            format!(
                "{requests}{{code=\"200\",method=\"GET\",host=\"10.0.0.1:443\",resource=\"nodes\",verb=\"LIST\"}} 1"
            ),
            format!(
                "{requests}{{code=\"503\",method=\"PATCH\",host=\"10.0.0.1:443\",resource=\"kubevirts\",verb=\"PATCH\"}} 1"
            ),
            format!(
                "{requests}{{code=\"<error>\",method=\"GET\",host=\"10.0.0.1:443\",resource=\"none\",verb=\"none\"}} 1"
            ),
            "kubevirt_workqueue_depth{name=\"virt-operator\"} 1".to_owned(),
            "kubevirt_workqueue_adds_total{name=\"virt-operator\"} 2".to_owned(),
            "kubevirt_workqueue_queue_duration_seconds_sum{name=\"virt-operator\"} 0.02".to_owned(),
            "kubevirt_workqueue_unfinished_work_seconds{name=\"virt-operator\"} 3.0".to_owned(),
            "kubevirt_workqueue_longest_running_processor_seconds{name=\"virt-operator\"} 3.0".to_owned(),
            "kubevirt_workqueue_work_duration_seconds_sum{name=\"virt-operator\"} 3.0".to_owned(),
            "kubevirt_workqueue_retries_total{name=\"virt-operator\"} 1".to_owned(),
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("virt_operator_api_requests"), "nothing is counted twice");
    }
}
