//! The seed's numbers that only this program has. Labels are bounded whatever users write: templates, classes and
//! networks are named only if they exist, everything else is `unknown`.
//!
//! Gauges over the cluster's objects are told by the replica that leads, so that a sum over replicas is right.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use api::ObjectKey;
use api::machine::{MachineStatus, condition_type, machine_reason, phase};
use k8s_openapi::jiff::Timestamp;
use machine::Observed;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use runtime::metrics::Metrics;
use runtime::watch::Change;

use crate::cache::{Caches, ClaimEntry, MachineEntry, STATUSES, VmEntry};

const UNKNOWN: &str = "unknown";
const NETWORK_REASONS: [&str; 4] = [
    machine_reason::NETWORK_CONFIGURATION_NOT_FOUND,
    machine_reason::MULTUS_NOT_INSTALLED,
    machine_reason::MAC_ADDRESS_IN_USE,
    machine_reason::NETWORK_FAILED,
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct MachineLabels {
    phase: &'static str,
    template: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatusLabel {
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClassLabel {
    storage_class: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NetworkLabel {
    network_name: String,
}

/// From a tenth of a second to an hour and a half.
fn durations() -> Histogram {
    Histogram::new(exponential_buckets(0.1, 2.0, 16))
}

pub(crate) struct MachineMetrics {
    counts: Arc<Counts>,
    provisioning: Family<ClassLabel, Histogram, fn() -> Histogram>,
    network_errors: Family<NetworkLabel, Counter>,
    time_to_running: Histogram,
    /// Machines that have no VM yet and have never had one: the time until they run will be told.
    starting: Mutex<HashSet<ObjectKey>>,
}

/// How many there are, kept in step by the caches' changes.
#[derive(Default)]
struct Counts {
    leads: AtomicBool,
    machines: Mutex<BTreeMap<MachineLabels, i64>>,
    vms: Mutex<BTreeMap<&'static str, i64>>,
}

impl MachineMetrics {
    pub(crate) fn register(metrics: &Metrics) -> Arc<Self> {
        let own = Self {
            counts: Arc::default(),
            provisioning: Family::new_with_constructor(durations),
            network_errors: Family::default(),
            time_to_running: durations(),
            starting: Mutex::default(),
        };
        metrics.register(|registry| {
            registry.register_collector(Box::new(own.counts.clone()));
            registry.register(
                "storage_provisioning_duration_seconds",
                "From the creation of a claim until it was bound",
                own.provisioning.clone(),
            );
            registry.register(
                "network_configuration_errors",
                "Times that a Machine's networks could not be configured",
                own.network_errors.clone(),
            );
            registry.register(
                "machine_time_to_running_seconds",
                "From the creation of a Machine until its guest ran for the first time",
                own.time_to_running.clone(),
            );
        });
        Arc::new(own)
    }

    pub(crate) fn set_leads(&self, leads: bool) {
        self.counts.leads.store(leads, Ordering::Relaxed);
        self.starting.lock().clear();
    }

    fn leads(&self) -> bool {
        self.counts.leads.load(Ordering::Relaxed)
    }

    pub(crate) fn machine_changed(&self, old: Option<&MachineEntry>, new: Option<&MachineEntry>) {
        let labels = |entry: &MachineEntry| MachineLabels { phase: entry.phase, template: entry.template };
        count(&mut self.counts.machines.lock(), old.map(labels), new.map(labels));
    }

    pub(crate) fn vm_changed(&self, old: Option<&VmEntry>, new: Option<&VmEntry>) {
        let label = |entry: &VmEntry| if entry.status.is_empty() { "Unknown" } else { entry.status };
        count(&mut self.counts.vms.lock(), old.map(label), new.map(label));
    }

    /// A claim that is seen to become bound.
    pub(crate) fn claim_changed(&self, change: &Change<ClaimEntry>, caches: Option<&Caches>) {
        let (Some(old), Some(new)) = (&change.old, &change.new) else { return };
        if !self.leads() || old.phase == ClaimEntry::BOUND || new.phase != ClaimEntry::BOUND {
            return;
        }
        let exists =
            |class: &&str| caches.is_some_and(|caches| caches.classes.get(&ObjectKey::cluster(class)).is_some());
        let storage_class = new.storage_class.as_deref().filter(exists).unwrap_or(UNKNOWN).to_owned();
        self.provisioning
            .get_or_create(&ClassLabel { storage_class })
            .observe(seconds_since(new.created, Timestamp::now()));
    }

    /// A pass over a Machine that ends with this status.
    pub(crate) fn reported(&self, observed: &Observed, desired: &MachineStatus) {
        self.count_network_errors(observed, desired);
        let key = ObjectKey::of(&observed.machine.metadata);
        let known = observed.machine.status.as_ref();
        let fresh = observed.vm.is_none() && known.is_none_or(|status| status.vm_name.is_none());
        let mut starting = self.starting.lock();
        if fresh && !observed.is_deleting() {
            starting.insert(key);
        } else if observed.is_deleting() || desired.phase.as_deref() == Some(phase::STOPPED) {
            starting.remove(&key);
        } else if desired.phase.as_deref() == Some(phase::RUNNING) && starting.remove(&key) {
            let created = observed.machine.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
            self.time_to_running.observe(seconds_since(created, observed.now));
        }
    }

    /// Once for each time that the networks become the reason of not being ready, or in another way. That they are being
    /// made is no error.
    fn count_network_errors(&self, observed: &Observed, desired: &MachineStatus) {
        let wrong = |status: &MachineStatus| {
            let ready = status.conditions.iter().find(|have| have.type_ == condition_type::READY);
            let about_networks = ready.filter(|ready| NETWORK_REASONS.contains(&ready.reason.as_str()));
            about_networks.map(|ready| (ready.reason.clone(), ready.message.clone()))
        };
        let now = wrong(desired);
        if now.is_none() || now == observed.machine.status.as_ref().and_then(wrong) {
            return;
        }
        let names = observed.network_names();
        let missing = names.iter().any(|name| !observed.networks.contains_key(*name));
        let blamed: Vec<&str> = if missing { vec![UNKNOWN] } else { names.into_iter().collect() };
        for name in blamed {
            self.network_errors.get_or_create(&NetworkLabel { network_name: name.to_owned() }).inc();
        }
    }
}

fn seconds_since(second: i64, now: Timestamp) -> f64 {
    let past = Timestamp::from_second(second).unwrap_or(now);
    now.duration_since(past).as_secs_f64().max(0.0)
}

fn count<K: Ord>(counts: &mut BTreeMap<K, i64>, old: Option<K>, new: Option<K>) {
    if let Some(new) = new {
        *counts.entry(new).or_default() += 1;
    }
    if let Some(count) = old.and_then(|old| counts.get_mut(&old)) {
        *count -= 1;
    }
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Counts")
    }
}

impl Collector for Counts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        if !self.leads.load(Ordering::Relaxed) {
            return Ok(());
        }
        let machines = Family::<MachineLabels, Gauge>::default();
        for (labels, count) in &*self.machines.lock() {
            machines.get_or_create(labels).set(*count);
        }
        let help = "Machines by phase and template";
        machines.encode(encoder.encode_descriptor("machines_total", help, None, MetricType::Gauge)?)?;
        let vms = Family::<StatusLabel, Gauge>::default();
        let known = self.vms.lock();
        for status in STATUSES.iter().copied().filter(|status| known.contains_key(status)) {
            vms.get_or_create(&StatusLabel { status }).set(known.get(status).copied().unwrap_or_default());
        }
        let help = "VirtualMachines that were made for Machines, by KubeVirt's printableStatus";
        vms.encode(encoder.encode_descriptor("virtual_machines_total", help, None, MetricType::Gauge)?)
    }
}
