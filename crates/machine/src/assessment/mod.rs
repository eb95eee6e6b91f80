//! What prevents a Machine from being created or changed. `plan` and `report` use the same assessment, so that the
//! writes and the status cannot contradict each other. Each problem stops one part of the Machine; the status reports
//! the first one.

mod disks;
mod names;
mod references;

use std::collections::BTreeSet;

use vitivirt_api::machine::{DiskStatus, VmiPhase};

pub(crate) use self::{
    disks::{allows_expansion, never_bound},
    names::adoption_remedy,
    references::find_storage_class,
};
use crate::{
    changes::RejectedChange,
    observed::{Observed, SecretView, VmiView},
    ownership::{self, Ownership},
    problem::{Part, Problem},
    render::live_parts::pvc_of,
    resolve::{DiskBacking, PowerState, Resolved, ResolvedDisk, pvc_name},
};

/// The observed state and its assessment, which always belong together. Each reconcile has one.
#[derive(Clone)]
pub struct Assessed {
    observed: Observed,
    assessment: Assessment,
}

/// The VMI that never ran and was created from an earlier VM.
pub(crate) fn replaced_vmi(observed: &Observed) -> Option<&VmiView> {
    let (vm, vmi) = (observed.own_vm()?, observed.vmi.as_ref()?);
    let never_ran = matches!(vmi.phase, VmiPhase::Unset | VmiPhase::Pending | VmiPhase::Scheduling) && !vmi.deleting;
    let outdated = vmi.vm_generation.is_some_and(|generation| generation < vm.generation);
    (never_ran && outdated).then_some(vmi)
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
        observed.own_secret().filter(|view| !needed && !view.deleting)
    }

    /// Whether the plan deletes user data, which cannot be restored. The caches may lag, so the operator first reads the
    /// Secret and the VMI from the API server.
    pub fn discards_user_data(&self) -> bool {
        !self.observed.is_deleting() && self.obsolete_secret().is_some()
    }

    /// The PVCs that the plan deletes because they never had a volume, and that only a cache shows. The cache may lag, so
    /// the operator first reads them from the API server.
    pub fn unconfirmed_pvcs(&self) -> Vec<String> {
        let is_cached = |name: &&String| self.observed.pvcs.get(*name).is_some_and(|view| view.live_version.is_none());
        let replaced = self.assessment.replaced_pvcs.iter().filter(is_cached);
        replaced.filter(|_| !self.observed.is_deleting()).cloned().collect()
    }

    /// Whether the plan deletes a VMI that never ran, and that only a cache shows.
    pub fn replaces_unconfirmed_vmi(&self) -> bool {
        let vmi = replaced_vmi(&self.observed).filter(|_| !self.observed.is_deleting());
        vmi.is_some_and(|vmi| vmi.live_version.is_none())
    }

    /// Whether the plan gives an object an owner reference as soon as the API server has confirmed that the Machine is not
    /// being deleted.
    pub fn needs_confirmed_machine(&self) -> bool {
        let observed = &self.observed;
        let vm_lacks_owner = observed.own_vm().is_some_and(|vm| vm.controller_uid.is_none());
        let secret_lacks_owner = observed.own_secret().is_some_and(|secret| secret.controller_uid.is_none());
        let has_user_data = self.assessment.resolved.as_ref().is_some_and(|resolved| resolved.cloud_init.is_some());
        let is_lost = observed.lost_vm() || has_user_data && observed.lost_secret();
        !observed.machine_confirmed && !observed.is_deleting() && (vm_lacks_owner || secret_lacks_owner || is_lost)
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
    /// What prevents parts of the spec from being applied now.
    pub problems: Vec<Problem>,
    /// Changes that are impossible. The other changes of the same edit still apply.
    pub rejected_changes: Vec<RejectedChange>,
    /// PVCs that never held data and differ from the spec: they are deleted and created again.
    pub replaced_pvcs: BTreeSet<String>,
    /// Disks that a user or KubeVirt moved to a PVC that does not belong to the Machine, and disks that KubeVirt is migrating.
    pub moved_disks: BTreeSet<String>,
}

impl Assessment {
    /// The parsed spec, if nothing prevents any part of it from being applied.
    pub(crate) fn applicable(&self) -> Option<&Resolved> {
        self.resolved.as_ref().filter(|_| self.problems.is_empty())
    }

    /// The problem that the status reports.
    pub fn blocker(&self) -> Option<&Problem> {
        self.problems.first()
    }

    pub(crate) fn stops(&self, part: &Part) -> bool {
        self.problems.iter().any(|problem| problem.part == *part)
    }

    pub(crate) fn stops_disk(&self, name: &str) -> bool {
        self.stops(&Part::Disk(name.to_owned()))
    }

    /// The NetworkConfigurations that cause a problem.
    pub fn networks_at_fault(&self) -> Vec<String> {
        self.problems.iter().flat_map(|problem| problem.networks.iter().cloned()).collect()
    }
}

type AssessmentCheck = fn(&Observed, &Resolved) -> Vec<Problem>;

pub(crate) fn assess(observed: &Observed) -> Assessment {
    let mut resolved = match &observed.resolved {
        Ok(resolved) => resolved.clone(),
        Err(problem) => {
            return Assessment {
                resolved: None,
                problems: vec![problem.clone()],
                rejected_changes: Vec::new(),
                replaced_pvcs: BTreeSet::new(),
                moved_disks: BTreeSet::new(),
            };
        }
    };
    let moved_disks = follow_pvcs(observed, &mut resolved);
    // The checks of disks do not concern those that are no longer in a PVC of the Machine.
    let mut own = resolved.clone();
    own.disks.retain(|disk| !moved_disks.contains(&disk.name));
    let checks: [AssessmentCheck; 9] = [
        names::conflicts,
        references::mac_address_conflict,
        references::missing_networks,
        references::missing_multus,
        disks::lost_disks,
        references::missing_storage_classes,
        references::missing_cdi,
        references::missing_source_secret,
        references::missing_kubevirt,
    ];
    let mut problems: Vec<Problem> = checks.iter().flat_map(|check| check(observed, &own)).collect();
    let (mut rejected_changes, mut replaced_pvcs) = (Vec::new(), BTreeSet::new());
    for disk in resolved.disks.iter_mut().filter(|disk| !moved_disks.contains(&disk.name)) {
        let differences = disks::differences(observed, disk);
        if differences.is_empty() {
            continue;
        }
        match &disk.backing {
            DiskBacking::Pvc { pvc, .. } if never_bound(observed, pvc) => {
                problems.extend(disks::unconfirmed_replacement(observed, &disk.name, pvc));
                replaced_pvcs.insert(pvc.clone());
            }
            _ => {
                rejected_changes.extend(differences);
                disks::keep_access_mode(observed, disk);
            }
        }
    }
    Assessment { resolved: Some(resolved), problems, rejected_changes, replaced_pvcs, moved_disks }
}

/// KubeVirt's restore and its volume migration replace the PVC of a volume in the VM. If the new PVC belongs to the Machine,
/// the disk is in that PVC from now on, also if the PVC is lost later. Returns the disks with a PVC of another owner, and those
/// that are not in their new PVC yet.
///
/// If the VM does not have the volume, because it does not exist or the disk is new, the disk is where it was last. The PVC
/// from before a restore has old data, so a new VM must not start with it.
fn follow_pvcs(observed: &Observed, resolved: &mut Resolved) -> BTreeSet<String> {
    let mut moved = BTreeSet::new();
    for ResolvedDisk { name, backing, .. } in &mut resolved.disks {
        let DiskBacking::Pvc { pvc, .. } = backing else { continue };
        let claim = observed.own_vm().and_then(|vm| pvc_of(&vm.spec, name));
        match claim {
            // Only the source of a volume migration has all the data.
            Some(_) if migration_source(observed, name).is_some_and(|source| Some(source) != claim) => {
                moved.insert(name.clone());
            }
            Some(claim) if claim == pvc => {}
            Some(claim) if is_own_pvc(observed, name, claim) => claim.clone_into(pvc),
            Some(_) => _ = moved.insert(name.clone()),
            None => {
                if let Some(last) = last_pvc(observed, name) {
                    last.clone_into(pvc);
                }
            }
        }
    }
    moved
}

/// The PVC from which KubeVirt copies a disk, or failed to copy it.
pub(crate) fn migration_source<'a>(observed: &'a Observed, disk: &str) -> Option<&'a str> {
    observed.own_vm()?.migration_sources.get(disk).map(String::as_str)
}

fn is_own_pvc(observed: &Observed, disk: &str, pvc: &str) -> bool {
    let is_recorded =
        || observed.recorded_disk(pvc).is_some_and(|recorded| recorded.name == disk && !recorded.external);
    observed.pvcs.get(pvc).map_or_else(is_recorded, |view| {
        ownership::pvc(observed, pvc, view).is_own() && (!view.deleting || is_recorded())
    })
}

/// The PVC in which the disk was last: the status says it, or an annotation of the PVC if the Machine was restored from a
/// backup, without its status. A lost PVC is reported under its name, unless a user consented to a replacement. With the
/// same consent a user gives up an external PVC.
fn last_pvc<'a>(observed: &'a Observed, disk: &str) -> Option<&'a str> {
    let last = observed.recorded_disks().iter().find(|recorded| recorded.name == disk);
    last.filter(|last| !is_replaced(observed, last))
        .map(|last| last.pvc.as_str())
        .or_else(|| marked_pvc(observed, disk))
}

fn is_replaced(observed: &Observed, last: &DiskStatus) -> bool {
    let can_be_given_up = last.external || !observed.pvcs.contains_key(&last.pvc);
    can_be_given_up && observed.live_check_failure.is_none() && observed.consents_to_replace(last)
}

/// The PVC whose annotation names the disk. There are two if the operator stopped while it replaced the annotation.
fn marked_pvc<'a>(observed: &'a Observed, disk: &str) -> Option<&'a str> {
    let is_external = |name: &str| observed.recorded_disk(name).is_some_and(|recorded| recorded.external);
    let marked = observed.pvcs.iter().filter(|(name, pvc)| pvc.disk.as_deref() == Some(disk) && !is_external(name));
    let candidates = marked.filter_map(|(name, pvc)| match ownership::pvc(observed, name, pvc) {
        Ownership::Own | Ownership::Unmarked => Some(((true, pvc.created), name)),
        // The Machine waits for the consent to use it.
        Ownership::Adoptable(_) => Some(((false, pvc.created), name)),
        Ownership::Leaving | Ownership::Foreign => None,
    });
    candidates.max().map(|(_, name)| name.as_str())
}

/// What a new VM gets if a user gives up the PVC in which the disk was last.
fn disk_instead(observed: &Observed, disk: &str) -> String {
    let default = pvc_name(observed.name(), disk);
    match marked_pvc(observed, disk).or_else(|| observed.pvcs.get_key_value(&default).map(|(name, _)| name.as_str())) {
        Some(pvc) => format!("PersistentVolumeClaim {pvc}, which holds the disk from before it was restored or moved"),
        None => "a new disk".to_owned(),
    }
}
