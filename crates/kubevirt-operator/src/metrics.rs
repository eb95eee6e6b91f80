//! The metrics that only kubevirt-operator has. The number of label values is bounded whatever users write: a template,
//! StorageClass or network is a label only if it exists, and `unknown` otherwise.
//!
//! Only the leader exports the gauges that count objects of the cluster, so that a sum over replicas is correct.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use k8s_openapi::jiff::Timestamp;
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
};
use tokio::time::Instant;
use vitivirt_api::{
    ObjectKey,
    machine::{MachinePhase, MachineStatus, PrintableStatus, PvcPhase, condition_type, machine_reason},
};
use vitivirt_machine::Assessed;
use vitivirt_runtime::{
    metrics::Metrics,
    watch::{Cache, Change},
};

use crate::cache::{Caches, ClassEntry, MachineEntry, PvcEntry, VmEntry};

/// The beginning of the name of each metric.
pub(crate) const PREFIX: &str = "kubevirt_operator";
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
struct StateLabel {
    state: &'static str,
}

/// What a Machine may wait for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitState {
    Pending,
    Creating,
    Deleting,
}

impl WaitState {
    const ALL: [Self; 3] = [Self::Pending, Self::Creating, Self::Deleting];

    fn of(entry: &MachineEntry) -> Option<Self> {
        match entry.phase {
            _ if entry.deleting => Some(Self::Deleting),
            MachinePhase::Pending => Some(Self::Pending),
            MachinePhase::Creating => Some(Self::Creating),
            _ => None,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Creating => "Creating",
            Self::Deleting => "Deleting",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatusLabel {
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StorageClassLabel {
    storage_class: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NetworkLabel {
    network_name: String,
}

/// Buckets from 0.1 seconds to 55 minutes.
fn duration_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.1, 2.0, 16))
}

pub(crate) struct MachineMetrics {
    counts: Arc<ObjectCounts>,
    provisioning: Family<StorageClassLabel, Histogram, fn() -> Histogram>,
    network_errors: Family<NetworkLabel, Counter>,
    time_to_running: Histogram,
    /// Machines whose VM has not been created yet: their time to running is measured.
    starting: Mutex<HashSet<ObjectKey>>,
}

/// The numbers of Machines and VMs, updated by the caches' changes.
#[derive(Default)]
struct ObjectCounts {
    leads: AtomicBool,
    machines: Mutex<BTreeMap<MachineLabels, i64>>,
    vms: Mutex<BTreeMap<&'static str, i64>>,
    /// The Machines that wait, and since when this replica has observed it.
    waiting: Mutex<HashMap<ObjectKey, (WaitState, Instant)>>,
    caches: OnceLock<Caches>,
}

impl ObjectCounts {
    fn set_waiting(&self, key: &ObjectKey, state: Option<WaitState>, now: Instant) {
        let mut waiting = self.waiting.lock();
        match state {
            None => drop(waiting.remove(key)),
            Some(state) if waiting.get(key).is_some_and(|(before, _)| *before == state) => {}
            Some(state) => drop(waiting.insert(key.clone(), (state, now))),
        }
    }

    /// How long the Machine that has been in this state for the longest time has been in it.
    fn longest_wait(&self, state: WaitState, now: Instant) -> f64 {
        let waiting = self.waiting.lock();
        let times = waiting.values().filter(|(waits, _)| *waits == state).map(|(_, since)| now.duration_since(*since));
        times.max().unwrap_or_default().as_secs_f64()
    }

    /// PVCs that were to be deleted with a Machine that no longer exists. A user removed its finalizer.
    fn orphaned_pvcs(&self) -> usize {
        let Some(caches) = self.caches.get() else { return 0 };
        let is_orphaned = |key: &ObjectKey, pvc: &PvcEntry| {
            let (Some(uid), Some(name)) = (pvc.machine_uid(), pvc.machine()) else { return false };
            let owner = caches.machines.entry(&key.sibling(name));
            !pvc.is_retained() && owner.is_none_or(|owner| owner.uid.to_string() != uid)
        };
        caches.pvcs.entries().iter().filter(|(key, entry)| is_orphaned(key, &entry.value)).count()
    }
}

impl MachineMetrics {
    pub(crate) fn register(metrics: &Metrics) -> Arc<Self> {
        let own = Self {
            counts: Arc::default(),
            provisioning: Family::new_with_constructor(duration_histogram),
            network_errors: Family::default(),
            time_to_running: duration_histogram(),
            starting: Mutex::default(),
        };
        metrics.register(|registry| {
            registry.register_collector(Box::new(own.counts.clone()));
            registry.register(
                "storage_provisioning_duration_seconds",
                "Time from the creation of a PVC until it is bound, by StorageClass",
                own.provisioning.clone(),
            );
            registry.register(
                "network_configuration_errors",
                "Failures to configure the networks of a Machine, by network",
                own.network_errors.clone(),
            );
            registry.register(
                "machine_time_to_running_seconds",
                "Time from the creation of a Machine until its VM runs for the first time",
                own.time_to_running.clone(),
            );
        });
        Arc::new(own)
    }

    /// Counts the changes of these caches.
    pub(crate) fn subscribe(self: &Arc<Self>, caches: &Caches) {
        let _ = self.counts.caches.set(caches.clone());
        let metrics = self.clone();
        caches.machines.subscribe(move |change| {
            metrics.machine_changed(&change.key, change.old.as_deref(), change.new.as_deref());
        });
        let metrics = self.clone();
        caches.vms.subscribe(move |change| metrics.vm_changed(change.old.as_deref(), change.new.as_deref()));
        let metrics = self.clone();
        caches.networks.subscribe(move |change| {
            if change.new.is_none() {
                metrics.network_deleted(change.key.name());
            }
        });
        let (metrics, classes) = (self.clone(), caches.classes.clone());
        caches.pvcs.subscribe(move |change| metrics.pvc_changed(change, &classes));
    }

    pub(crate) fn set_leads(&self, leads: bool) {
        self.counts.leads.store(leads, Ordering::Relaxed);
        self.starting.lock().clear();
    }

    fn leads(&self) -> bool {
        self.counts.leads.load(Ordering::Relaxed)
    }

    fn machine_changed(&self, key: &ObjectKey, old: Option<&MachineEntry>, new: Option<&MachineEntry>) {
        if new.is_none() {
            self.starting.lock().remove(key);
        }
        self.counts.set_waiting(key, new.and_then(WaitState::of), Instant::now());
        let labels = |entry: &MachineEntry| MachineLabels { phase: entry.phase.as_str(), template: entry.template };
        move_count(&mut self.counts.machines.lock(), old.map(labels), new.map(labels));
    }

    fn vm_changed(&self, old: Option<&VmEntry>, new: Option<&VmEntry>) {
        let label = |entry: &VmEntry| match entry.status {
            PrintableStatus::Unset => PrintableStatus::Unknown.as_str(),
            status => status.as_str(),
        };
        move_count(&mut self.counts.vms.lock(), old.map(label), new.map(label));
    }

    /// Removes the network's series, so that networks with ever new names do not add series without end.
    fn network_deleted(&self, name: &str) {
        self.network_errors.remove(&NetworkLabel { network_name: name.to_owned() });
    }

    /// Measures the provisioning time of a PVC that has become bound.
    fn pvc_changed(&self, change: &Change<PvcEntry>, classes: &Cache<ClassEntry>) {
        let (Some(old), Some(new)) = (&change.old, &change.new) else { return };
        if !self.leads() || old.phase == PvcPhase::Bound || new.phase != PvcPhase::Bound {
            return;
        }
        let exists = |class: &&str| classes.get(&ObjectKey::cluster(class)).is_some();
        let storage_class = new.storage_class.as_deref().filter(exists).unwrap_or(UNKNOWN).to_owned();
        #[expect(clippy::disallowed_methods, reason = "the metric is the time until now")]
        let seconds = seconds_since(new.created, Timestamp::now());
        self.provisioning.get_or_create(&StorageClassLabel { storage_class }).observe(seconds);
    }

    /// Updates the metrics after a reconcile that reports this status.
    pub(crate) fn record_report(&self, assessed: &Assessed, desired: &MachineStatus) {
        self.count_network_errors(assessed, desired);
        let observed = assessed.observed();
        let key = observed.id.key();
        let previous = observed.machine.status.as_ref();
        let has_never_had_vm = observed.vm.is_none() && previous.is_none_or(|status| status.vm_name.is_none());
        let mut starting = self.starting.lock();
        if has_never_had_vm && !observed.is_deleting() {
            starting.insert(key);
        } else if observed.is_deleting() || desired.phase == Some(MachinePhase::Stopped) {
            starting.remove(&key);
        } else if desired.phase == Some(MachinePhase::Running) && starting.remove(&key) {
            let created = observed.machine.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
            self.time_to_running.observe(seconds_since(created, observed.now));
        }
    }

    /// Counts once when the networks become the reason why the Machine is not ready, and again when that reason or its
    /// message changes. A network that is still being configured is not an error. The label names only the networks at
    /// fault.
    fn count_network_errors(&self, assessed: &Assessed, desired: &MachineStatus) {
        let observed = assessed.observed();
        let network_error = |status: &MachineStatus| {
            let ready = status.conditions.iter().find(|have| have.type_ == condition_type::READY);
            let about_networks = ready.filter(|ready| NETWORK_REASONS.contains(&ready.reason.as_str()));
            about_networks.map(|ready| (ready.reason.clone(), ready.message.clone()))
        };
        let now = network_error(desired);
        if now.is_none() || now == observed.machine.status.as_ref().and_then(network_error) {
            return;
        }
        let mut at_fault = assessed.assessment().networks_at_fault();
        at_fault.retain(|name| observed.networks.contains_key(name));
        if at_fault.is_empty() {
            at_fault.push(UNKNOWN.to_owned());
        }
        for network_name in at_fault {
            self.network_errors.get_or_create(&NetworkLabel { network_name }).inc();
        }
    }
}

fn seconds_since(second: i64, now: Timestamp) -> f64 {
    let past = Timestamp::from_second(second).unwrap_or(now);
    now.duration_since(past).as_secs_f64().max(0.0)
}

/// Counts an object under its new labels, and no longer under its old ones.
fn move_count<K: Ord>(counts: &mut BTreeMap<K, i64>, old: Option<K>, new: Option<K>) {
    if let Some(new) = new {
        *counts.entry(new).or_default() += 1;
    }
    if let Some(count) = old.and_then(|old| counts.get_mut(&old)) {
        *count -= 1;
    }
}

impl fmt::Debug for ObjectCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ObjectCounts")
    }
}

impl Collector for ObjectCounts {
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
        let help = "Longest time that a Machine has been Pending, Creating or Deleting, as this replica observed it";
        let mut waits = encoder.encode_descriptor("machine_waiting_seconds", help, None, MetricType::Gauge)?;
        let now = Instant::now();
        for state in WaitState::ALL {
            let label = StateLabel { state: state.as_str() };
            ConstGauge::new(self.longest_wait(state, now)).encode(waits.encode_family(&label)?)?;
        }
        let orphaned: Gauge = Gauge::default();
        orphaned.set(i64::try_from(self.orphaned_pvcs()).unwrap_or(i64::MAX));
        let help = "PVCs that were not retained, and whose Machines no longer exist";
        orphaned.encode(encoder.encode_descriptor("orphaned_pvcs", help, None, MetricType::Gauge)?)?;
        let vms = Family::<StatusLabel, Gauge>::default();
        let counts = self.vms.lock();
        let statuses = PrintableStatus::ALL.iter().map(|status| status.as_str());
        for status in statuses.filter(|status| counts.contains_key(status)) {
            vms.get_or_create(&StatusLabel { status }).set(counts.get(status).copied().unwrap_or_default());
        }
        let help = "VirtualMachines of Machines, by KubeVirt's printableStatus";
        vms.encode(encoder.encode_descriptor("virtual_machines_total", help, None, MetricType::Gauge)?)
    }
}

/// Every metric of kubevirt-operator as OpenMetrics, with at least one series of each.
pub fn metric_samples() -> Result<String, fmt::Error> {
    let metrics = Metrics::new(PREFIX);
    let own = MachineMetrics::register(&metrics);
    own.set_leads(true);
    own.counts.machines.lock().insert(MachineLabels { phase: "", template: "" }, 0);
    own.counts.vms.lock().insert(PrintableStatus::Running.as_str(), 0);
    own.provisioning.get_or_create(&StorageClassLabel { storage_class: String::new() }).observe(0.0);
    own.network_errors.get_or_create(&NetworkLabel { network_name: String::new() }).inc();
    metrics.encode_samples()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use vitivirt_api::{Outcome, Stop};
    use vitivirt_machine::{Observed, observed::NetworkView};

    use super::*;

    /// A Machine on these networks, in a cluster that has a valid network `good` and an invalid network `bad`.
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

    fn interfaces_on(names: &[&str]) -> Value {
        let interface = |(index, name)| {
            let mac = format!("02:00:00:00:00:0{index}");
            json!({"name": format!("i{index}"), "networkName": name, "macAddress": mac})
        };
        names.iter().enumerate().map(interface).collect()
    }

    fn reported_status(assessed: &Assessed) -> MachineStatus {
        let plan = vitivirt_machine::plan(assessed).unwrap();
        let report = vitivirt_machine::report(assessed, &plan, &Outcome { stop: Stop::Done, written: 0 });
        report.status.unwrap().desired
    }

    /// The counted errors of each network after one reconcile.
    fn counted_errors(observed: &Observed) -> Vec<String> {
        let metrics = Metrics::new("t");
        let own = MachineMetrics::register(&metrics);
        let assessed = Assessed::new(observed.clone());
        own.record_report(&assessed, &reported_status(&assessed));
        let text = metrics.encode().unwrap();
        let lines =
            text.lines().filter_map(|line| line.strip_prefix("t_network_configuration_errors_total{network_name="));
        let mut lines: Vec<String> = lines.map(str::to_owned).collect();
        lines.sort();
        lines
    }

    #[test]
    fn an_error_is_counted_for_the_network_at_fault_only() {
        assert_eq!(counted_errors(&observed(&interfaces_on(&["good", "bad"]))), ["\"bad\"} 1"]);
        assert_eq!(
            counted_errors(&observed(&interfaces_on(&["good", "missing"]))),
            ["\"unknown\"} 1"],
            "only a network that exists is a label"
        );
        let mut taken = observed(&interfaces_on(&["good", "other"]));
        taken.networks.insert("other".to_owned(), taken.networks["good"].clone());
        taken.macs_in_use.insert(("other".to_owned(), "02:00:00:00:00:01".to_owned()), "older".to_owned());
        assert_eq!(counted_errors(&taken), ["\"other\"} 1"]);
    }

    #[test]
    fn a_mac_address_in_use_on_the_pod_network_is_counted_as_unknown() {
        let mut taken = observed(&interfaces_on(&["pod"]));
        taken.macs_in_use.insert(("pod".to_owned(), "02:00:00:00:00:00".to_owned()), "older".to_owned());
        assert_eq!(counted_errors(&taken), ["\"unknown\"} 1"]);
        let mut taken = observed(&interfaces_on(&["pod", "good"]));
        taken.macs_in_use.insert(("pod".to_owned(), "02:00:00:00:00:00".to_owned()), "older".to_owned());
        assert_eq!(counted_errors(&taken), ["\"unknown\"} 1"], "the other network is valid");
    }

    #[test]
    fn a_deleted_network_and_a_deleted_machine_leave_nothing_behind() {
        let metrics = Metrics::new("t");
        let own = MachineMetrics::register(&metrics);
        let bad = Assessed::new(observed(&interfaces_on(&["bad"])));
        own.record_report(&bad, &reported_status(&bad));
        let is_exported = || metrics.encode().unwrap().contains("network_name=\"bad\"");
        assert!(is_exported() && own.starting.lock().len() == 1);
        own.network_deleted("bad");
        own.machine_changed(&bad.observed().id.key(), None, None);
        assert!(!is_exported() && own.starting.lock().is_empty());
    }

    #[test]
    fn the_longest_wait_ends_when_the_state_changes() {
        use WaitState::{Creating, Deleting};
        let counts = ObjectCounts::default();
        let (first, second) = (ObjectKey::namespaced("shop", "a"), ObjectKey::namespaced("shop", "b"));
        let begin = Instant::now();
        let at = |seconds| begin + std::time::Duration::from_secs(seconds);
        let waits = |seconds| [Creating, Deleting].map(|state| counts.longest_wait(state, at(seconds)).to_string());
        counts.set_waiting(&first, Some(Creating), at(0));
        counts.set_waiting(&second, Some(Creating), at(60));
        counts.set_waiting(&first, Some(Creating), at(70));
        assert_eq!(waits(90), ["90", "0"]);
        counts.set_waiting(&first, Some(Deleting), at(90));
        assert_eq!(waits(95), ["35", "5"]);
        counts.set_waiting(&first, None, at(95));
        counts.set_waiting(&second, None, at(95));
        assert_eq!(waits(99), ["0", "0"]);
    }

    #[test]
    fn without_multus_an_error_is_counted_for_every_network() {
        let mut without = observed(&interfaces_on(&["good", "other"]));
        without.networks.insert("other".to_owned(), without.networks["good"].clone());
        without.installed.multus = false;
        assert_eq!(counted_errors(&without), ["\"good\"} 1", "\"other\"} 1"]);
    }
}
