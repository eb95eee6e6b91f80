//! What stands between a Machine and its VM. `plan` and `report` both ask here, so that what is written and what is said
//! can never disagree. The checks are a chain; the first that finds something decides.

use std::collections::BTreeSet;

use vitivirt_api::machine::{LABEL_MACHINE, LABEL_MACHINE_UID, machine_reason as reason};

use crate::changes::{Kind, NO_EXPANSION, Refusal, rule_of};
use crate::observed::{Observed, PvcView, SourceView, StorageClassView};
use crate::problem::Problem;
use crate::quantity::Quantity;
use crate::render::cloud_init::secret_name;
use crate::render::pvc::source_digest;
use crate::resolve::limits::network_configuration;
use crate::resolve::{Content, Resolved, ResolvedDisk, Source, resolve};

pub(crate) struct Assessment {
    /// None if the spec cannot be understood.
    pub(crate) resolved: Option<Resolved>,
    /// Nothing is made while there is one.
    pub(crate) blocker: Option<Problem>,
    /// Changes that can never be made; everything else of the edit still applies.
    pub(crate) rejected_changes: Vec<Refusal>,
}

/// The parts of the spec that can never become true, whatever else does.
pub fn refusals(observed: &Observed) -> Vec<Refusal> {
    assess(observed).rejected_changes
}

/// The NetworkConfigurations because of which the Machine cannot be made; none if it is for another reason.
pub fn networks_at_fault(observed: &Observed) -> Vec<String> {
    assess(observed).blocker.map(|problem| problem.networks).unwrap_or_default()
}

pub(crate) fn assess(observed: &Observed) -> Assessment {
    let mut resolved = match resolve(&observed.machine) {
        Ok(resolved) => resolved,
        Err(problem) => return Assessment { resolved: None, blocker: Some(problem), rejected_changes: Vec::new() },
    };
    let checks: [fn(&Observed, &Resolved) -> Option<Problem>; 8] = [
        taken_names,
        mac_addresses,
        missing_networks,
        missing_multus,
        missing_classes,
        missing_cdi,
        missing_source,
        missing_kubevirt,
    ];
    let blocker = checks.iter().find_map(|check| check(observed, &resolved));
    let rejected_changes = resolved.disks.iter_mut().flat_map(|disk| refused_changes(observed, disk)).collect();
    Assessment { resolved: Some(resolved), blocker, rejected_changes }
}

/// A name that belongs to something else is never shared.
fn taken_names(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    let taken = |what: &str, name: &str, by: &str| {
        Some(Problem::failed(
            reason::NAME_TAKEN,
            format!("{what} {name} exists already and belongs to {by}; rename this Machine or remove the other"),
        ))
    };
    let ours = |controller: &Option<String>| controller.as_deref() == Some(observed.uid());
    if let Some(vm) = observed.vm.as_ref().filter(|vm| !ours(&vm.controller_uid)) {
        if vm.deleting {
            return Some(Problem::pending(
                reason::NAME_TAKEN,
                format!(
                    "an earlier VirtualMachine {} is still going away; this Machine waits for that",
                    observed.name()
                ),
            ));
        }
        return taken("VirtualMachine", observed.name(), "somebody else");
    }
    let wants_secret = resolved.cloud_init.is_some();
    if observed.secret.as_ref().is_some_and(|secret| wants_secret && !ours(&secret.controller_uid)) {
        return taken("Secret", &secret_name(observed.name()), "somebody else");
    }
    for disk in &resolved.disks {
        let Content::Pvc { pvc, .. } = &disk.content else { continue };
        let Some(view) = observed.pvcs.get(pvc) else { continue };
        if view.labels.get(LABEL_MACHINE_UID).map(String::as_str) == Some(observed.uid()) {
            if view.deleting {
                return Some(Problem::pending(
                    reason::PVC_PENDING,
                    format!("PersistentVolumeClaim {pvc} is being deleted; it is made anew when it is gone"),
                ));
            }
            continue;
        }
        let owner =
            view.labels.get(LABEL_MACHINE).map_or("somebody else".to_owned(), |name| match name == observed.name() {
                true => format!("an earlier Machine {name} that kept its disk"),
                false => format!("the Machine {name}"),
            });
        return taken("PersistentVolumeClaim", pvc, &owner);
    }
    None
}

fn mac_addresses(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    resolved.networks.iter().find_map(|network| {
        let on = network.configuration().unwrap_or(vitivirt_api::machine::POD_NETWORK);
        let other = observed.macs_in_use.get(&(on.to_owned(), network.mac.clone()))?;
        let problem = Problem::failed(
            reason::MAC_ADDRESS_IN_USE,
            format!(
                "the MAC address {} of network {} is used by the Machine {other}; choose another",
                network.mac, network.name
            ),
        );
        Some(problem.of_networks(network.configuration()))
    })
}

fn missing_networks(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    resolved.networks.iter().filter_map(|network| network.configuration()).find_map(|name| {
        let message = match observed.networks.get(name) {
            None => {
                format!("there is no NetworkConfiguration {name} in this namespace; create it or correct networkName")
            }
            Some(network) if network.deleting => {
                format!("the NetworkConfiguration {name} is being deleted; create it anew or use another")
            }
            Some(network) => network_configuration(name, network)?,
        };
        Some(Problem::pending(reason::NETWORK_CONFIGURATION_NOT_FOUND, message).of_networks([name]))
    })
}

fn missing_multus(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    let names: BTreeSet<&str> = resolved.networks.iter().filter_map(|network| network.configuration()).collect();
    let name = names.first().filter(|_| !observed.installed.multus)?;
    let message = format!(
        "the network {name} needs Multus, which is not installed in this cluster; install it or use networkName: pod"
    );
    Some(Problem::pending(reason::MULTUS_NOT_INSTALLED, message).of_networks(names.iter().copied()))
}

/// Only PVCs that do not exist yet need their class.
fn missing_classes(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    resolved.disks.iter().find_map(|disk| {
        let Content::Pvc { pvc, storage_class, .. } = &disk.content else { return None };
        if observed.pvcs.contains_key(pvc) || storage_class_of(observed, storage_class.as_deref()).is_some() {
            return None;
        }
        let message = match storage_class.as_deref() {
            None | Some("default") => format!(
                "disk {} uses the default StorageClass, and the cluster has none; mark a class as default or name one",
                disk.name
            ),
            Some(class) => format!("disk {}: there is no StorageClass {class}; create it or name another", disk.name),
        };
        Some(Problem::pending(reason::STORAGE_CLASS_NOT_FOUND, message))
    })
}

/// "default" means the cluster's default class, unless a class of that very name exists.
pub(crate) fn storage_class_of<'a>(observed: &'a Observed, wanted: Option<&str>) -> Option<&'a StorageClassView> {
    let classes = &observed.storage_classes;
    let named = wanted.and_then(|name| classes.iter().find(|class| class.name == name));
    match wanted {
        None | Some("default") => named.or_else(|| classes.iter().find(|class| class.is_default)),
        Some(_) => named,
    }
}

fn missing_cdi(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    let needs = |disk: &&ResolvedDisk| {
        matches!(&disk.content, Content::Pvc { pvc, source: Some(Source::Http(_) | Source::Registry(_)), .. }
            if !observed.pvcs.contains_key(pvc))
    };
    let disk = resolved.disks.iter().find(needs)?;
    (!observed.installed.cdi).then(|| {
        Problem::pending(
            reason::CDI_NOT_INSTALLED,
            format!("disk {} is filled from a URL, which needs CDI (Containerized Data Importer); install it or use another source", disk.name),
        )
    })
}

fn missing_source(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    let source = resolved.cloud_init.as_ref()?.source.as_ref()?;
    let message = match &observed.source {
        SourceView::Forbidden(words) => {
            return Some(Problem::pending(
                reason::PERMISSION_MISSING,
                format!(
                    "cloudInit.secretRef: the Secret {} cannot be read: {words}; grant that to the operator's service \
                     account (config/rbac does), and this Machine goes on by itself",
                    source.name
                ),
            ));
        }
        SourceView::SecretMissing => {
            format!("cloudInit.secretRef: there is no Secret {} in this namespace; create it", source.name)
        }
        SourceView::KeyMissing => {
            format!(
                "cloudInit.secretRef: the Secret {} has no key {}; add it or name another key",
                source.name, source.key
            )
        }
        SourceView::NotNeeded | SourceView::Read(_) | SourceView::Unchanged(_) => return None,
    };
    Some(Problem::pending(reason::SECRET_NOT_FOUND, message))
}

fn missing_kubevirt(observed: &Observed, _: &Resolved) -> Option<Problem> {
    (!observed.installed.kubevirt).then(|| {
        Problem::creating(
            reason::KUBEVIRT_API_ERROR,
            "KubeVirt is not installed in this cluster (no VirtualMachine API); install it, and this Machine goes on by itself",
        )
    })
}

/// What can never change about a PVC that exists. The disk goes on as the PVC is.
fn refused_changes(observed: &Observed, disk: &mut ResolvedDisk) -> Vec<Refusal> {
    let Content::Pvc { pvc, size, storage_class, access_mode, volume_mode, source, .. } = &mut disk.content else {
        return Vec::new();
    };
    let Some(view) = observed.pvcs.get(pvc) else { return Vec::new() };
    let name = &disk.name;
    let refuse = |part: &str, change: Kind, from: &str, to: &str| {
        let field = format!("spec.disks[{name}].{part}");
        let why = rule_of(&field, change).map_or("", |rule| rule.why);
        Refusal { reason: format!("it cannot go from {from} to {to}, because {why}; set it back"), field }
    };
    let mut refused = Vec::new();
    let requested = Quantity::parse(&view.requested);
    if let Some(requested) = requested {
        if size.bytes() < requested.bytes() {
            refused.push(refuse("size", Kind::Shrinks, &view.requested, &size.to_string()));
        }
        if size.bytes() > requested.bytes() && !may_grow(observed, class_of(view)) {
            let (field, from) = (format!("spec.disks[{name}].size"), &view.requested);
            let reason = format!("it cannot go from {from} to {size}, because {NO_EXPANSION}; set it back");
            refused.push(Refusal { field, reason });
        }
    }
    if let Some(class) = storage_class.as_deref().filter(|class| *class != "default" && *class != class_of(view)) {
        refused.push(refuse("storageClass", Kind::Any, class_of(view), class));
    }
    if *access_mode != view.access_mode {
        refused.push(refuse("accessMode", Kind::Any, &view.access_mode, access_mode));
        // Whether the guest may write to the disk follows the PVC.
        access_mode.clone_from(&view.access_mode);
    }
    if *volume_mode != view.volume_mode {
        refused.push(refuse("volumeMode", Kind::Any, &view.volume_mode, volume_mode));
    }
    // What is not known to have been another source is not refused.
    let is_noted = view.source.as_deref() != Some("");
    if is_noted && source.as_ref().map(source_digest) != view.source {
        refused.push(refuse("source", Kind::Any, "what it was filled with", "another"));
    }
    refused
}

fn class_of(view: &PvcView) -> &str {
    view.storage_class.as_deref().unwrap_or_default()
}

/// A class that is gone cannot say no; then the storage decides.
pub(crate) fn may_grow(observed: &Observed, class: &str) -> bool {
    observed.storage_classes.iter().find(|known| known.name == class).is_none_or(|known| known.expands)
}
