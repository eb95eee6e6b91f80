//! Disks: the root disk of the template, merged by name with the disks of the spec.

use std::collections::BTreeSet;

use vitivirt_api::{
    Quantity,
    machine::{AccessMode, CLOUD_INIT_DISK, Disk, DiskSource, VolumeMode},
};

use super::{invalid, parse_size, unsupported};
use crate::problem::Problem;

#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedDisk {
    pub name: String,
    pub kind: DiskKind,
    pub backing: DiskBacking,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    Disk,
    Cdrom,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDelete {
    Delete,
    Retain,
}

/// Where the content of a disk is stored.
#[derive(Clone, Debug, PartialEq)]
pub enum DiskBacking {
    /// A container image. The guest's changes are not stored.
    ContainerDisk { image: String },
    /// A PVC that belongs to the Machine.
    Pvc {
        pvc: String,
        size: Quantity,
        /// None: the default StorageClass of the cluster.
        storage_class: Option<String>,
        access_mode: AccessMode,
        volume_mode: VolumeMode,
        source: Option<PvcSource>,
        on_delete: OnDelete,
    },
}

/// The initial content of a PVC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PvcSource {
    Pvc(String),
    Snapshot(String),
    Http(String),
    Registry(String),
}

impl ResolvedDisk {
    pub fn read_only(&self) -> bool {
        matches!(&self.backing, DiskBacking::Pvc { access_mode: AccessMode::ReadOnlyMany, .. })
    }
}

pub(super) fn resolve(
    machine: &str,
    given: &[Disk],
    template_root: Option<&str>,
) -> Result<Vec<ResolvedDisk>, Problem> {
    let mut merged: Vec<Disk> = template_root
        .map(|size| Disk { name: "root".to_owned(), size: Some(size.to_owned()), ..Disk::default() })
        .into_iter()
        .collect();
    let mut seen = BTreeSet::new();
    for disk in given {
        if !seen.insert(&disk.name) {
            return Err(invalid(format!("spec.disks: two disks have the name {:?}; use unique names", disk.name)));
        }
        match merged.iter_mut().find(|known| known.name == disk.name) {
            Some(known) => override_fields(known, disk),
            None => merged.push(disk.clone()),
        }
    }
    if merged.is_empty() {
        return Err(invalid("spec.disks: required without a template; add a disk named root or set spec.template"));
    }
    merged.iter().map(|disk| resolve_disk(machine, disk)).collect()
}

/// The fields that `overrides` sets replace those of `base`.
fn override_fields(base: &mut Disk, overrides: &Disk) {
    let Disk { name: _, size, storage_class, access_mode, volume_mode, kind, source, on_delete } = overrides.clone();
    // A container image has no size. The size of the template would be a contradiction that the user did not write.
    if source.as_ref().is_some_and(|source| source.container_disk.is_some()) {
        base.size = None;
    }
    base.size = size.or(base.size.take());
    base.storage_class = storage_class.or(base.storage_class.take());
    base.access_mode = access_mode.or(base.access_mode.take());
    base.volume_mode = volume_mode.or(base.volume_mode.take());
    base.kind = kind.or(base.kind.take());
    base.source = source.or(base.source.take());
    base.on_delete = on_delete.or(base.on_delete.take());
}

fn resolve_disk(machine: &str, disk: &Disk) -> Result<ResolvedDisk, Problem> {
    let name = &disk.name;
    if name == CLOUD_INIT_DISK {
        return Err(invalid(format!("spec.disks: disk name {name} is reserved for cloud-init; choose another")));
    }
    let kind = match disk.kind.as_deref() {
        None | Some("disk") => DiskKind::Disk,
        Some("cdrom") => DiskKind::Cdrom,
        Some(other) => return Err(unsupported(&format!("spec.disks[{name}].type"), other, &["disk", "cdrom"])),
    };
    let backing = match parse_source(name, disk.source.as_ref())? {
        Some(ParsedSource::Image(image)) => DiskBacking::ContainerDisk { image },
        Some(ParsedSource::Pvc(source)) => pvc_backing(machine, disk, Some(source))?,
        None => pvc_backing(machine, disk, None)?,
    };
    Ok(ResolvedDisk { name: name.clone(), kind, backing })
}

enum ParsedSource {
    Image(String),
    Pvc(PvcSource),
}

fn parse_source(disk: &str, given: Option<&DiskSource>) -> Result<Option<ParsedSource>, Problem> {
    let Some(given) = given else { return Ok(None) };
    let DiskSource { container_disk, pvc, snapshot, http, registry } = given.clone();
    let mut sources: Vec<ParsedSource> = Vec::new();
    sources.extend(container_disk.map(|source| ParsedSource::Image(source.image)));
    sources.extend(pvc.map(|source| ParsedSource::Pvc(PvcSource::Pvc(source.name))));
    sources.extend(snapshot.map(|source| ParsedSource::Pvc(PvcSource::Snapshot(source.name))));
    sources.extend(http.map(|source| ParsedSource::Pvc(PvcSource::Http(source.url))));
    sources.extend(registry.map(|source| ParsedSource::Pvc(PvcSource::Registry(source.url))));
    match (sources.pop(), sources.is_empty()) {
        (Some(only), true) => Ok(Some(only)),
        _ => Err(invalid(format!(
            "spec.disks[{disk}].source: exactly one of containerDisk, pvc, snapshot, http or registry must be set"
        ))),
    }
}

/// The PVC that the operator creates for a disk.
pub(crate) fn pvc_name(machine: &str, disk: &str) -> String {
    format!("{machine}-{disk}")
}

fn pvc_backing(machine: &str, disk: &Disk, source: Option<PvcSource>) -> Result<DiskBacking, Problem> {
    let name = &disk.name;
    let field = |part: &str| format!("spec.disks[{name}].{part}");
    let size = disk.size.as_deref();
    let size = size.ok_or_else(|| invalid(format!("{}: required; set a size such as 20Gi", field("size"))))?;
    let access_mode = match disk.access_mode.as_deref() {
        None => AccessMode::ReadWriteOnce,
        Some(word) => match AccessMode::from(word) {
            AccessMode::ReadOnlyMany if source.is_none() => {
                return Err(invalid(format!(
                    "{}: ReadOnlyMany requires a source, because an empty read-only disk is useless",
                    field("accessMode")
                )));
            }
            mode @ (AccessMode::ReadWriteOnce | AccessMode::ReadWriteMany | AccessMode::ReadOnlyMany) => mode,
            AccessMode::ReadWriteOncePod | AccessMode::Unknown => {
                let supported = ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"];
                return Err(unsupported(&field("accessMode"), word, &supported));
            }
        },
    };
    let volume_mode = match disk.volume_mode.as_deref() {
        None => VolumeMode::Filesystem,
        Some(word) => match VolumeMode::from(word) {
            VolumeMode::Unknown => return Err(unsupported(&field("volumeMode"), word, &["Filesystem", "Block"])),
            mode => mode,
        },
    };
    let on_delete = match disk.on_delete.as_deref() {
        None | Some("Delete") => OnDelete::Delete,
        Some("Retain") => OnDelete::Retain,
        Some(other) => return Err(unsupported(&field("onDelete"), other, &["Delete", "Retain"])),
    };
    Ok(DiskBacking::Pvc {
        pvc: pvc_name(machine, name),
        size: parse_size(&field("size"), size)?,
        storage_class: disk.storage_class.clone(),
        access_mode,
        volume_mode,
        source,
        on_delete,
    })
}
