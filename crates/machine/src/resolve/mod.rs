//! Parses a Machine: applies the template, merges the overrides, checks the limits and derives names and addresses.
//! The result needs no further checks. If the spec is invalid, the result is a [`Problem`] that says what to do.

mod disks;
pub(crate) mod limits;
mod networks;

use vitivirt_api::{
    Quantity,
    machine::{
        ANNOTATION_ADOPT, Adoption, CloudInit, LABEL_CLUSTER, LABEL_TEMPLATE, Machine, MachineId, POD_NETWORK,
        SecretKeyRef,
        limits::{LARGEST_SIZE, LARGEST_SIZE_BYTES, SIZE_DECIMALS, SIZE_LENGTH},
        machine_reason as reason,
    },
};

pub(crate) use self::disks::pvc_name;
pub use self::{
    disks::{DiskBacking, DiskKind, OnDelete, PvcSource, ResolvedDisk},
    networks::{Attachment, ResolvedNetwork, derived_mac},
};
use crate::problem::Problem;

/// A parsed Machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    pub id: MachineId,
    /// The cluster that the Machine is part of, for the label of its objects.
    pub cluster: Option<String>,
    /// The name of the template, if there is one.
    pub template: Option<&'static str>,
    pub cpu: CpuTopology,
    pub memory: Quantity,
    pub disks: Vec<ResolvedDisk>,
    pub networks: Vec<ResolvedNetwork>,
    pub boot_order: Vec<BootKind>,
    pub cloud_init: Option<ResolvedCloudInit>,
    /// None: KubeVirt chooses it by the architecture.
    pub machine_type: Option<String>,
    pub acpi: Option<bool>,
    pub apic: Option<bool>,
    pub hyperv: bool,
    pub efi: bool,
    pub secure_boot: bool,
    pub power: PowerState,
}

impl Resolved {
    /// The names of the PVCs of all disks.
    pub fn pvc_names(&self) -> impl Iterator<Item = &str> {
        self.disks.iter().filter_map(|disk| match &disk.backing {
            DiskBacking::Pvc { pvc, .. } => Some(pvc.as_str()),
            DiskBacking::ContainerDisk { .. } => None,
        })
    }

    /// The MAC addresses, set or derived, each with the name of its network.
    pub fn mac_addresses(&self) -> impl Iterator<Item = (&str, &str)> {
        let networks = self.networks.iter();
        networks.map(|network| (network.configuration().unwrap_or(POD_NETWORK), network.mac.as_str()))
    }

    /// The Secret key that cloud-init data is read from.
    pub fn source(&self) -> Option<&SecretSource> {
        self.cloud_init.as_ref()?.source.as_ref()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTopology {
    pub cores: u32,
    pub threads: u32,
    pub sockets: u32,
}

impl CpuTopology {
    pub fn cpus(self) -> u32 {
        self.cores.saturating_mul(self.threads).saturating_mul(self.sockets)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootKind {
    Disk,
    Network,
    Cdrom,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerState {
    Running,
    Stopped,
}

/// The parts of the cloud-init data. The data itself stays in the Machine and in Secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedCloudInit {
    pub network_data: bool,
    pub source: Option<SecretSource>,
}

/// A key of a Secret in the Machine's namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SecretSource {
    pub name: String,
    pub key: String,
}

impl From<&SecretKeyRef> for SecretSource {
    fn from(reference: &SecretKeyRef) -> Self {
        SecretSource {
            name: reference.name.clone(),
            key: reference.key.clone().unwrap_or_else(|| "userdata".to_owned()),
        }
    }
}

struct MachineTemplate {
    name: &'static str,
    cores: u32,
    memory: &'static str,
    root: &'static str,
}

const TEMPLATES: [MachineTemplate; 3] = [
    MachineTemplate { name: "small", cores: 1, memory: "2Gi", root: "20Gi" },
    MachineTemplate { name: "medium", cores: 2, memory: "4Gi", root: "40Gi" },
    MachineTemplate { name: "large", cores: 4, memory: "8Gi", root: "80Gi" },
];

/// The names of the built-in templates.
pub fn template_names() -> Vec<&'static str> {
    TEMPLATES.iter().map(|template| template.name).collect()
}

pub fn resolve(machine: &Machine) -> Result<Resolved, Problem> {
    limits::check(machine)?;
    let id = MachineId::from_metadata(&machine.metadata).map_err(|failure| invalid(failure.message))?;
    let adoption = Adoption::from_metadata(&machine.metadata);
    if let Some(item) = adoption.invalid_item() {
        let requirement =
            "must be a list of UIDs of earlier Machines, of pvc/NAME and of secret/NAME, separated by commas";
        return Err(invalid_value(&format!("metadata.annotations[{ANNOTATION_ADOPT}]"), item, requirement));
    }
    let spec = &machine.spec;
    let template = template(label(machine, LABEL_TEMPLATE), spec.template.as_deref())?;
    let given = spec.resources.clone().unwrap_or_default();
    let cpu = given.cpu.unwrap_or_default();
    let cores = cpu.cores.or(template.map(|template| template.cores)).ok_or_else(|| {
        invalid("spec.resources.cpu.cores: required without a template; set a number of cores or spec.template")
    })?;
    let memory = given.memory.and_then(|memory| memory.size);
    let memory = memory.as_deref().or(template.map(|template| template.memory)).ok_or_else(|| {
        invalid("spec.resources.memory.size: required without a template; set a size such as 4Gi or spec.template")
    })?;
    let cpu = CpuTopology { cores, threads: cpu.threads.unwrap_or(1), sockets: cpu.sockets.unwrap_or(1) };
    let memory = parse_size("spec.resources.memory.size", memory)?;

    let disks = disks::resolve(id.name(), &spec.disks, template.map(|template| template.root))?;
    let networks = networks::resolve(id.identity(), &spec.networks)?;
    let boot_order = boot_order(&spec.boot_order, &disks)?;
    let domain = spec.domain.clone().unwrap_or_default();
    let features = domain.features.unwrap_or_default();
    let bootloader = domain.firmware.and_then(|firmware| firmware.bootloader).unwrap_or_default();
    let (efi, secure_boot) = (bootloader.efi == Some(true), bootloader.secure_boot == Some(true));
    if secure_boot && !efi {
        return Err(invalid("spec.domain.firmware.bootloader.secureBoot: requires efi: true"));
    }
    Ok(Resolved {
        cluster: label(machine, LABEL_CLUSTER).map(str::to_owned),
        id,
        template: template.map(|template| template.name),
        cpu,
        memory,
        disks,
        networks,
        boot_order,
        cloud_init: spec.cloud_init.as_ref().and_then(cloud_init),
        machine_type: domain.machine.and_then(|machine| machine.kind).as_deref().map(machine_type),
        acpi: features.acpi,
        apic: features.apic,
        hyperv: features.hyperv == Some(true),
        efi,
        secure_boot,
        power: power_state(spec.power_state.as_deref())?,
    })
}

fn label<'a>(machine: &'a Machine, key: &str) -> Option<&'a str> {
    machine.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// The label counts only if the field is absent.
fn template(label: Option<&str>, field: Option<&str>) -> Result<Option<&'static MachineTemplate>, Problem> {
    let Some(name) = field.or(label).filter(|name| !name.is_empty()) else { return Ok(None) };
    TEMPLATES.iter().find(|template| template.name == name).map(Some).ok_or_else(|| {
        Problem::failed(reason::TEMPLATE_NOT_FOUND, unsupported_value("spec.template", name, &template_names()))
    })
}

/// An empty `cloudInit: {}` means no cloud-init.
fn cloud_init(given: &CloudInit) -> Option<ResolvedCloudInit> {
    let source = given.secret_ref.as_ref().map(SecretSource::from);
    let network_data = given.network_data.is_some();
    let has_data = given.user_data.is_some() || network_data || source.is_some();
    has_data.then_some(ResolvedCloudInit { network_data, source })
}

fn machine_type(given: &str) -> String {
    match given {
        "pc-q35" => "q35",
        "pc-i440fx" => "pc",
        other => other,
    }
    .to_owned()
}

pub(crate) fn power_state(given: Option<&str>) -> Result<PowerState, Problem> {
    match given {
        None | Some("Running") => Ok(PowerState::Running),
        Some("Stopped") => Ok(PowerState::Stopped),
        Some(other) => Err(unsupported("spec.powerState", other, &["Running", "Stopped"])),
    }
}

fn boot_order(given: &[String], disks: &[ResolvedDisk]) -> Result<Vec<BootKind>, Problem> {
    let mut order = Vec::new();
    for word in given {
        let kind = match word.as_str() {
            "disk" => BootKind::Disk,
            "network" => BootKind::Network,
            "cdrom" if disks.iter().any(|disk| disk.kind == DiskKind::Cdrom) => BootKind::Cdrom,
            "cdrom" => {
                return Err(invalid(
                    "spec.bootOrder: contains cdrom, but no disk has type cdrom; add such a disk or remove cdrom",
                ));
            }
            other => return Err(unsupported("spec.bootOrder", other, &["disk", "network", "cdrom"])),
        };
        if order.contains(&kind) {
            return Err(invalid(format!("spec.bootOrder: contains {word} twice; remove one")));
        }
        order.push(kind);
    }
    Ok(order)
}

pub(crate) fn invalid(message: impl Into<String>) -> Problem {
    Problem::failed(reason::INVALID, message)
}

fn unsupported(field: &str, value: &str, supported: &[&str]) -> Problem {
    invalid(unsupported_value(field, value, supported))
}

fn unsupported_value(field: &str, value: &str, supported: &[&str]) -> String {
    let (value, supported) = (limits::shortened(value), supported.join(", "));
    format!("{field}: unsupported value {value:?}; supported values: {supported}")
}

fn invalid_value(field: &str, value: &str, requirement: &str) -> Problem {
    invalid(format!("{field}: invalid value {:?}: {requirement}", limits::shortened(value)))
}

/// A size in whole bytes, in the form that the CRD accepts: Kubernetes reads more forms, such as `1e3` and `500m`.
fn parse_size(field: &str, text: &str) -> Result<Quantity, Problem> {
    limits::check_length(field, text, SIZE_LENGTH)?;
    let size = Some(text).filter(|text| is_size(text)).and_then(Quantity::parse).filter(|size| size.nanos() > 0);
    let size = size.map(Quantity::rounded_up).ok_or_else(|| {
        invalid_value(field, text, "must be a number greater than 0 with an optional unit, such as 20Gi")
    })?;
    if size.value() > LARGEST_SIZE_BYTES {
        return Err(invalid_value(field, text, &format!("must be at most {LARGEST_SIZE}")));
    }
    Ok(size)
}

/// The same as the pattern [`vitivirt_api::machine::limits::SIZE`].
fn is_size(text: &str) -> bool {
    const SUFFIXES: [&str; 13] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "k", "M", "G", "T", "P", "E"];
    let end = text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').map_or((number, None), |(whole, rest)| (whole, Some(rest)));
    let is_padded = whole.starts_with('0') && whole != "0";
    let is_fraction = |digits: &str| (1..=SIZE_DECIMALS).contains(&digits.len()) && !digits.contains('.');
    SUFFIXES.contains(&suffix) && !whole.is_empty() && !is_padded && fraction.is_none_or(is_fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_its_canonical_form_in_whole_bytes() {
        for (text, canonical) in [
            ("20Gi", "20Gi"),
            ("1024Mi", "1Gi"),
            ("1536Mi", "1536Mi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Gi", "512Mi"),
            ("1.1Ki", "1127"),
            ("1.5", "2"),
            ("2000M", "2G"),
            ("1073741824", "1073741824"),
            ("1000", "1k"),
        ] {
            assert_eq!(parse_size("size", text).unwrap().to_string(), canonical, "{text}");
        }
    }

    #[test]
    fn text_that_is_not_a_size_is_invalid() {
        for text in ["", "0", "0Gi", "-1Gi", "1.0000000001", "Gi", "1 Gi", "1gi", "1.2.3Gi", "01Gi", "1.", ".5", "0.0"]
        {
            assert!(parse_size("size", text).is_err(), "{text}");
        }
    }
}
