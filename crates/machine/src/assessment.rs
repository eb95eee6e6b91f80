//! What prevents a Machine from being created or changed. `plan` and `report` use the same assessment, so that the
//! writes and the status cannot contradict each other. The checks form a chain; the first one that finds a problem
//! decides.

use std::collections::BTreeSet;

use vitivirt_api::machine::{LABEL_MACHINE, LABEL_MACHINE_UID, POD_NETWORK, machine_reason as reason};

use crate::{
    changes::{ChangeKind, NO_EXPANSION, RejectedChange, rule_of},
    observed::{Observed, PvcView, SecretView, SourceView, StorageClassView},
    problem::Problem,
    render::{cloud_init::secret_name, pvc::source_digest},
    resolve::{DiskBacking, PowerState, PvcSource, Resolved, ResolvedDisk, limits::network_configuration_error},
};

/// The observed state and its assessment, which always belong together. Each reconcile has one.
#[derive(Clone)]
pub struct Assessed {
    observed: Observed,
    assessment: Assessment,
}

impl Assessed {
    pub fn new(observed: Observed) -> Self {
        let assessment = assess(&observed);
        Self { observed, assessment }
    }

    pub fn observed(&self) -> &Observed {
        &self.observed
    }

    pub fn assessment(&self) -> &Assessment {
        &self.assessment
    }

    /// The cloud-init Secret, if the spec has no cloud-init any more. User data is secret, so it is not kept. A VMI that
    /// started with it may still migrate, and a VMI that is about to start may be created from the earlier VM. Therefore
    /// either a VMI exists that does not need the Secret, or the Machine is stopped and has no VMI.
    pub(crate) fn obsolete_secret(&self) -> Option<&SecretView> {
        let observed = &self.observed;
        let resolved = self.assessment.applicable()?;
        let no_vmi_will_start = observed.vmi.is_some() || resolved.power == PowerState::Stopped;
        if resolved.cloud_init.is_some() || !no_vmi_will_start {
            return None;
        }
        let needed = observed.vmi.as_ref().is_some_and(|vmi| vmi.deleting || vmi.needs_user_data);
        let view = observed.secret.as_ref().filter(|_| !needed)?;
        (!view.deleting && observed.controls(view.controller_uid.as_deref())).then_some(view)
    }

    /// Whether the plan deletes user data, which cannot be restored. The caches may lag, so the operator first reads the
    /// Secret and the VMI from the API server.
    pub fn discards_user_data(&self) -> bool {
        !self.observed.is_deleting() && self.obsolete_secret().is_some()
    }

    /// The observed state alone, to be completed and assessed again.
    pub fn into_observed(self) -> Observed {
        self.observed
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Assessment {
    /// The parsed spec, without the rejected changes. None if the spec is invalid.
    pub resolved: Option<Resolved>,
    /// Why nothing can be written now.
    pub blocker: Option<Problem>,
    /// Changes that are impossible. The other changes of the same edit still apply.
    pub rejected_changes: Vec<RejectedChange>,
}

impl Assessment {
    /// The parsed spec, if nothing prevents it from being applied.
    pub(crate) fn applicable(&self) -> Option<&Resolved> {
        self.resolved.as_ref().filter(|_| self.blocker.is_none())
    }

    /// The NetworkConfigurations that block the Machine.
    pub fn networks_at_fault(&self) -> &[String] {
        self.blocker.as_ref().map(|problem| problem.networks.as_slice()).unwrap_or_default()
    }
}

type Check = fn(&Observed, &Resolved) -> Option<Problem>;

fn assess(observed: &Observed) -> Assessment {
    let mut resolved = match &observed.resolved {
        Ok(resolved) => resolved.clone(),
        Err(problem) => {
            return Assessment { resolved: None, blocker: Some(problem.clone()), rejected_changes: Vec::new() };
        }
    };
    let checks: [Check; 8] = [
        name_conflict,
        mac_address_conflict,
        missing_network,
        missing_multus,
        missing_storage_class,
        missing_cdi,
        missing_source_secret,
        missing_kubevirt,
    ];
    let blocker = checks.iter().find_map(|check| check(observed, &resolved));
    let rejected_changes = resolved.disks.iter_mut().flat_map(|disk| reject_changes(observed, disk)).collect();
    Assessment { resolved: Some(resolved), blocker, rejected_changes }
}

/// The operator never takes over an object of another owner.
fn name_conflict(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    let foreign = |kind: &str, name: &str| {
        Problem::failed(
            reason::NAME_TAKEN,
            format!(
                "{kind} {name} already exists and does not belong to this Machine; delete the {kind}, or create this \
                 Machine under another name"
            ),
        )
    };
    if let Some(vm) = observed.vm.as_ref().filter(|vm| !observed.controls(vm.controller_uid.as_deref())) {
        if vm.deleting {
            return Some(Problem::pending(
                reason::NAME_TAKEN,
                format!(
                    "VirtualMachine {} of a previous owner is being deleted; the operator continues when it is gone",
                    observed.name()
                ),
            ));
        }
        return Some(foreign("VirtualMachine", observed.name()));
    }
    let foreign_secret = observed.secret.as_ref().filter(|secret| !observed.controls(secret.controller_uid.as_deref()));
    if resolved.cloud_init.is_some() && foreign_secret.is_some() {
        return Some(foreign("Secret", &secret_name(observed.name())));
    }
    resolved.disks.iter().find_map(|disk| {
        let DiskBacking::Pvc { pvc: name, .. } = &disk.backing else { return None };
        let pvc = observed.pvcs.get(name)?;
        if pvc.labels.get(LABEL_MACHINE_UID).map(String::as_str) == Some(observed.uid()) {
            return pvc.deleting.then(|| {
                Problem::pending(
                    reason::PVC_PENDING,
                    format!(
                        "PersistentVolumeClaim {name} is being deleted; the operator creates it again when it is gone"
                    ),
                )
            });
        }
        Some(match pvc.labels.get(LABEL_MACHINE) {
            None => foreign("PersistentVolumeClaim", name),
            Some(machine) if machine == observed.name() => retained_pvc(observed, name),
            Some(machine) => Problem::failed(
                reason::NAME_TAKEN,
                format!(
                    "PersistentVolumeClaim {name} already exists and belongs to Machine {machine}; delete the PVC, \
                     or create this Machine under another name"
                ),
            ),
        })
    })
}

/// A PVC that an earlier Machine of the same name left behind. The label with the UID decides which Machine it
/// belongs to.
fn retained_pvc(observed: &Observed, pvc: &str) -> Problem {
    let (machine, namespace, uid) = (observed.name(), observed.id.namespace(), observed.uid());
    Problem::failed(
        reason::NAME_TAKEN,
        format!(
            "PersistentVolumeClaim {pvc} already exists: it was retained when an earlier Machine {machine} was \
             deleted; to use it for this Machine, run `kubectl -n {namespace} label pvc {pvc} \
             {LABEL_MACHINE_UID}={uid} --overwrite`; otherwise delete the PVC, or create this Machine under another \
             name"
        ),
    )
}

fn mac_address_conflict(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    resolved.networks.iter().find_map(|network| {
        let network_name = network.configuration().unwrap_or(POD_NETWORK);
        let other = observed.macs_in_use.get(&(network_name.to_owned(), network.mac.clone()))?;
        let problem = Problem::failed(
            reason::MAC_ADDRESS_IN_USE,
            format!(
                "MAC address {} of network {} is already used by Machine {other}; choose another address",
                network.mac, network.name
            ),
        );
        Some(problem.caused_by_networks(network.configuration()))
    })
}

fn missing_network(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    resolved.networks.iter().filter_map(|network| network.configuration()).find_map(|name| {
        let message = match observed.networks.get(name) {
            None => {
                format!("NetworkConfiguration {name} not found in this namespace; create it or correct networkName")
            }
            Some(network) if network.deleting => {
                format!("NetworkConfiguration {name} is being deleted; create it again or use another network")
            }
            Some(network) => network_configuration_error(name, network.bridge.as_deref(), network.vlan)?,
        };
        Some(Problem::pending(reason::NETWORK_CONFIGURATION_NOT_FOUND, message).caused_by_networks([name]))
    })
}

fn missing_multus(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    let names: BTreeSet<&str> = resolved.networks.iter().filter_map(|network| network.configuration()).collect();
    let name = names.first().filter(|_| !observed.installed.multus)?;
    let message = format!(
        "Network {name} requires Multus, which is not installed in this cluster; install Multus or use networkName: pod"
    );
    Some(Problem::pending(reason::MULTUS_NOT_INSTALLED, message).caused_by_networks(names.iter().copied()))
}

/// Only PVCs that do not exist yet need their StorageClass.
fn missing_storage_class(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    resolved.disks.iter().find_map(|disk| {
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
        Some(Problem::pending(reason::STORAGE_CLASS_NOT_FOUND, message))
    })
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

fn missing_cdi(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    let needs_import = |disk: &&ResolvedDisk| {
        matches!(&disk.backing,
            DiskBacking::Pvc { pvc, source: Some(PvcSource::Http(_) | PvcSource::Registry(_)), .. }
            if !observed.pvcs.contains_key(pvc))
    };
    let disk = resolved.disks.iter().find(needs_import).filter(|_| !observed.installed.cdi)?;
    let message = format!(
        "Disk {} has a URL as its source, which requires CDI (Containerized Data Importer); install CDI or use another \
         source",
        disk.name
    );
    Some(Problem::pending(reason::CDI_NOT_INSTALLED, message))
}

fn missing_source_secret(observed: &Observed, resolved: &Resolved) -> Option<Problem> {
    let source = resolved.cloud_init.as_ref()?.source.as_ref()?;
    let (name, key) = (&source.name, &source.key);
    let (reason, message) = match &observed.source {
        SourceView::Forbidden(error) => (
            reason::PERMISSION_MISSING,
            format!(
                "Secret {name} cannot be read: {error}; grant the permission to the operator's ServiceAccount; the \
                 operator retries automatically"
            ),
        ),
        SourceView::SecretMissing => (
            reason::SECRET_NOT_FOUND,
            format!("Secret {name} not found in this namespace; create it or correct secretRef.name"),
        ),
        SourceView::KeyMissing => (
            reason::SECRET_NOT_FOUND,
            format!("Secret {name} has no key {key}; add the key, or set secretRef.key to an existing one"),
        ),
        SourceView::NotNeeded | SourceView::Read(_) | SourceView::Unchanged(_) => return None,
    };
    Some(Problem::pending(reason, format!("spec.cloudInit.secretRef: {message}")))
}

fn missing_kubevirt(observed: &Observed, _: &Resolved) -> Option<Problem> {
    (!observed.installed.kubevirt).then(|| {
        Problem::creating(
            reason::KUBEVIRT_API_ERROR,
            "KubeVirt is not installed in this cluster (no VirtualMachine API); install KubeVirt; the operator retries \
             automatically",
        )
    })
}

/// Changes that an existing PVC does not allow. The disk stays as the PVC is.
fn reject_changes(observed: &Observed, disk: &mut ResolvedDisk) -> Vec<RejectedChange> {
    let DiskBacking::Pvc { pvc, size, storage_class, access_mode, volume_mode, source, .. } = &mut disk.backing else {
        return Vec::new();
    };
    let Some(view) = observed.pvcs.get(pvc) else { return Vec::new() };
    let name = &disk.name;
    let reject_because = |part: &str, from: &str, to: &str, why: &str| RejectedChange {
        field: format!("spec.disks[{name}].{part}"),
        reason: format!("cannot change from {from} to {to}: {why}; revert the change"),
    };
    let reject = |part: &str, change: ChangeKind, from: &str, to: &str| {
        let why = rule_of(&format!("spec.disks[{name}].{part}"), change).map_or("", |rule| rule.why);
        reject_because(part, from, to, why)
    };
    let mut rejected = Vec::new();
    if let Some(requested) = view.requested_size() {
        if *size < requested {
            rejected.push(reject("size", ChangeKind::Shrinks, &view.requested, &size.to_string()));
        }
        if *size > requested && !allows_expansion(observed, storage_class_of(view)) {
            rejected.push(reject_because("size", &view.requested, &size.to_string(), NO_EXPANSION));
        }
    }
    let actual_class = storage_class_of(view);
    if let Some(class) = storage_class.as_deref().filter(|class| *class != "default" && *class != actual_class) {
        rejected.push(reject("storageClass", ChangeKind::Any, actual_class, class));
    }
    if *access_mode != view.access_mode {
        rejected.push(reject("accessMode", ChangeKind::Any, view.access_mode.as_str(), access_mode.as_str()));
        // The PVC decides whether the guest may write to the disk.
        *access_mode = view.access_mode;
    }
    if *volume_mode != view.volume_mode {
        rejected.push(reject("volumeMode", ChangeKind::Any, view.volume_mode.as_str(), volume_mode.as_str()));
    }
    // An empty digest means that the source of the PVC is unknown. Then a change cannot be detected.
    let source_is_known = view.source.as_deref() != Some("");
    if source_is_known && source.as_ref().map(source_digest) != view.source {
        rejected.push(reject("source", ChangeKind::Any, "its original source", "another source"));
    }
    rejected
}

fn storage_class_of(view: &PvcView) -> &str {
    view.storage_class.as_deref().unwrap_or_default()
}

/// If the StorageClass no longer exists, the operator tries, and the API server decides.
pub(crate) fn allows_expansion(observed: &Observed, class: &str) -> bool {
    observed.storage_classes.iter().find(|known| known.name == class).is_none_or(|known| known.allows_expansion)
}
