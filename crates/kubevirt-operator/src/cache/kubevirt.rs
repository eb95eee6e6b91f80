//! The cached part of a VirtualMachine and its VirtualMachineInstance: what the plan compares and what the status
//! shows. It has size limits, because the guest decides some of it.

#![expect(clippy::needless_pass_by_value, reason = "a cache passes the object that it received")]

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta},
    jiff::Timestamp,
};
use kube::core::DynamicObject;
use serde_json::Value;
use vitivirt_api::{
    machine::{Adoption, MANAGED_BY, POD_NETWORK, PrintableStatus, VmiPhase},
    text::truncate,
};
use vitivirt_machine::{
    Observed,
    observed::{VmView, VmiView},
    render::{cloud_init::secret_name, vm::without_defaults},
    vmi_spec::{comparable_spec, references_secret},
};
use vitivirt_runtime::watch::{Entry, Uid, controller_uid};

use super::{
    compact::{CompressedJson, Labels},
    owned::{controller_index, creation_seconds, has_owners},
};
use crate::mac_addresses::{MachineInterface, mac_number};

const MESSAGE_LIMIT: usize = 1024;
const NAME_LIMIT: usize = 253;
/// More than the VMI of a Machine needs. A larger spec belongs to another owner and is not cached.
const SPEC_LIMIT: usize = 16 * 1024;
/// The same for a VM. Anyone can give a VM the operator's label.
const VM_SPEC_LIMIT: usize = 64 * 1024;
const MAX_ADDRESSES: usize = 32;
const MAX_MANAGERS: usize = 4;
const MAX_VOLUMES: usize = 64;
const NEEDS_RECOVERY: &str = "ManualRecoveryRequired";
const ADDRESS_LIMIT: usize = 64;
const VM_GENERATION: &str = "kubevirt.io/vm-generation";

#[derive(Debug, PartialEq)]
pub(crate) struct VmEntry {
    controller_uid: Option<Uid>,
    controller_index: u8,
    has_owners: bool,
    labels: Labels,
    generation: i64,
    spec: CompressedJson,
    deleting: bool,
    pub(crate) status: PrintableStatus,
    ready: bool,
    restoring: bool,
    /// The PVCs that have the data while KubeVirt migrates volumes, by volume.
    migration_sources: Box<[(Box<str>, Box<str>)]>,
    needs_recovery: bool,
    restart_required: bool,
    failure: Option<Box<str>>,
    other_managers: Box<[Box<str>]>,
    pub(crate) interfaces: Box<[MachineInterface]>,
}

impl VmEntry {
    pub(crate) fn project(mut vm: DynamicObject) -> Self {
        let spec = without_defaults(vm.data.get_mut("spec").map(Value::take).unwrap_or_default());
        let status = vm.data.get("status").unwrap_or(&Value::Null);
        Self {
            controller_uid: controller_uid(&vm.metadata),
            controller_index: controller_index(&vm.metadata),
            has_owners: has_owners(&vm.metadata),
            labels: Labels::from_metadata(&vm.metadata),
            generation: vm.metadata.generation.unwrap_or_default(),
            interfaces: interfaces(spec.pointer("/template/spec").unwrap_or(&Value::Null)),
            spec: CompressedJson::from_value(&spec).empty_if_longer_than(VM_SPEC_LIMIT),
            deleting: vm.metadata.deletion_timestamp.is_some(),
            status: string_at(status, "/printableStatus").unwrap_or_default().into(),
            ready: status.get("ready") == Some(&Value::Bool(true)),
            restoring: string_at(status, "/restoreInProgress").is_some_and(|name| !name.is_empty()),
            migration_sources: migration_sources(status),
            needs_recovery: condition(status, NEEDS_RECOVERY, "True").is_some(),
            restart_required: condition(status, "RestartRequired", "True").is_some(),
            failure: condition(status, "Failure", "True").map(message),
            other_managers: other_managers(&vm.metadata),
        }
    }

    pub(crate) fn view(entry: &Entry<Self>) -> VmView {
        let vm = &entry.value;
        VmView {
            uid: entry.uid.to_string(),
            generation: vm.generation,
            controller_uid: vm.controller_uid.as_ref().map(Uid::to_string),
            controller_index: vm.controller_index.into(),
            has_owners: vm.has_owners,
            labels: vm.labels.to_map(),
            spec: vm.spec.read().unwrap_or_default(),
            deleting: vm.deleting,
            printable_status: vm.status,
            ready: vm.ready,
            restoring: vm.restoring,
            migration_sources: vm
                .migration_sources
                .iter()
                .map(|(volume, pvc)| (volume.to_string(), pvc.to_string()))
                .collect(),
            needs_recovery: vm.needs_recovery,
            restart_required: vm.restart_required,
            failure: vm.failure.as_deref().map(str::to_owned),
            other_managers: vm.other_managers.iter().map(ToString::to_string).collect(),
        }
    }

    /// Whether the change is only from one transitional status to another, so that the reconcile can be delayed. For a
    /// Machine that is being created, a stopped VM is a VM that will be started.
    pub(crate) fn is_intermediate(&self, newer: &Self, is_creating: bool) -> bool {
        let is_transitional =
            |entry: &Self| is_transitional(entry.status) || (is_creating && entry.status == PrintableStatus::Stopped);
        let same_state = self.status == newer.status || (is_transitional(self) && is_transitional(newer));
        let drift =
            self.spec != newer.spec || self.labels != newer.labels || self.controller_uid != newer.controller_uid;
        same_state
            && !drift
            && self.deleting == newer.deleting
            && self.restart_required == newer.restart_required
            && self.restoring == newer.restoring
            && self.migration_sources == newer.migration_sources
            && self.needs_recovery == newer.needs_recovery
            && self.failure == newer.failure
    }
}

/// The field managers other than this operator that own a field of the spec. They name the client that undoes repairs.
fn other_managers(metadata: &ObjectMeta) -> Box<[Box<str>]> {
    let owns_spec =
        |fields: &ManagedFieldsEntry| fields.fields_v1.as_ref().is_some_and(|fields| fields.0.get("f:spec").is_some());
    let entries = metadata.managed_fields.iter().flatten().filter(|entry| owns_spec(entry));
    let mut managers: Vec<&str> =
        entries.filter_map(|entry| entry.manager.as_deref()).filter(|manager| *manager != MANAGED_BY).collect();
    managers.sort_unstable();
    managers.dedup();
    managers.into_iter().take(MAX_MANAGERS).map(|manager| truncate(manager, NAME_LIMIT).into()).collect()
}

/// KubeVirt keeps the list after a migration that succeeded. Then the VM has neither condition.
fn migration_sources(status: &Value) -> Box<[(Box<str>, Box<str>)]> {
    if condition(status, "VolumesChange", "True").or_else(|| condition(status, NEEDS_RECOVERY, "True")).is_none() {
        return Box::default();
    }
    let migrated = status.pointer("/volumeUpdateState/volumeMigrationState/migratedVolumes").and_then(Value::as_array);
    let sources = migrated.into_iter().flatten().filter_map(|volume| {
        let pvc = string_at(volume, "/sourcePVCInfo/claimName")?;
        Some((truncate(string_at(volume, "/volumeName")?, NAME_LIMIT).into(), truncate(pvc, NAME_LIMIT).into()))
    });
    sources.take(MAX_VOLUMES).collect()
}

/// The interfaces of a VMI's spec, or of a VM's template, with their MAC addresses.
fn interfaces(spec: &Value) -> Box<[MachineInterface]> {
    let network = |name: &str| {
        let network = array_items(spec, "networks").find(|network| string_at(network, "/name") == Some(name))?;
        let configuration = string_at(network, "/multus/networkName").map(|name| truncate(name, NAME_LIMIT).into());
        configuration.or_else(|| network.get("pod").map(|_| POD_NETWORK.into()))
    };
    let devices = spec.pointer("/domain/devices").unwrap_or(&Value::Null);
    let interfaces = array_items(devices, "interfaces").filter_map(|interface| {
        let mac = mac_number(string_at(interface, "/macAddress")?);
        Some(MachineInterface { network: network(string_at(interface, "/name")?)?, mac })
    });
    interfaces.take(MAX_ADDRESSES).collect()
}

/// Whether another status follows without a change of the VM.
fn is_transitional(status: PrintableStatus) -> bool {
    use PrintableStatus as Is;
    matches!(
        status,
        Is::Unset | Is::Provisioning | Is::Starting | Is::Stopping | Is::WaitingForVolumeBinding | Is::Unknown
    )
}

#[derive(Debug, PartialEq)]
pub(crate) struct VmiEntry {
    phase: VmiPhase,
    node: Option<Box<str>>,
    addresses: Box<[Box<str>]>,
    paused: bool,
    not_ready: Option<Box<str>>,
    migrating: bool,
    vm_generation: Option<i64>,
    spec: CompressedJson,
    needs_user_data: bool,
    /// The UUID of the guest, which was the identity of its Machine when it started.
    guest: Option<Uid>,
    controller: Option<Uid>,
    unschedulable: Option<Box<str>>,
    failure: Option<Box<str>>,
    deleting: bool,
    /// In seconds since 1970.
    created: i64,
    /// The start of its last complete migration, in seconds since 1970.
    migrated: Option<i64>,
    /// None, if its guest has ended.
    pub(crate) interfaces: Box<[MachineInterface]>,
}

impl VmiEntry {
    pub(crate) fn project(vmi: DynamicObject) -> Self {
        let part = |name: &str| vmi.data.get(name).unwrap_or(&Value::Null);
        let (spec, status) = (part("spec"), part("status"));
        let unschedulable = condition(status, "PodScheduled", "False")
            .filter(|condition| string_at(condition, "/reason") == Some("Unschedulable"));
        let phase = string_at(status, "/phase").unwrap_or_default().into();
        let has_ended = matches!(phase, VmiPhase::Succeeded | VmiPhase::Failed);
        Self {
            phase,
            interfaces: if has_ended { Box::default() } else { interfaces(spec) },
            node: string_at(status, "/nodeName")
                .filter(|node| !node.is_empty())
                .map(|node| truncate(node, NAME_LIMIT).into()),
            addresses: addresses(status),
            paused: condition(status, "Paused", "True").is_some(),
            not_ready: not_ready(status),
            migrating: is_migrating(status),
            vm_generation: vm_generation(&vmi.metadata),
            spec: CompressedJson::from_value(&comparable_spec(spec)).empty_if_longer_than(SPEC_LIMIT),
            needs_user_data: references_secret(spec, &secret_name(vmi.metadata.name.as_deref().unwrap_or_default())),
            guest: string_at(spec, "/domain/firmware/uuid").map(Uid::from),
            controller: controller_uid(&vmi.metadata),
            unschedulable: unschedulable.map(message),
            failure: condition(status, "Synchronized", "False").map(message),
            deleting: vmi.metadata.deletion_timestamp.is_some(),
            created: creation_seconds(&vmi.metadata),
            migrated: migrated(status),
        }
    }

    /// The view of an object that was read from the API server.
    pub(crate) fn live_view(entry: &Entry<Self>) -> VmiView {
        VmiView { live_version: Some(entry.resource_version.to_string()), ..Self::view(entry) }
    }

    pub(crate) fn view(entry: &Entry<Self>) -> VmiView {
        let vmi = &entry.value;
        let owned = |text: &Option<Box<str>>| text.as_deref().map(str::to_owned);
        VmiView {
            uid: entry.uid.to_string(),
            live_version: None,
            phase: vmi.phase,
            node: owned(&vmi.node),
            addresses: vmi.addresses.iter().map(ToString::to_string).collect(),
            paused: vmi.paused,
            not_ready: owned(&vmi.not_ready),
            migrating: vmi.migrating,
            vm_generation: vmi.vm_generation,
            spec: vmi.spec.read().unwrap_or_default(),
            needs_user_data: vmi.needs_user_data,
            unschedulable: owned(&vmi.unschedulable),
            failure: owned(&vmi.failure),
            deleting: vmi.deleting,
            created: vmi.created,
            connected_since: vmi.migrated.unwrap_or_default().max(vmi.created),
        }
    }

    /// Whether the VMI was started for this Machine, and not for another one of the same name: by its VM, or with its UUID.
    /// The UUID is the identity that the Machine had when the guest started: its UID, or one that it adopted. A VMI without
    /// one that no VM controls was created by another client, and must not block the deletion of the Machine.
    pub(crate) fn belongs_to(&self, observed: &Observed) -> bool {
        let is_of_vm = |vm: &VmView| self.controller.as_ref() == Some(&Uid::from(vm.uid.as_str()));
        if observed.own_vm().is_some_and(is_of_vm) {
            return true;
        }
        let Some(guest) = &self.guest else { return self.controller.is_some() };
        let adoption = Adoption::from_metadata(&observed.machine.metadata);
        let mut identities = std::iter::once(observed.uid()).chain(adoption.machines());
        identities.any(|identity| *guest == Uid::from(identity))
    }

    /// Whether the VMI is starting before and after the change: then the change does not affect whether the Machine is
    /// ready.
    pub(crate) fn is_intermediate(&self, newer: &Self) -> bool {
        let is_starting = |entry: &Self| match entry.phase {
            VmiPhase::Unset
            | VmiPhase::Pending
            | VmiPhase::Scheduling
            | VmiPhase::Scheduled
            | VmiPhase::WaitingForSync
            | VmiPhase::Unknown => true,
            VmiPhase::Running | VmiPhase::Succeeded | VmiPhase::Failed => false,
        };
        is_starting(self)
            && is_starting(newer)
            && self.deleting == newer.deleting
            && self.failure.is_some() == newer.failure.is_some()
            && self.unschedulable.is_some() == newer.unschedulable.is_some()
    }
}

fn string_at<'a>(value: &'a Value, pointer: &str) -> Option<&'a str> {
    value.pointer(pointer).and_then(Value::as_str)
}

fn array_items<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value.get(key).and_then(Value::as_array).into_iter().flatten()
}

fn condition<'a>(status: &'a Value, type_: &str, expected: &str) -> Option<&'a Value> {
    array_items(status, "conditions").find(|condition| {
        string_at(condition, "/type") == Some(type_) && string_at(condition, "/status") == Some(expected)
    })
}

fn message(condition: &Value) -> Box<str> {
    let message =
        string_at(condition, "/message").filter(|message| !message.is_empty()).or(string_at(condition, "/reason"));
    truncate(message.unwrap_or_default(), MESSAGE_LIMIT).into()
}

/// The addresses of all interfaces, in order, without duplicates. The guest agent may report anything, so their number
/// and length have limits.
fn addresses(status: &Value) -> Box<[Box<str>]> {
    let mut all: Vec<Box<str>> = Vec::new();
    for interface in array_items(status, "interfaces") {
        let first = interface.get("ipAddress").into_iter();
        for address in first.chain(array_items(interface, "ipAddresses")).filter_map(Value::as_str) {
            let is_valid = !address.is_empty() && address.len() <= ADDRESS_LIMIT;
            if all.len() < MAX_ADDRESSES && is_valid && !all.iter().any(|known| **known == *address) {
                all.push(address.into());
            }
        }
    }
    all.into()
}

/// Why the VMI is not ready. While its guest is starting, the phase says so, and virt-controller updates the condition
/// later than the phase.
fn not_ready(status: &Value) -> Option<Box<str>> {
    let condition = condition(status, "Ready", "False")?;
    (string_at(condition, "/reason") != Some("GuestNotRunning")).then(|| message(condition))
}

fn is_migrating(status: &Value) -> bool {
    let flag = |state: &Value, name: &str| state.get(name) == Some(&Value::Bool(true));
    let state = status.get("migrationState").filter(|state| state.is_object());
    state.is_some_and(|state| {
        state.get("startTimestamp").is_some() && !flag(state, "completed") && !flag(state, "failed")
    })
}

fn migrated(status: &Value) -> Option<i64> {
    let state = status.get("migrationState")?;
    let flag = |name: &str| state.get(name) == Some(&Value::Bool(true));
    let started = string_at(state, "/startTimestamp").filter(|_| flag("completed") && !flag("failed"))?;
    started.parse::<Timestamp>().ok().map(Timestamp::as_second)
}

fn vm_generation(metadata: &ObjectMeta) -> Option<i64> {
    metadata.annotations.as_ref()?.get(VM_GENERATION)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(data: Value) -> DynamicObject {
        let mut whole = json!({"apiVersion": "kubevirt.io/v1", "kind": "X", "metadata": {"name": "vm"}});
        whole.as_object_mut().unwrap().extend(data.as_object().unwrap().clone());
        serde_json::from_value(whole).unwrap()
    }

    #[test]
    fn a_cached_vmi_has_a_size_limit() {
        let many: Vec<Value> =
            (0..100).map(|n| json!({"ipAddress": format!("10.0.0.{n}"), "ipAddresses": ["x".repeat(1000)]})).collect();
        let entry = VmiEntry::project(object(json!({"status": {
            "phase": "Running", "interfaces": many,
            "conditions": [{"type": "Synchronized", "status": "False", "message": "ø".repeat(5000)}],
        }})));
        assert_eq!(entry.addresses.len(), MAX_ADDRESSES);
        assert!(entry.addresses.iter().all(|address| address.len() <= ADDRESS_LIMIT));
        assert!(entry.failure.unwrap().len() <= MESSAGE_LIMIT);
        let noise: String = (0..100_000_u64).map(|n| format!("{:x}", n.wrapping_mul(0x9E37_79B9_7F4A_7C15))).collect();
        let entry = VmiEntry::project(object(json!({"spec": {"volumes": [{"name": noise}]}})));
        assert_eq!(entry.spec, CompressedJson::default());
    }

    /// The cache holds ten thousand of them.
    #[test]
    fn the_cached_spec_of_a_vmi_is_small() {
        let machine: vitivirt_api::machine::Machine = serde_json::from_value(json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "web-server-0001", "namespace": "shop", "uid": "5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11"},
            "spec": {"template": "medium", "cloudInit": {"userData": "#cloud-config"}},
        }))
        .unwrap();
        let spec = json!(vitivirt_machine::render::vm::spec(&vitivirt_machine::resolve::resolve(&machine).unwrap()));
        let vmi = VmiEntry::project(object(json!({"spec": spec.pointer("/template/spec").unwrap()})));
        let size = vmi.spec.len();
        assert!(size < 300, "{size} bytes");
    }

    #[test]
    fn a_change_to_running_is_not_intermediate_and_a_change_to_scheduling_is() {
        let vmi = |phase: &str| VmiEntry::project(object(json!({"status": {"phase": phase}})));
        assert!(vmi("Pending").is_intermediate(&vmi("Scheduling")));
        assert!(!vmi("Scheduled").is_intermediate(&vmi("Running")));
        assert!(!vmi("Running").is_intermediate(&vmi("Failed")));
        let vm = |status: &str, cores: u32| {
            VmEntry::project(object(json!({"spec": {"cores": cores}, "status": {"printableStatus": status}})))
        };
        for is_creating in [true, false] {
            assert!(vm("Provisioning", 1).is_intermediate(&vm("Starting", 1), is_creating));
            assert!(!vm("Starting", 1).is_intermediate(&vm("Running", 1), is_creating));
            assert!(!vm("Starting", 1).is_intermediate(&vm("Starting", 2), is_creating));
            assert!(!vm("Starting", 1).is_intermediate(&vm("CrashLoopBackOff", 1), is_creating));
            assert_eq!(vm("Stopped", 1).is_intermediate(&vm("Starting", 1), is_creating), is_creating);
        }
    }

    /// The guest of a Machine that adopts another one while it runs has its UID, and gets the other one at its next start.
    #[test]
    fn a_vmi_belongs_to_the_machine_whose_vm_or_uid_it_has() {
        let (uid, earlier) = ("5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11", "11111111-52a5-4a7c-9d38-2f1f0f6f3d11");
        let (second, other) = ("22222222-52a5-4a7c-9d38-2f1f0f6f3d11", "33333333-52a5-4a7c-9d38-2f1f0f6f3d11");
        let machine = json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {
                "name": "vm", "namespace": "ns", "uid": uid,
                "annotations": {"vitistack.io/adopt": format!("{earlier},{second}")},
            },
            "spec": {"template": "small"},
        });
        let mut observed = Observed::new(serde_json::from_value(machine).unwrap(), Timestamp::UNIX_EPOCH).unwrap();
        let owner = |kind: &str, uid: &str| json!([{"apiVersion": "v1", "kind": kind, "name": "vm", "uid": uid, "controller": true}]);
        let vm = object(json!({"metadata": {"name": "vm", "ownerReferences": owner("Machine", uid)}}));
        observed.vm = Some(VmEntry::view(&Entry {
            uid: "own-vm".into(),
            resource_version: "1".into(),
            value: std::sync::Arc::new(VmEntry::project(vm)),
        }));
        for (guest, controller, expected) in [
            (Some(uid), None, true),
            (Some(earlier), None, true),
            (Some(second), None, true),
            (Some(other), None, false),
            (Some(other), Some("another-vm"), false),
            (Some(other), Some("own-vm"), true),
            (None, Some("another-vm"), true),
            (None, None, false),
        ] {
            let owners = controller.map_or(json!([]), |controller| owner("VirtualMachine", controller));
            let vmi = VmiEntry::project(object(json!({
                "metadata": {"name": "vm", "ownerReferences": owners},
                "spec": {"domain": {"firmware": guest.map(|uuid| json!({"uuid": uuid}))}},
            })));
            assert_eq!(vmi.belongs_to(&observed), expected, "{guest:?} {controller:?}");
        }
    }

    #[test]
    fn malformed_objects_are_readable() {
        let entry =
            VmEntry::project(object(json!({"spec": 7, "status": {"printableStatus": 1, "conditions": "none"}})));
        assert_eq!(entry.status, PrintableStatus::Unset);
        let entry = VmiEntry::project(object(
            json!({"status": {"phase": "Dreaming", "interfaces": {"a": 1}, "migrationState": "x"}}),
        ));
        assert_eq!((entry.phase, entry.migrating), (VmiPhase::Unknown, false));
    }
}
