//! Disks: the template's, overridden and extended by name.

use std::collections::BTreeSet;

use vitivirt_api::machine::{CLOUD_INIT_DISK, Disk, DiskSource};

use super::{invalid, size};
use crate::problem::Problem;
use crate::quantity::Quantity;

#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedDisk {
    pub name: String,
    pub kind: DiskKind,
    pub content: Content,
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

/// Where a disk's bytes are.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// In a container image; nothing is stored.
    ContainerDisk { image: String },
    /// In a PVC of the Machine's own.
    Pvc {
        pvc: String,
        size: Quantity,
        /// None: the cluster's default class.
        storage_class: Option<String>,
        access_mode: String,
        volume_mode: String,
        source: Option<Source>,
        on_delete: OnDelete,
    },
}

/// What a PVC is filled with at first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Pvc(String),
    Snapshot(String),
    Http(String),
    Registry(String),
}

impl ResolvedDisk {
    pub fn read_only(&self) -> bool {
        matches!(&self.content, Content::Pvc { access_mode, .. } if access_mode == "ReadOnlyMany")
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
            return Err(invalid(format!("there are two disks named {:?}; give each its own name", disk.name)));
        }
        match merged.iter_mut().find(|known| known.name == disk.name) {
            Some(known) => overlay(known, disk),
            None => merged.push(disk.clone()),
        }
    }
    if merged.is_empty() {
        return Err(invalid("there is no template and no disk; set a template or add a disk named root"));
    }
    merged.iter().map(|disk| one(machine, disk)).collect()
}

/// Field by field: what is given wins.
fn overlay(known: &mut Disk, given: &Disk) {
    let Disk { name: _, size, storage_class, access_mode, volume_mode, kind, source, on_delete } = given.clone();
    // A container image has no size: the template's would be a contradiction that the user did not write.
    if source.as_ref().is_some_and(|source| source.container_disk.is_some()) {
        known.size = None;
    }
    known.size = size.or(known.size.take());
    known.storage_class = storage_class.or(known.storage_class.take());
    known.access_mode = access_mode.or(known.access_mode.take());
    known.volume_mode = volume_mode.or(known.volume_mode.take());
    known.kind = kind.or(known.kind.take());
    known.source = source.or(known.source.take());
    known.on_delete = on_delete.or(known.on_delete.take());
}

fn one(machine: &str, disk: &Disk) -> Result<ResolvedDisk, Problem> {
    let name = &disk.name;
    if name == CLOUD_INIT_DISK {
        return Err(invalid(format!("the disk name {name} is reserved for cloud-init; choose another")));
    }
    let kind = match disk.kind.as_deref() {
        None | Some("disk") => DiskKind::Disk,
        Some("cdrom") => DiskKind::Cdrom,
        Some(other) => return Err(invalid(format!("disk {name}: type is {other:?}; it must be disk or cdrom"))),
    };
    let content = match source(name, disk.source.as_ref())? {
        Some(Either::Image(image)) => Content::ContainerDisk { image },
        Some(Either::Source(source)) => pvc(machine, disk, Some(source))?,
        None => pvc(machine, disk, None)?,
    };
    Ok(ResolvedDisk { name: name.clone(), kind, content })
}

enum Either {
    Image(String),
    Source(Source),
}

fn source(disk: &str, given: Option<&DiskSource>) -> Result<Option<Either>, Problem> {
    let Some(given) = given else { return Ok(None) };
    let DiskSource { container_disk, pvc, snapshot, http, registry } = given.clone();
    let mut all: Vec<Either> = Vec::new();
    all.extend(container_disk.map(|source| Either::Image(source.image)));
    all.extend(pvc.map(|source| Either::Source(Source::Pvc(source.name))));
    all.extend(snapshot.map(|source| Either::Source(Source::Snapshot(source.name))));
    all.extend(http.map(|source| Either::Source(Source::Http(source.url))));
    all.extend(registry.map(|source| Either::Source(Source::Registry(source.url))));
    match (all.pop(), all.is_empty()) {
        (Some(only), true) => Ok(Some(only)),
        _ => Err(invalid(format!(
            "disk {disk}: source must be exactly one of containerDisk, pvc, snapshot, http and registry"
        ))),
    }
}

fn pvc(machine: &str, disk: &Disk, source: Option<Source>) -> Result<Content, Problem> {
    let name = &disk.name;
    let text =
        disk.size.as_deref().ok_or_else(|| invalid(format!("disk {name} has no size; set one, such as 20Gi")))?;
    let access_mode = match disk.access_mode.as_deref() {
        None => "ReadWriteOnce",
        Some(mode @ ("ReadWriteOnce" | "ReadWriteMany")) => mode,
        Some(mode @ "ReadOnlyMany") if source.is_some() => mode,
        Some("ReadOnlyMany") => {
            return Err(invalid(format!(
                "disk {name}: accessMode ReadOnlyMany needs a source; an empty read-only disk is of no use"
            )));
        }
        Some(other) => {
            return Err(invalid(format!(
                "disk {name}: accessMode is {other:?}; it must be ReadWriteOnce, ReadWriteMany or ReadOnlyMany"
            )));
        }
    };
    let volume_mode = match disk.volume_mode.as_deref() {
        None => "Filesystem",
        Some(mode @ ("Filesystem" | "Block")) => mode,
        Some(other) => {
            return Err(invalid(format!("disk {name}: volumeMode is {other:?}; it must be Filesystem or Block")));
        }
    };
    let on_delete = match disk.on_delete.as_deref() {
        None | Some("Delete") => OnDelete::Delete,
        Some("Retain") => OnDelete::Retain,
        Some(other) => return Err(invalid(format!("disk {name}: onDelete is {other:?}; it must be Delete or Retain"))),
    };
    Ok(Content::Pvc {
        pvc: format!("{machine}-{name}"),
        size: size(&format!("disk {name}: size"), text)?,
        storage_class: disk.storage_class.clone(),
        access_mode: access_mode.to_owned(),
        volume_mode: volume_mode.to_owned(),
        source,
        on_delete,
    })
}
