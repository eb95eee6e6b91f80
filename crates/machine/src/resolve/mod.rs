//! From what a user wrote to what is meant: templates applied, overrides merged, words parsed, names derived. What
//! comes out needs no further checks; what cannot come out is a [`Problem`] that says what to do.

mod disks;
pub(crate) mod limits;
mod networks;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use vitivirt_api::machine::limits::{LARGEST_SIZE, LARGEST_SIZE_BYTES, SIZE_LENGTH};
use vitivirt_api::machine::{LABEL_TEMPLATE, Machine, SecretKeyRef, machine_reason as reason};

use crate::problem::Problem;
use crate::quantity::Quantity;

pub use disks::{Content, DiskKind, OnDelete, ResolvedDisk, Source};
pub use networks::{Attachment, ResolvedNetwork, derived_mac};

/// A Machine, understood.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// The template's name, for people; none if there is none.
    pub template: Option<&'static str>,
    pub cpu: Topology,
    pub memory: Quantity,
    pub disks: Vec<ResolvedDisk>,
    pub networks: Vec<ResolvedNetwork>,
    pub boot_order: Vec<BootKind>,
    pub cloud_init: Option<CloudInitPlan>,
    pub machine_type: String,
    pub acpi: Option<bool>,
    pub apic: Option<bool>,
    pub hyperv: bool,
    pub efi: bool,
    pub secure_boot: bool,
    pub power: Power,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    pub cores: u32,
    pub threads: u32,
    pub sockets: u32,
}

impl Topology {
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
pub enum Power {
    Running,
    Stopped,
}

/// Which parts cloud-init gets; the contents stay in the Machine and in Secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloudInitPlan {
    pub network_data: bool,
    pub source: Option<SecretSource>,
}

/// A key of a Secret of the Machine's namespace.
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

struct Template {
    name: &'static str,
    cores: u32,
    memory: &'static str,
    root: &'static str,
}

const TEMPLATES: [Template; 3] = [
    Template { name: "small", cores: 1, memory: "2Gi", root: "20Gi" },
    Template { name: "medium", cores: 2, memory: "4Gi", root: "40Gi" },
    Template { name: "large", cores: 4, memory: "8Gi", root: "80Gi" },
];

/// The names of the built-in templates.
pub fn template_names() -> Vec<&'static str> {
    TEMPLATES.iter().map(|template| template.name).collect()
}

pub fn resolve(machine: &Machine) -> Result<Resolved, Problem> {
    limits::check(machine)?;
    let spec = &machine.spec;
    let template = template(&machine.metadata, spec.template.as_deref())?;
    let given = spec.resources.clone().unwrap_or_default();
    let cpu = given.cpu.unwrap_or_default();
    let cores = cpu
        .cores
        .or(template.map(|template| template.cores))
        .ok_or_else(|| invalid("there is no template and no resources.cpu.cores; set one of them"))?;
    let memory = given.memory.and_then(|memory| memory.size);
    let memory = memory
        .as_deref()
        .or(template.map(|template| template.memory))
        .ok_or_else(|| invalid("there is no template and no resources.memory.size; set one of them"))?;
    let cpu = Topology {
        cores: positive("resources.cpu.cores", cores)?,
        threads: positive("resources.cpu.threads", cpu.threads.unwrap_or(1))?,
        sockets: positive("resources.cpu.sockets", cpu.sockets.unwrap_or(1))?,
    };
    let memory = size("resources.memory.size", memory)?;

    let name = machine.metadata.name.as_deref().unwrap_or_default();
    let uid = machine.metadata.uid.as_deref().unwrap_or_default();
    let disks = disks::resolve(name, &spec.disks, template.map(|template| template.root))?;
    let networks = networks::resolve(uid, &spec.networks)?;
    let boot_order = boot_order(&spec.boot_order, &disks)?;
    let domain = spec.domain.clone().unwrap_or_default();
    let features = domain.features.unwrap_or_default();
    let bootloader = domain.firmware.and_then(|firmware| firmware.bootloader).unwrap_or_default();
    let (efi, secure_boot) = (bootloader.efi == Some(true), bootloader.secure_boot == Some(true));
    if secure_boot && !efi {
        return Err(invalid("domain.firmware.bootloader.secureBoot needs efi: true"));
    }
    Ok(Resolved {
        template: template.map(|template| template.name),
        cpu,
        memory,
        disks,
        networks,
        boot_order,
        cloud_init: spec.cloud_init.as_ref().and_then(cloud_init),
        machine_type: machine_type(domain.machine.and_then(|machine| machine.kind).as_deref()),
        acpi: features.acpi,
        apic: features.apic,
        hyperv: features.hyperv == Some(true),
        efi,
        secure_boot,
        power: power(spec.power_state.as_deref())?,
    })
}

/// The label is honoured where the field is absent.
fn template(metadata: &ObjectMeta, field: Option<&str>) -> Result<Option<&'static Template>, Problem> {
    let label = metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_TEMPLATE)).map(String::as_str);
    let Some(wanted) = field.or(label).filter(|name| !name.is_empty()) else { return Ok(None) };
    TEMPLATES.iter().find(|template| template.name == wanted).map(Some).ok_or_else(|| {
        let known = template_names().join(", ");
        Problem::failed(
            reason::TEMPLATE_NOT_FOUND,
            format!("there is no template {wanted:?}; set spec.template to one of: {known}"),
        )
    })
}

/// An empty `cloudInit: {}` is no cloud-init.
fn cloud_init(given: &vitivirt_api::machine::CloudInit) -> Option<CloudInitPlan> {
    let source = given.secret_ref.as_ref().map(SecretSource::from);
    let network_data = given.network_data.is_some();
    (given.user_data.is_some() || network_data || source.is_some()).then_some(CloudInitPlan { network_data, source })
}

fn machine_type(given: Option<&str>) -> String {
    match given {
        None | Some("pc-q35" | "q35") => "q35",
        Some("pc-i440fx") => "pc",
        Some(other) => other,
    }
    .to_owned()
}

fn power(given: Option<&str>) -> Result<Power, Problem> {
    match given {
        None | Some("Running") => Ok(Power::Running),
        Some("Stopped") => Ok(Power::Stopped),
        Some(other) => Err(invalid(format!("powerState is {other:?}; it must be Running or Stopped"))),
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
                return Err(invalid("bootOrder names cdrom, but no disk has type cdrom; add one or leave cdrom out"));
            }
            other => return Err(invalid(format!("bootOrder has {other:?}; it knows disk, network and cdrom"))),
        };
        if order.contains(&kind) {
            return Err(invalid(format!("bootOrder names {word} twice")));
        }
        order.push(kind);
    }
    Ok(order)
}

pub(crate) fn invalid(message: impl Into<String>) -> Problem {
    Problem::failed(reason::INVALID, message)
}

fn positive(field: &str, value: u32) -> Result<u32, Problem> {
    if value == 0 { Err(invalid(format!("{field} is 0; it must be at least 1"))) } else { Ok(value) }
}

fn size(field: &str, text: &str) -> Result<Quantity, Problem> {
    limits::at_most(field, text, SIZE_LENGTH)?;
    let size = Quantity::parse(text).ok_or_else(|| {
        invalid(format!("{field} is {text:?}, which is no size; write a number above 0 with a suffix, such as 4Gi"))
    })?;
    if size.bytes() > LARGEST_SIZE_BYTES {
        return Err(invalid(format!("{field} is {text:?}, which is too big; at most {LARGEST_SIZE} may be")));
    }
    Ok(size)
}
