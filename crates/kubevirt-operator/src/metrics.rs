//! The seed's numbers that only this program has. Labels are bounded whatever users write: templates, classes and
//! networks are named only if they exist, everything else is `unknown`.
//!
//! Gauges over the cluster's objects are told by the replica that leads, so that a sum over replicas is right.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use vitivirt_api::ObjectKey;
use vitivirt_api::machine::{MachinePhase, MachineStatus, PrintableStatus, PvcPhase, condition_type, machine_reason};
use vitivirt_machine::Assessed;
use vitivirt_runtime::metrics::Metrics;
use vitivirt_runtime::watch::Change;

use crate::cache::{Caches, MachineEntry, PvcEntry, VmEntry};

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
                "From the creation of a PVC until it was bound",
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

    pub(crate) fn machine_changed(&self, key: &ObjectKey, old: Option<&MachineEntry>, new: Option<&MachineEntry>) {
        if new.is_none() {
            self.starting.lock().remove(key);
        }
        let labels = |entry: &MachineEntry| MachineLabels { phase: entry.phase.as_str(), template: entry.template };
        count(&mut self.counts.machines.lock(), old.map(labels), new.map(labels));
    }

    pub(crate) fn vm_changed(&self, old: Option<&VmEntry>, new: Option<&VmEntry>) {
        let label = |entry: &VmEntry| match entry.status {
            PrintableStatus::Unset => PrintableStatus::Unknown.as_str(),
            status => status.as_str(),
        };
        count(&mut self.counts.vms.lock(), old.map(label), new.map(label));
    }

    /// Whoever makes and removes networks of ever new names must not make ever new series.
    pub(crate) fn network_gone(&self, name: &str) {
        self.network_errors.remove(&NetworkLabel { network_name: name.to_owned() });
    }

    /// A PVC that is seen to become bound.
    pub(crate) fn pvc_changed(&self, change: &Change<PvcEntry>, caches: Option<&Caches>) {
        let (Some(old), Some(new)) = (&change.old, &change.new) else { return };
        if !self.leads() || old.phase == PvcPhase::Bound || new.phase != PvcPhase::Bound {
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
    pub(crate) fn reported(&self, assessed: &Assessed, desired: &MachineStatus) {
        self.count_network_errors(assessed, desired);
        let observed = assessed.observed();
        let key = observed.id.key();
        let known = observed.machine.status.as_ref();
        let fresh = observed.vm.is_none() && known.is_none_or(|status| status.vm_name.is_none());
        let mut starting = self.starting.lock();
        if fresh && !observed.is_deleting() {
            starting.insert(key);
        } else if observed.is_deleting() || desired.phase == Some(MachinePhase::Stopped) {
            starting.remove(&key);
        } else if desired.phase == Some(MachinePhase::Running) && starting.remove(&key) {
            let created = observed.machine.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
            self.time_to_running.observe(seconds_since(created, observed.now));
        }
    }

    /// Once for each time that the networks become the reason of not being ready, or in another way. That they are being
    /// made is no error. Only a network that is at fault is named.
    fn count_network_errors(&self, assessed: &Assessed, desired: &MachineStatus) {
        let observed = assessed.observed();
        let wrong = |status: &MachineStatus| {
            let ready = status.conditions.iter().find(|have| have.type_ == condition_type::READY);
            let about_networks = ready.filter(|ready| NETWORK_REASONS.contains(&ready.reason.as_str()));
            about_networks.map(|ready| (ready.reason.clone(), ready.message.clone()))
        };
        let now = wrong(desired);
        if now.is_none() || now == observed.machine.status.as_ref().and_then(wrong) {
            return;
        }
        let mut blamed = assessed.assessment().networks_at_fault().to_vec();
        blamed.retain(|name| observed.networks.contains_key(name));
        if blamed.is_empty() {
            blamed.push(UNKNOWN.to_owned());
        }
        for network_name in blamed {
            self.network_errors.get_or_create(&NetworkLabel { network_name }).inc();
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
        for status in
            PrintableStatus::ALL.iter().map(|status| status.as_str()).filter(|status| known.contains_key(status))
        {
            vms.get_or_create(&StatusLabel { status }).set(known.get(status).copied().unwrap_or_default());
        }
        let help = "VirtualMachines that were made for Machines, by KubeVirt's printableStatus";
        vms.encode(encoder.encode_descriptor("virtual_machines_total", help, None, MetricType::Gauge)?)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use vitivirt_api::{Outcome, Stop};
    use vitivirt_machine::{Observed, observed::NetworkView};

    use super::*;

    /// A Machine on these networks, in a cluster that has `good` and `bad` among others.
    fn observed(networks: &Value) -> Observed {
        let machine = json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "web", "namespace": "shop", "uid": "u"},
            "spec": {"template": "small", "networks": networks},
        });
        let network = |bridge: Option<&str>| NetworkView {
            uid: "n".to_owned(),
            vlan: None,
            bridge: bridge.map(str::to_owned),
            finalizer_index: None,
            deleting: false,
            other_users: false,
        };
        Observed {
            networks: [("good".to_owned(), network(Some("br0"))), ("bad".to_owned(), network(None))].into(),
            ..Observed::new(serde_json::from_value(machine).unwrap(), Timestamp::UNIX_EPOCH).unwrap()
        }
    }

    fn on(names: &[&str]) -> Value {
        let interface = |(index, name)| json!({"name": format!("i{index}"), "networkName": name, "macAddress": format!("02:00:00:00:00:0{index}")});
        names.iter().enumerate().map(interface).collect()
    }

    fn status(assessed: &Assessed) -> MachineStatus {
        let plan = vitivirt_machine::plan(assessed).unwrap();
        let report = vitivirt_machine::report(assessed, &plan, &Outcome { stop: Stop::Done, written: 0 });
        report.status.unwrap().desired
    }

    /// How often each network was blamed for what a pass found.
    fn blamed(observed: &Observed) -> Vec<String> {
        let metrics = Metrics::new("t");
        let own = MachineMetrics::register(&metrics);
        let assessed = Assessed::new(observed.clone());
        own.reported(&assessed, &status(&assessed));
        let text = metrics.encode().unwrap();
        let lines =
            text.lines().filter_map(|line| line.strip_prefix("t_network_configuration_errors_total{network_name="));
        let mut lines: Vec<String> = lines.map(str::to_owned).collect();
        lines.sort();
        lines
    }

    #[test]
    fn only_the_network_at_fault_is_blamed() {
        assert_eq!(blamed(&observed(&on(&["good", "bad"]))), ["\"bad\"} 1"]);
        assert_eq!(
            blamed(&observed(&on(&["good", "missing"]))),
            ["\"unknown\"} 1"],
            "labels are of networks that exist"
        );
        let mut taken = observed(&on(&["good", "other"]));
        taken.networks.insert("other".to_owned(), taken.networks["good"].clone());
        taken.macs_in_use.insert(("other".to_owned(), "02:00:00:00:00:01".to_owned()), "older".to_owned());
        assert_eq!(blamed(&taken), ["\"other\"} 1"]);
    }

    #[test]
    fn an_address_in_use_on_the_pod_network_is_nobodys_networks_fault() {
        let mut taken = observed(&on(&["pod"]));
        taken.macs_in_use.insert(("pod".to_owned(), "02:00:00:00:00:00".to_owned()), "older".to_owned());
        assert_eq!(blamed(&taken), ["\"unknown\"} 1"]);
        let mut taken = observed(&on(&["pod", "good"]));
        taken.macs_in_use.insert(("pod".to_owned(), "02:00:00:00:00:00".to_owned()), "older".to_owned());
        assert_eq!(blamed(&taken), ["\"unknown\"} 1"], "the other one is good");
    }

    /// Names that come and go must not stay behind.
    #[test]
    fn what_is_gone_is_not_remembered() {
        let metrics = Metrics::new("t");
        let own = MachineMetrics::register(&metrics);
        let bad = Assessed::new(observed(&on(&["bad"])));
        own.reported(&bad, &status(&bad));
        let shows = || metrics.encode().unwrap().contains("network_name=\"bad\"");
        assert!(shows() && own.starting.lock().len() == 1);
        own.network_gone("bad");
        own.machine_changed(&bad.observed().id.key(), None, None);
        assert!(!shows() && own.starting.lock().is_empty());
    }

    #[test]
    fn without_multus_no_network_can_be_configured() {
        let mut without = observed(&on(&["good", "other"]));
        without.networks.insert("other".to_owned(), without.networks["good"].clone());
        without.installed.multus = false;
        assert_eq!(blamed(&without), ["\"good\"} 1", "\"other\"} 1"]);
    }
}
