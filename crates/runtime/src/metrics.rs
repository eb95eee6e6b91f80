//! The metrics of both programs. Names begin with the program's prefix. The number of label values is bounded: they are
//! verbs, codes, classes, reasons and controllers, never names of objects.
//!
//! `prometheus-client` appends `_total` to the names of counters, so this module registers them without it.

use parking_lot::Mutex;
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};
use vitivirt_api::ErrorClass;

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
    requests: Family<RequestLabels, Counter>,
    events_dropped: Counter,
}

impl Metrics {
    /// `prefix` begins every name, without the underscore that follows it.
    pub fn new(prefix: &str) -> Self {
        let mut root = Registry::default();
        let registry = root.sub_registry_with_prefix(prefix);
        let metrics = Self {
            reconcile_duration: Family::new_with_constructor(duration_buckets),
            reconcile_errors: Family::default(),
            reconcile_error_classes: Family::default(),
            queue_depth: Family::default(),
            leader: Gauge::default(),
            requests: Family::default(),
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
        registry.register(
            "api_requests",
            "Requests to the API server, by verb and HTTP status code; code 0 means no response",
            metrics.requests.clone(),
        );
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

    /// The metrics in the text format that Prometheus scrapes.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry.lock())?;
        Ok(out)
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

    pub(crate) fn queue_depth(&self, controller: &'static str) -> Gauge {
        self.queue_depth.get_or_create_owned(&ControllerLabel { controller })
    }

    pub(crate) fn set_leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    pub(crate) fn count_request(&self, verb: Verb, code: u16) {
        self.requests.get_or_create(&RequestLabels { verb: verb.as_str(), code }).inc();
    }

    pub(crate) fn count_dropped_event(&self) {
        self.events_dropped.inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_their_documented_names_and_labels() {
        let metrics = Metrics::new("kubevirt_operator");
        metrics.observe_reconcile("Machine", 0.2, Some("ApiServerUnreachable"), Some(ErrorClass::Transient));
        metrics.queue_depth("Machine").set(3);
        metrics.set_leader(true);
        metrics.count_request(Verb::Patch, 200);
        let text = metrics.encode().unwrap();
        for line in [
            "kubevirt_operator_reconciliation_duration_seconds_count{controller=\"Machine\"} 1",
            "kubevirt_operator_reconciliation_errors_total{controller=\"Machine\",error_type=\"ApiServerUnreachable\"} 1",
            "kubevirt_operator_reconciliation_errors_by_class_total{controller=\"Machine\",class=\"Transient\"} 1",
            "kubevirt_operator_queue_depth{controller=\"Machine\"} 3",
            "kubevirt_operator_leader 1",
            "kubevirt_operator_api_requests_total{verb=\"patch\",code=\"200\"} 1",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
        }
    }
}
