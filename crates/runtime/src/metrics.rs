//! The numbers that both programs show. Names carry the program's prefix; labels are bounded by construction: they
//! are verbs, codes, classes, reasons and controllers, never names of objects.
//!
//! `prometheus-client` appends `_total` to the names of counters, so they are registered without it.

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

use crate::client::Verb;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ControllerLabel {
    pub controller: &'static str,
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

/// Family constructors must be nameable types; a pass takes from a tenth of a millisecond to its deadline.
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
            "How long a pass over one object took",
            metrics.reconcile_duration.clone(),
        );
        registry.register(
            "reconciliation_errors",
            "Passes that ended with something wrong, by the reason that the object's conditions give, else by that of the failure",
            metrics.reconcile_errors.clone(),
        );
        registry.register(
            "reconciliation_errors_by_class",
            "Passes that failed, by the class of the failure, which decides when it is tried again",
            metrics.reconcile_error_classes.clone(),
        );
        registry.register("queue_depth", "Objects that wait for a pass", metrics.queue_depth.clone());
        registry.register("leader", "1 while this replica holds the lease", metrics.leader.clone());
        registry.register(
            "api_requests",
            "Requests to the API server by verb and HTTP code; code 0 is a request without an answer",
            metrics.requests.clone(),
        );
        registry.register(
            "events_dropped",
            "Events that were not sent because too many came at once",
            metrics.events_dropped.clone(),
        );
        *metrics.registry.lock() = root;
        metrics
    }

    /// Lets a program add what only it counts. The prefix applies to it too.
    pub fn register<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(self.registry.lock().sub_registry_with_prefix(&self.prefix))
    }

    /// The same for names that are given by others: no prefix applies.
    pub fn register_as_named<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(&mut self.registry.lock())
    }

    /// The text that Prometheus scrapes.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry.lock())?;
        Ok(out)
    }

    /// `error` is the type of what is wrong, `class` that of the request that failed; either may be without the other.
    pub fn observe_reconcile(
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

    pub fn queue_depth(&self, controller: &'static str) -> Gauge {
        self.queue_depth.get_or_create_owned(&ControllerLabel { controller })
    }

    pub fn set_leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    pub fn count_request(&self, verb: Verb, code: u16) {
        self.requests.get_or_create(&RequestLabels { verb: verb.as_str(), code }).inc();
    }

    pub fn count_dropped_event(&self) {
        self.events_dropped.inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_as_scraped() {
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
