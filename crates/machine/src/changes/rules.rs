//! The table of all fields of a Machine: the effect of a change, the reason, and the fields of the VM that are derived
//! from it.

use serde::Serialize;
use vitivirt_api::machine::CLOUD_INIT_DISK;

/// When a change takes effect in a running guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Effect {
    /// Immediately.
    Live,
    /// Immediately if KubeVirt can hotplug it, else at the next start.
    LiveIfPossible,
    /// At the next start of the guest.
    Restart,
    /// Never: the change is rejected.
    Refused,
}

/// The kind of a change of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Any,
    Added,
    Removed,
    Grows,
    Shrinks,
}

/// One row: the effect of one kind of change of one field.
#[derive(Debug, PartialEq, Eq)]
pub struct ChangeRule {
    /// A field of the Machine. `[]` stands for an item of a list.
    pub field: &'static str,
    pub change: ChangeKind,
    pub effect: Effect,
    pub why: &'static str,
}

const fn rule(field: &'static str, change: ChangeKind, effect: Effect, why: &'static str) -> ChangeRule {
    ChangeRule { field, change, effect, why }
}

/// Not a row, because it depends on the StorageClass.
pub(crate) const NO_EXPANSION: &str = "the StorageClass does not allow expansion";
const HARDWARE: &str = "the guest's hardware changes only when the guest starts";
const IMMUTABLE_PVC: &str = "the field is immutable in a PVC";
const CLOUD_INIT: &str = "the operator updates the Secret immediately; the guest reads it when it starts";

pub const RULES: &[ChangeRule] = &[
    rule(
        "spec.resources.cpu",
        ChangeKind::Any,
        Effect::Restart,
        "with more than one CPU, each virtio interface has one queue per CPU, and queues cannot be added or removed \
         while the guest runs",
    ),
    rule("spec.resources.cpu.cores", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.resources.cpu.threads", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule(
        "spec.resources.cpu.sockets",
        ChangeKind::Grows,
        Effect::LiveIfPossible,
        "KubeVirt hotplugs sockets, up to a limit that is set when the guest starts",
    ),
    rule(
        "spec.resources.cpu.sockets",
        ChangeKind::Any,
        Effect::Restart,
        "KubeVirt does not remove sockets from a running guest",
    ),
    rule(
        "spec.resources.memory.size",
        ChangeKind::Any,
        Effect::LiveIfPossible,
        "KubeVirt hotplugs memory if the guest can be live-migrated, up to a limit and never below the size \
         with which the guest started",
    ),
    rule(
        "spec.disks[]",
        ChangeKind::Added,
        Effect::Restart,
        "the PVC is created immediately; the disk is attached when the guest starts",
    ),
    rule(
        "spec.disks[]",
        ChangeKind::Removed,
        Effect::Restart,
        "the disk is detached when the guest starts; its PVC stays until the Machine is deleted",
    ),
    rule("spec.disks[].type", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.disks[].size", ChangeKind::Shrinks, Effect::Refused, "a volume cannot shrink"),
    rule(
        "spec.disks[].size",
        ChangeKind::Any,
        Effect::Live,
        "the PVC is expanded immediately if its StorageClass allows it; whether the guest sees it before its next start depends on the storage and on KubeVirt's feature gate ExpandDisks",
    ),
    rule("spec.disks[].storageClass", ChangeKind::Any, Effect::Refused, "a PVC cannot move to another StorageClass"),
    rule("spec.disks[].accessMode", ChangeKind::Any, Effect::Refused, IMMUTABLE_PVC),
    rule("spec.disks[].volumeMode", ChangeKind::Any, Effect::Refused, IMMUTABLE_PVC),
    rule(
        "spec.disks[].source",
        ChangeKind::Any,
        Effect::Refused,
        "a volume is populated only once, when it is created",
    ),
    rule(
        "spec.disks[].source.containerDisk",
        ChangeKind::Any,
        Effect::Restart,
        "the image is pulled when the guest starts",
    ),
    rule(
        "spec.disks[].onDelete",
        ChangeKind::Any,
        Effect::Live,
        "it is stored as a label of the PVC, which the operator reads when the Machine is deleted",
    ),
    rule(
        "spec.networks[]",
        ChangeKind::Added,
        Effect::LiveIfPossible,
        "KubeVirt hotplugs an interface on a bridge by migrating the guest; it cannot hotplug one on the pod network",
    ),
    rule("spec.networks[]", ChangeKind::Removed, Effect::Restart, "the interface is removed when the guest starts"),
    rule(
        "spec.networks[].networkName",
        ChangeKind::Any,
        Effect::Restart,
        "an interface is connected to its network when the guest's pod is created",
    ),
    rule("spec.networks[].model", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.networks[].macAddress", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.bootOrder", ChangeKind::Any, Effect::Restart, "the firmware reads it when the guest starts"),
    rule(
        "spec.cloudInit",
        ChangeKind::Any,
        Effect::Restart,
        "the operator updates the Secret immediately, or deletes it when no guest uses it; the guest reads it when it starts",
    ),
    rule("spec.cloudInit.userData", ChangeKind::Any, Effect::Restart, CLOUD_INIT),
    rule("spec.cloudInit.networkData", ChangeKind::Any, Effect::Restart, CLOUD_INIT),
    rule("spec.cloudInit.secretRef", ChangeKind::Any, Effect::Restart, CLOUD_INIT),
    rule("spec.domain.machine.type", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.features.acpi", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.features.apic", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.features.hyperv", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.firmware.bootloader.efi", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.firmware.bootloader.secureBoot", ChangeKind::Any, Effect::Restart, HARDWARE),
    rule("spec.powerState", ChangeKind::Any, Effect::Live, "KubeVirt starts the guest or shuts it down"),
    rule(
        "spec.template",
        ChangeKind::Any,
        Effect::LiveIfPossible,
        "it sets CPU, memory and the root disk; each of them has its own rule",
    ),
    rule(
        "metadata.labels",
        ChangeKind::Any,
        Effect::Restart,
        "the operator copies cluster.vitistack.io/cluster-name and no other label: to the VMI and its pod at the next start, to \
         the other objects immediately",
    ),
    rule(
        "metadata.finalizers",
        ChangeKind::Any,
        Effect::Live,
        "it keeps the object until the objects created for it are deleted",
    ),
];

/// Fields of the VM and the field of the Machine that each is derived from. The first match counts.
const DERIVED: &[(&str, &str)] = &[
    ("spec.runStrategy", "spec.powerState"),
    ("spec.template.metadata.labels", "metadata.labels"),
    ("spec.template.spec.domain.cpu.cores", "spec.resources.cpu.cores"),
    ("spec.template.spec.domain.cpu.threads", "spec.resources.cpu.threads"),
    ("spec.template.spec.domain.cpu.sockets", "spec.resources.cpu.sockets"),
    ("spec.template.spec.domain.memory", "spec.resources.memory.size"),
    ("spec.template.spec.domain.devices.networkInterfaceMultiqueue", "spec.resources.cpu"),
    ("spec.template.spec.domain.devices.disks[].bootOrder", "spec.bootOrder"),
    ("spec.template.spec.domain.devices.disks[].disk.readonly", "spec.disks[].accessMode"),
    ("spec.template.spec.domain.devices.disks[].", "spec.disks[].type"),
    ("spec.template.spec.domain.devices.disks[]", "spec.disks[]"),
    ("spec.template.spec.domain.devices.interfaces[].bootOrder", "spec.bootOrder"),
    ("spec.template.spec.domain.devices.interfaces[].model", "spec.networks[].model"),
    ("spec.template.spec.domain.devices.interfaces[].macAddress", "spec.networks[].macAddress"),
    ("spec.template.spec.domain.devices.interfaces[].", "spec.networks[].networkName"),
    ("spec.template.spec.domain.devices.interfaces[]", "spec.networks[]"),
    ("spec.template.spec.domain.machine", "spec.domain.machine.type"),
    ("spec.template.spec.domain.features.acpi", "spec.domain.features.acpi"),
    ("spec.template.spec.domain.features.apic", "spec.domain.features.apic"),
    ("spec.template.spec.domain.features.smm", "spec.domain.firmware.bootloader.secureBoot"),
    ("spec.template.spec.domain.features", "spec.domain.features.hyperv"),
    ("spec.template.spec.domain.clock", "spec.domain.features.hyperv"),
    ("spec.template.spec.domain.firmware.bootloader.efi.", "spec.domain.firmware.bootloader.secureBoot"),
    ("spec.template.spec.domain.firmware.bootloader", "spec.domain.firmware.bootloader.efi"),
    ("spec.template.spec.networks[].", "spec.networks[].networkName"),
    ("spec.template.spec.networks[]", "spec.networks[]"),
    ("spec.template.spec.volumes[].", "spec.disks[].source.containerDisk"),
    ("spec.template.spec.volumes[]", "spec.disks[]"),
];

/// The rule for a change of a field. The field may name an item: `spec.disks[data].size`.
pub fn rule_of(field: &str, change: ChangeKind) -> Option<&'static ChangeRule> {
    let pattern = without_name(field);
    let rules = || RULES.iter().filter(|rule| rule.field == pattern);
    rules().find(|rule| rule.change == change).or_else(|| rules().find(|rule| rule.change == ChangeKind::Any))
}

/// The Machine's field that a field of the VM is derived from.
pub(super) fn machine_field(path: &str) -> Option<String> {
    let (name, pattern) = (item_name(path), without_name(path));
    if name == Some(CLOUD_INIT_DISK) {
        return Some("spec.cloudInit".to_owned());
    }
    let is_within = |field_prefix: &str| {
        let rest = pattern.strip_prefix(field_prefix);
        rest.is_some_and(|rest| rest.is_empty() || field_prefix.ends_with('.') || rest.starts_with(['.', '[']))
    };
    let (_, field) = DERIVED.iter().find(|(field_prefix, _)| is_within(field_prefix))?;
    Some(field.replace("[]", &format!("[{}]", name.unwrap_or_default())))
}

/// `data` of `spec.disks[data].size`.
fn item_name(path: &str) -> Option<&str> {
    path.split_once('[')?.1.split_once(']').map(|(name, _)| name)
}

/// `spec.disks[].size` of `spec.disks[data].size`.
fn without_name(path: &str) -> String {
    match path.split_once('[').and_then(|(head, rest)| Some((head, rest.split_once(']')?.1))) {
        Some((head, tail)) => format!("{head}[]{tail}"),
        None => path.to_owned(),
    }
}
