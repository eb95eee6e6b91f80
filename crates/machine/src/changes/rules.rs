//! The table: for each field of a Machine what becomes of a change and why, and where the field is found in what is made
//! of the Machine.

use serde::Serialize;
use vitivirt_api::machine::CLOUD_INIT_DISK;

/// When a change shows in a guest that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Effect {
    /// At once.
    Live,
    /// At once where KubeVirt can plug it in, else at the next start.
    LiveIfPossible,
    /// When the guest is started the next time.
    Restart,
    /// Never: what is there stays as it is.
    Refused,
}

/// Which change of a field is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Any,
    Added,
    Removed,
    Grows,
    Shrinks,
}

/// One row: what becomes of one kind of change of one field.
#[derive(Debug, PartialEq, Eq)]
pub struct Rule {
    /// A field of the Machine; `[]` stands for an element of a list, by its name.
    pub field: &'static str,
    pub change: Kind,
    pub effect: Effect,
    pub why: &'static str,
}

const fn rule(field: &'static str, change: Kind, effect: Effect, why: &'static str) -> Rule {
    Rule { field, change, effect, why }
}

/// Whether a PVC may grow is for its class to say, so no row can.
pub const NO_EXPANSION: &str = "its StorageClass does not allow expansion";
const HARDWARE: &str = "it is part of the hardware that a guest finds when it starts";
const CLAIM: &str = "a PVC keeps what it was made with";
const SEEDED: &str = "its Secret is written at once, and a guest is given it when it starts";

pub const RULES: &[Rule] = &[
    rule(
        "spec.resources.cpu",
        Kind::Any,
        Effect::Restart,
        "with a second CPU every virtio interface gets a queue per CPU, which is hardware",
    ),
    rule("spec.resources.cpu.cores", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.resources.cpu.threads", Kind::Any, Effect::Restart, HARDWARE),
    rule(
        "spec.resources.cpu.sockets",
        Kind::Grows,
        Effect::LiveIfPossible,
        "KubeVirt plugs sockets in, up to a limit that is set when the guest starts",
    ),
    rule("spec.resources.cpu.sockets", Kind::Any, Effect::Restart, "KubeVirt takes no socket out of a running guest"),
    rule(
        "spec.resources.memory.size",
        Kind::Any,
        Effect::LiveIfPossible,
        "KubeVirt plugs memory into a guest that can migrate, up to a limit and never below what it started with",
    ),
    rule(
        "spec.disks[]",
        Kind::Added,
        Effect::Restart,
        "its PVC is made at once, and a disk is attached when the guest starts",
    ),
    rule(
        "spec.disks[]",
        Kind::Removed,
        Effect::Restart,
        "a disk is detached when the guest starts, and its PVC stays until the Machine is deleted",
    ),
    rule("spec.disks[].type", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.disks[].size", Kind::Shrinks, Effect::Refused, "a volume cannot shrink"),
    rule(
        "spec.disks[].size",
        Kind::Any,
        Effect::Live,
        "the PVC is expanded at once if its StorageClass allows it; whether the guest sees it before its next start is up to the storage and KubeVirt's feature gate ExpandDisks",
    ),
    rule("spec.disks[].storageClass", Kind::Any, Effect::Refused, "a PVC cannot move to another StorageClass"),
    rule("spec.disks[].accessMode", Kind::Any, Effect::Refused, CLAIM),
    rule("spec.disks[].volumeMode", Kind::Any, Effect::Refused, CLAIM),
    rule("spec.disks[].source", Kind::Any, Effect::Refused, "a volume is filled once, when it is made"),
    rule("spec.disks[].source.containerDisk", Kind::Any, Effect::Restart, "an image is fetched when the guest starts"),
    rule(
        "spec.disks[].onDelete",
        Kind::Any,
        Effect::Live,
        "it is a label of the PVC, which is read when the Machine is deleted",
    ),
    rule(
        "spec.networks[]",
        Kind::Added,
        Effect::LiveIfPossible,
        "KubeVirt plugs in an interface on a bridge by a migration; one on the pod network it does not",
    ),
    rule(
        "spec.networks[]",
        Kind::Removed,
        Effect::Restart,
        "an interface that left the spec is taken out when the guest starts",
    ),
    rule(
        "spec.networks[].networkName",
        Kind::Any,
        Effect::Restart,
        "an interface is plugged into its network when the guest's pod is made",
    ),
    rule("spec.networks[].model", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.networks[].macAddress", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.bootOrder", Kind::Any, Effect::Restart, "it is read when the guest starts"),
    rule(
        "spec.cloudInit",
        Kind::Any,
        Effect::Restart,
        "its Secret is written at once, or deleted when no guest has it any more; a guest is given it when it starts",
    ),
    rule("spec.cloudInit.userData", Kind::Any, Effect::Restart, SEEDED),
    rule("spec.cloudInit.networkData", Kind::Any, Effect::Restart, SEEDED),
    rule("spec.cloudInit.secretRef", Kind::Any, Effect::Restart, SEEDED),
    rule("spec.domain.machine.type", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.features.acpi", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.features.apic", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.features.hyperv", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.firmware.bootloader.efi", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.domain.firmware.bootloader.secureBoot", Kind::Any, Effect::Restart, HARDWARE),
    rule("spec.powerState", Kind::Any, Effect::Live, "the guest is started or shut down"),
    rule(
        "spec.template",
        Kind::Any,
        Effect::LiveIfPossible,
        "it stands for cpu, memory and the root disk, and each of them changes by its own rule",
    ),
    rule(
        "metadata.labels",
        Kind::Any,
        Effect::Restart,
        "every object gets its labels at once, but a guest and its pod when it starts",
    ),
    rule("metadata.finalizers", Kind::Any, Effect::Live, "it keeps the object until what was made for it is gone"),
];

/// Where a field of the Machine is found in what is made of it. The first that fits counts.
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

/// The rule about a change of a field, which may be of an element: `spec.disks[data].size`.
pub fn rule_of(field: &str, change: Kind) -> Option<&'static Rule> {
    let pattern = without_name(field);
    let all = || RULES.iter().filter(|rule| rule.field == pattern);
    all().find(|rule| rule.change == change).or_else(|| all().find(|rule| rule.change == Kind::Any))
}

/// The Machine's field that a field of the VM comes from.
pub(super) fn machine_field(path: &str) -> Option<String> {
    let (name, pattern) = (element(path), without_name(path));
    if name == Some(CLOUD_INIT_DISK) {
        return Some("spec.cloudInit".to_owned());
    }
    let is_within = |place: &str| {
        let rest = pattern.strip_prefix(place);
        rest.is_some_and(|rest| rest.is_empty() || place.ends_with('.') || rest.starts_with(['.', '[']))
    };
    let (_, field) = DERIVED.iter().find(|(place, _)| is_within(place))?;
    Some(field.replace("[]", &format!("[{}]", name.unwrap_or_default())))
}

/// `data` of `spec.disks[data].size`.
fn element(path: &str) -> Option<&str> {
    path.split_once('[')?.1.split_once(']').map(|(name, _)| name)
}

/// `spec.disks[].size` of `spec.disks[data].size`.
fn without_name(path: &str) -> String {
    match path.split_once('[').and_then(|(head, rest)| Some((head, rest.split_once(']')?.1))) {
        Some((head, tail)) => format!("{head}[]{tail}"),
        None => path.to_owned(),
    }
}
