//! What the CRD says about single fields, said again: an object may have been stored before a rule was, or by a server
//! whose CRD is older. Nothing is made of a Machine or a NetworkConfiguration that the CRD would refuse.

use std::fmt::Display;

use vitivirt_api::machine::limits::{BRIDGE_LENGTH, FIRST_VLAN, LAST_VLAN};
use vitivirt_api::machine::{Disk, DiskSource, Machine, MachineSpec, Network};
use vitivirt_api::text::is_label;

use super::invalid;
use crate::observed::NetworkView;
use crate::problem::Problem;

const LABEL: usize = 63;
const NAME: usize = 253;
const IMAGE: usize = 512;
const URL: usize = 2048;
const DATA: usize = 131_072;
const DEVICES: usize = 16;

pub(super) fn check(machine: &Machine) -> Result<(), Problem> {
    let MachineSpec { template, resources, disks, networks, cloud_init, domain, .. } = &machine.spec;
    label("metadata.name", machine.metadata.name.as_deref().unwrap_or_default())?;
    each(template, |name| text("template", name, LABEL))?;
    each(&resources.as_ref().and_then(|given| given.cpu.clone()), |cpu| {
        number("resources.cpu.cores", cpu.cores, 512)?;
        number("resources.cpu.threads", cpu.threads, 8)?;
        number("resources.cpu.sockets", cpu.sockets, 64)
    })?;
    count("disks", disks.len())?;
    disks.iter().try_for_each(disk)?;
    count("networks", networks.len())?;
    networks.iter().try_for_each(network)?;
    each(cloud_init, |given| {
        each(&given.user_data, |data| at_most("cloudInit.userData", data, DATA))?;
        each(&given.network_data, |data| at_most("cloudInit.networkData", data, DATA))?;
        each(&given.secret_ref, |reference| {
            text("cloudInit.secretRef.name", &reference.name, NAME)?;
            each(&reference.key, |key| text("cloudInit.secretRef.key", key, NAME))
        })
    })?;
    let kind = domain.as_ref().and_then(|domain| domain.machine.as_ref()?.kind.as_ref());
    kind.map_or(Ok(()), |kind| words("domain.machine.type", kind))
}

fn disk(disk: &Disk) -> Result<(), Problem> {
    let field = |part: &str| format!("disks[{}].{part}", shown(&disk.name));
    label("disks[].name", &disk.name)?;
    each(&disk.storage_class, |class| text(field("storageClass"), class, NAME))?;
    let DiskSource { container_disk, pvc, snapshot, http, registry } = disk.source.clone().unwrap_or_default();
    each(&container_disk, |source| text(field("source.containerDisk.image"), &source.image, IMAGE))?;
    each(&pvc, |source| text(field("source.pvc.name"), &source.name, NAME))?;
    each(&snapshot, |source| text(field("source.snapshot.name"), &source.name, NAME))?;
    each(&http, |source| text(field("source.http.url"), &source.url, URL))?;
    each(&registry, |source| text(field("source.registry.url"), &source.url, URL))?;
    let of_pvcs = disk.storage_class.is_some() || disk.access_mode.is_some() || disk.volume_mode.is_some();
    if container_disk.is_some() && of_pvcs {
        return Err(invalid(format!(
            "disk {}: a containerDisk has no PVC; leave out storageClass, accessMode and volumeMode",
            shown(&disk.name)
        )));
    }
    Ok(())
}

fn network(network: &Network) -> Result<(), Problem> {
    label("networks[].name", &network.name)?;
    text(format!("networks[{}].networkName", shown(&network.name)), &network.network_name, NAME)
}

/// What is wrong with a NetworkConfiguration, and what to write instead.
pub(crate) fn network_configuration(name: &str, network: &NetworkView) -> Option<String> {
    let Some(bridge) = network.bridge.as_deref() else {
        return Some(format!("the NetworkConfiguration {name} names no bridge; set its spec.bridge"));
    };
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    if !((1..=BRIDGE_LENGTH).contains(&bridge.len()) && bridge.bytes().all(good)) {
        return Some(format!(
            "the NetworkConfiguration {name}: spec.bridge is {:?}; it must be the name of a bridge on the nodes, at most \
             {BRIDGE_LENGTH} letters, digits, hyphens, underscores and dots",
            shown(bridge)
        ));
    }
    network.vlan.filter(|tag| !(FIRST_VLAN..=LAST_VLAN).contains(tag)).map(|_| {
        format!(
            "the NetworkConfiguration {name}: spec.vlan must be a number from {FIRST_VLAN} to {LAST_VLAN}; without it \
             traffic is not tagged"
        )
    })
}

fn each<T>(given: &Option<T>, check: impl FnOnce(&T) -> Result<(), Problem>) -> Result<(), Problem> {
    given.as_ref().map_or(Ok(()), check)
}

fn count(field: &str, number: usize) -> Result<(), Problem> {
    if number > DEVICES {
        Err(invalid(format!("{field}: there are {number}, and at most {DEVICES} may be")))
    } else {
        Ok(())
    }
}

fn number(field: &str, given: Option<u32>, most: u32) -> Result<(), Problem> {
    match given {
        Some(number) if !(1..=most).contains(&number) => {
            Err(invalid(format!("{field} is {number}; it must be from 1 to {most}")))
        }
        _ => Ok(()),
    }
}

pub(super) fn at_most(field: impl Display, given: &str, most: usize) -> Result<(), Problem> {
    let length = given.chars().count();
    if length > most { Err(invalid(format!("{field} has {length} characters; at most {most} may be"))) } else { Ok(()) }
}

fn text(field: impl Display, given: &str, most: usize) -> Result<(), Problem> {
    if given.is_empty() {
        Err(invalid(format!("{field} is empty; give it a value or leave it out")))
    } else {
        at_most(field, given, most)
    }
}

/// A DNS label.
fn label(field: &str, given: &str) -> Result<(), Problem> {
    if is_label(given) {
        return Ok(());
    }
    Err(invalid(format!(
        "{field} is {:?}; it must be at most {LABEL} lower-case letters, digits and hyphens, with a letter or digit at both ends",
        shown(given)
    )))
}

fn words(field: &str, given: &str) -> Result<(), Problem> {
    text(field, given, LABEL)?;
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if given.bytes().all(good) {
        Ok(())
    } else {
        Err(invalid(format!("{field} is {given:?}; it must be a word such as q35")))
    }
}

/// Enough of a name to find it.
fn shown(name: &str) -> std::borrow::Cow<'_, str> {
    vitivirt_api::text::truncate(name, 80)
}
