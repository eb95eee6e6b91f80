//! Objects and components that a Machine refers to and that are missing.

use std::collections::BTreeSet;

use vitivirt_api::machine::{POD_NETWORK, machine_reason as reason};

use crate::{
    observed::{Observed, SourceView, StorageClassView},
    problem::{Part, Problem},
    resolve::{DiskBacking, PvcSource, Resolved, ResolvedDisk, ResolvedNetwork, limits::network_configuration_error},
};

pub(super) fn mac_address_conflict(observed: &Observed, resolved: &Resolved) -> Vec<Problem> {
    let conflict = |network: &ResolvedNetwork| {
        let network_name = network.configuration().unwrap_or(POD_NETWORK);
        let other = observed.macs_in_use.get(&(network_name.to_owned(), network.mac.clone()))?;
        let problem = Problem::failed(
            reason::MAC_ADDRESS_IN_USE,
            format!(
                "MAC address {} of network {} is already used by Machine {other}; choose another address",
                network.mac, network.name
            ),
        );
        Some(problem.of(Part::Networks).caused_by_networks(network.configuration()))
    };
    resolved.networks.iter().filter_map(conflict).collect()
}

pub(super) fn missing_networks(observed: &Observed, resolved: &Resolved) -> Vec<Problem> {
    let missing = |name: &str| {
        let message = match observed.networks.get(name) {
            None => format!(
                "NetworkConfiguration {name} not found in namespace {}; create it, correct spec.networks[].networkName, or \
                 set it to pod for the pod network",
                observed.namespace()
            ),
            // It stays until no Machine uses it, so a Machine that uses it already is not affected.
            Some(network) if network.deleting && !observed.uses_network(name) => {
                format!("NetworkConfiguration {name} is being deleted; use another network")
            }
            Some(network) => network_configuration_error(name, network.bridge.as_deref(), network.vlan)?,
        };
        let problem = Problem::pending(reason::NETWORK_CONFIGURATION_NOT_FOUND, message);
        Some(problem.of(Part::Networks).caused_by_networks([name]))
    };
    resolved.networks.iter().filter_map(|network| network.configuration()).filter_map(missing).collect()
}

pub(super) fn missing_multus(observed: &Observed, resolved: &Resolved) -> Vec<Problem> {
    let names: BTreeSet<&str> = resolved.networks.iter().filter_map(|network| network.configuration()).collect();
    let Some(name) = names.first().filter(|_| !observed.installed.multus) else { return Vec::new() };
    let message = format!(
        "NetworkConfiguration {name} requires Multus, which is not installed in this cluster; install Multus or set \
         spec.networks[].networkName to pod"
    );
    let problem = Problem::pending(reason::MULTUS_NOT_INSTALLED, message).of(Part::Networks);
    vec![problem.caused_by_networks(names.iter().copied())]
}

/// Only PVCs that do not exist yet need their StorageClass.
pub(super) fn missing_storage_classes(observed: &Observed, resolved: &Resolved) -> Vec<Problem> {
    let missing = |disk: &ResolvedDisk| {
        let DiskBacking::Pvc { pvc, storage_class, .. } = &disk.backing else { return None };
        if observed.pvcs.contains_key(pvc) || find_storage_class(observed, storage_class.as_deref()).is_some() {
            return None;
        }
        let message = match storage_class.as_deref() {
            None | Some("default") => format!(
                "Disk {} uses the default StorageClass, but the cluster has none; mark a StorageClass as default or set \
                 storageClass",
                disk.name
            ),
            Some(class) => {
                format!("Disk {}: StorageClass {class} not found; create it or use another StorageClass", disk.name)
            }
        };
        Some(Problem::pending(reason::STORAGE_CLASS_NOT_FOUND, message).of_disk(&disk.name))
    };
    resolved.disks.iter().filter_map(missing).collect()
}

/// "default" means the cluster's default StorageClass, unless a StorageClass has that name.
pub(crate) fn find_storage_class<'a>(observed: &'a Observed, requested: Option<&str>) -> Option<&'a StorageClassView> {
    let classes = &observed.storage_classes;
    let named = requested.and_then(|name| classes.iter().find(|class| class.name == name));
    match requested {
        None | Some("default") => named.or_else(|| classes.iter().find(|class| class.is_default)),
        Some(_) => named,
    }
}

pub(super) fn missing_cdi(observed: &Observed, resolved: &Resolved) -> Vec<Problem> {
    let needs_import = |disk: &&ResolvedDisk| {
        matches!(&disk.backing,
            DiskBacking::Pvc { pvc, source: Some(PvcSource::Http(_) | PvcSource::Registry(_)), .. }
            if !observed.pvcs.contains_key(pvc))
    };
    let missing = |disk: &ResolvedDisk| {
        let message = format!(
            "Disk {} has a URL as its source, which requires CDI (Containerized Data Importer); install CDI or use \
             another source",
            disk.name
        );
        Problem::pending(reason::CDI_NOT_INSTALLED, message).of_disk(&disk.name)
    };
    let disks = resolved.disks.iter().filter(needs_import).filter(|_| !observed.installed.cdi);
    disks.map(missing).collect()
}

pub(super) fn missing_source_secret(observed: &Observed, resolved: &Resolved) -> Vec<Problem> {
    let Some(source) = resolved.source() else { return Vec::new() };
    let (name, key) = (&source.name, &source.key);
    let (reason, message) = match &observed.source {
        SourceView::Forbidden(error) => (
            reason::PERMISSION_MISSING,
            format!(
                "Secret {name} cannot be read: {error}; grant the permission to the operator's ServiceAccount; the \
                 operator retries automatically"
            ),
        ),
        SourceView::Failed(error) => (
            reason::SECRET_NOT_FOUND,
            format!("Secret {name} cannot be read: {error}; the operator retries automatically"),
        ),
        SourceView::SecretMissing => (
            reason::SECRET_NOT_FOUND,
            format!(
                "Secret {name} not found in namespace {}; create it or correct spec.cloudInit.secretRef.name",
                observed.namespace()
            ),
        ),
        SourceView::KeyMissing => (
            reason::SECRET_NOT_FOUND,
            format!(
                "Secret {name} has no key {key}; add the key, or set spec.cloudInit.secretRef.key to an existing one"
            ),
        ),
        SourceView::NotNeeded | SourceView::Read(_) | SourceView::Unchanged(_) => return Vec::new(),
    };
    vec![Problem::pending(reason, format!("spec.cloudInit.secretRef: {message}")).of(Part::CloudInit)]
}

pub(super) fn missing_kubevirt(observed: &Observed, _: &Resolved) -> Vec<Problem> {
    let problem = (!observed.installed.kubevirt).then(|| {
        Problem::creating(
            reason::KUBEVIRT_API_ERROR,
            "KubeVirt is not installed in this cluster (no VirtualMachine API); install KubeVirt; the operator retries \
             automatically",
        )
    });
    problem.into_iter().collect()
}
