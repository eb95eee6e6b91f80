//! The limits that the CRD sets for single fields, checked again: an object may be older than a rule, or the cluster
//! may have an older CRD. The operator creates nothing for a Machine or NetworkConfiguration that the CRD would
//! refuse.

use std::{borrow::Cow, fmt::Display};

use vitivirt_api::{
    machine::{
        Disk, DiskSource, Machine, MachineSpec, Network,
        limits::{BRIDGE_LENGTH, DATA_BYTES, FIRST_VLAN, LAST_VLAN},
    },
    text::{is_label, is_subdomain, truncate},
};

use super::{invalid, invalid_value};
use crate::problem::Problem;

const LABEL: usize = 63;
/// KubeVirt adds 11 characters for the name of a container.
const CONTAINER_DISK_NAME: usize = 52;
const NAME: usize = 253;
const IMAGE: usize = 512;
const URL: usize = 2048;
const DEVICES: usize = 16;

pub(super) fn check(machine: &Machine) -> Result<(), Problem> {
    let MachineSpec { template, resources, disks, networks, cloud_init, domain, .. } = &machine.spec;
    check_label("metadata.name", machine.metadata.name.as_deref().unwrap_or_default())?;
    check_optional(template, |name| check_text("spec.template", name, LABEL))?;
    check_optional(&resources.as_ref().and_then(|given| given.cpu.clone()), |cpu| {
        check_range("spec.resources.cpu.cores", cpu.cores, 512)?;
        check_range("spec.resources.cpu.threads", cpu.threads, 8)?;
        check_range("spec.resources.cpu.sockets", cpu.sockets, 64)
    })?;
    check_count("spec.disks", disks.len())?;
    disks.iter().try_for_each(check_disk)?;
    check_count("spec.networks", networks.len())?;
    networks.iter().try_for_each(check_network)?;
    check_optional(cloud_init, |given| {
        check_optional(&given.user_data, |data| check_bytes("spec.cloudInit.userData", data))?;
        check_optional(&given.network_data, |data| check_bytes("spec.cloudInit.networkData", data))?;
        check_optional(&given.secret_ref, |reference| {
            check_name("spec.cloudInit.secretRef.name", &reference.name)?;
            check_optional(&reference.key, |key| check_secret_key("spec.cloudInit.secretRef.key", key))
        })
    })?;
    let kind = domain.as_ref().and_then(|domain| domain.machine.as_ref()?.kind.as_ref());
    kind.map_or(Ok(()), |kind| check_machine_type("spec.domain.machine.type", kind))
}

fn check_disk(disk: &Disk) -> Result<(), Problem> {
    let field = |part: &str| format!("spec.disks[{}].{part}", shortened(&disk.name));
    check_label("spec.disks[].name", &disk.name)?;
    check_optional(&disk.storage_class, |class| check_name(field("storageClass"), class))?;
    let DiskSource { container_disk, pvc, snapshot, http, registry } = disk.source.clone().unwrap_or_default();
    check_optional(&container_disk, |source| check_text(field("source.containerDisk.image"), &source.image, IMAGE))?;
    check_optional(&pvc, |source| check_name(field("source.pvc.name"), &source.name))?;
    check_optional(&snapshot, |source| check_name(field("source.snapshot.name"), &source.name))?;
    check_optional(&http, |source| check_text(field("source.http.url"), &source.url, URL))?;
    check_optional(&registry, |source| check_text(field("source.registry.url"), &source.url, URL))?;
    if container_disk.is_some() && disk.name.len() > CONTAINER_DISK_NAME {
        return Err(invalid_value(
            "spec.disks[].name",
            &disk.name,
            &format!(
                "must be at most {CONTAINER_DISK_NAME} characters for a disk with a containerDisk source, because \
                 KubeVirt names a container after it"
            ),
        ));
    }
    let has_pvc_fields = disk.storage_class.is_some() || disk.access_mode.is_some() || disk.volume_mode.is_some();
    if container_disk.is_some() && has_pvc_fields {
        return Err(invalid(format!(
            "{}: a containerDisk has no PVC; remove storageClass, accessMode and volumeMode",
            field("source.containerDisk")
        )));
    }
    Ok(())
}

fn check_network(network: &Network) -> Result<(), Problem> {
    check_label("spec.networks[].name", &network.name)?;
    check_name(format!("spec.networks[{}].networkName", shortened(&network.name)), &network.network_name)
}

/// What is wrong with a NetworkConfiguration, and how to correct it.
pub(crate) fn network_configuration_error(name: &str, bridge: Option<&str>, vlan: Option<u16>) -> Option<String> {
    let Some(bridge) = bridge else {
        return Some(format!(
            "NetworkConfiguration {name}: spec.bridge: required; set the name of a bridge on the nodes"
        ));
    };
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    // The kernel has no interface with the name `.` or `..`.
    let only_dots = bridge.bytes().all(|byte| byte == b'.');
    if !((1..=BRIDGE_LENGTH).contains(&bridge.len()) && bridge.bytes().all(is_allowed)) || only_dots {
        return Some(format!(
            "NetworkConfiguration {name}: spec.bridge: invalid value {:?}: must be the name of a bridge on the \
             nodes, of at most {BRIDGE_LENGTH} letters, digits, hyphens, underscores and dots, and not only of dots",
            shortened(bridge)
        ));
    }
    vlan.filter(|tag| !(FIRST_VLAN..=LAST_VLAN).contains(tag)).map(|_| {
        format!(
            "NetworkConfiguration {name}: spec.vlan: must be a number from {FIRST_VLAN} to {LAST_VLAN}; remove it for \
             untagged traffic"
        )
    })
}

fn check_optional<T>(given: &Option<T>, check: impl FnOnce(&T) -> Result<(), Problem>) -> Result<(), Problem> {
    given.as_ref().map_or(Ok(()), check)
}

fn check_count(field: &str, number: usize) -> Result<(), Problem> {
    if number > DEVICES {
        Err(invalid(format!("{field}: has {number} items; must have at most {DEVICES}")))
    } else {
        Ok(())
    }
}

fn check_range(field: &str, given: Option<u32>, most: u32) -> Result<(), Problem> {
    match given {
        Some(number) if !(1..=most).contains(&number) => {
            Err(invalid(format!("{field}: invalid value {number}: must be from 1 to {most}")))
        }
        _ => Ok(()),
    }
}

fn check_bytes(field: &str, given: &str) -> Result<(), Problem> {
    let length = given.len();
    if length > DATA_BYTES {
        Err(invalid(format!("{field}: has {length} bytes; must be at most {DATA_BYTES}")))
    } else {
        Ok(())
    }
}

pub(super) fn check_length(field: impl Display, given: &str, most: usize) -> Result<(), Problem> {
    let length = given.chars().count();
    if length > most {
        Err(invalid(format!("{field}: has {length} characters; must be at most {most}")))
    } else {
        Ok(())
    }
}

fn check_text(field: impl Display, given: &str, most: usize) -> Result<(), Problem> {
    if given.is_empty() {
        Err(invalid(format!("{field}: must not be empty; set a value or remove the field")))
    } else {
        check_length(field, given, most)
    }
}

/// The name of an object. It becomes part of a URL.
fn check_name(field: impl Display, given: &str) -> Result<(), Problem> {
    if is_subdomain(given) {
        return Ok(());
    }
    Err(invalid_value(
        &field.to_string(),
        given,
        &format!(
            "must be the name of an object: at most {NAME} lower-case letters, digits, hyphens and dots, and each part \
             must start and end with a letter or digit"
        ),
    ))
}

fn check_secret_key(field: &str, given: &str) -> Result<(), Problem> {
    check_text(field, given, NAME)?;
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if given.bytes().all(is_allowed) {
        Ok(())
    } else {
        Err(invalid_value(field, given, "must be the key of a Secret: letters, digits, hyphens, underscores and dots"))
    }
}

/// A DNS label.
fn check_label(field: &str, given: &str) -> Result<(), Problem> {
    if is_label(given) {
        return Ok(());
    }
    Err(invalid_value(
        field,
        given,
        &format!(
            "must consist of at most {LABEL} lower-case letters, digits and hyphens, and must start and end with a \
             letter or digit"
        ),
    ))
}

fn check_machine_type(field: &str, given: &str) -> Result<(), Problem> {
    check_text(field, given, LABEL)?;
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if given.bytes().all(is_allowed) {
        Ok(())
    } else {
        Err(invalid_value(field, given, "must be a machine type such as q35"))
    }
}

/// Enough of a value to recognize it.
pub(super) fn shortened(value: &str) -> Cow<'_, str> {
    truncate(value, 80)
}
