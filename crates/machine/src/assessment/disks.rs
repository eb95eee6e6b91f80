//! Disks that differ from their PVCs, and PVCs that are lost.

use vitivirt_api::machine::{DiskStatus, PvcPhase, machine_reason as reason};

use super::{disk_instead, names::replace_command};
use crate::{
    changes::{ChangeKind, NO_EXPANSION, RejectedChange, rule_of},
    observed::{Observed, PvcView},
    ownership::{self, Ownership},
    problem::Problem,
    render::{live_parts::pvc_of, pvc::source_digest},
    resolve::{DiskBacking, Resolved, ResolvedDisk},
};

impl Observed {
    /// The PVCs in the status that must be read, because no cache has them: a PVC of the Machine that may have lost the label
    /// which the watch selects, and an external PVC that the VM will need or that the Machine adopts.
    pub fn uncached_pvcs(&self) -> Vec<String> {
        let is_needed = |disk: &&DiskStatus| {
            let is_attached = || self.own_vm().is_some_and(|vm| pvc_of(&vm.spec, &disk.name).is_some());
            let has_pvc =
                |known: &ResolvedDisk| known.name == disk.name && matches!(&known.backing, DiskBacking::Pvc { .. });
            let is_in_spec = || self.resolved.as_ref().is_ok_and(|spec| spec.disks.iter().any(has_pvc));
            !disk.external || self.adoption().includes_pvc(&disk.pvc) || is_in_spec() && !is_attached()
        };
        let missing = self.recorded_disks().iter().filter(|disk| !self.pvcs.contains_key(&disk.pvc));
        missing.filter(is_needed).map(|disk| disk.pvc.clone()).collect()
    }
}

/// Changes that an existing PVC does not allow.
pub(super) fn differences(observed: &Observed, disk: &ResolvedDisk) -> Vec<RejectedChange> {
    let DiskBacking::Pvc { pvc, size, storage_class, access_mode, volume_mode, source, .. } = &disk.backing else {
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
        let waits = view.phase != PvcPhase::Bound;
        if *size > requested && !waits && !allows_expansion(observed, storage_class_of(view)) {
            rejected.push(reject_because("size", &view.requested, &size.to_string(), NO_EXPANSION));
        }
    }
    let actual_class = storage_class_of(view);
    if let Some(class) = storage_class.as_deref().filter(|class| *class != "default" && *class != actual_class) {
        rejected.push(reject("storageClass", ChangeKind::Any, actual_class, class));
    }
    if *access_mode != view.access_mode {
        rejected.push(reject("accessMode", ChangeKind::Any, view.access_mode.as_str(), access_mode.as_str()));
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

/// The PVC decides whether the guest may write to the disk.
pub(super) fn keep_access_mode(observed: &Observed, disk: &mut ResolvedDisk) {
    if let DiskBacking::Pvc { pvc, access_mode, .. } = &mut disk.backing
        && let Some(view) = observed.pvcs.get(pvc)
    {
        *access_mode = view.access_mode;
    }
}

/// Disks whose PVC was bound and no longer exists. The operator does not replace it by an empty one without consent.
pub(super) fn lost_disks(observed: &Observed, resolved: &Resolved) -> Vec<Problem> {
    let lost = |disk: &ResolvedDisk| {
        let DiskBacking::Pvc { pvc, .. } = &disk.backing else { return None };
        let recorded = lost_disk(observed, pvc)?;
        if let Some(failure) = &observed.live_check_failure {
            let message = format!(
                "PersistentVolumeClaim {pvc} of disk {} may be lost: {}; the operator retries automatically",
                disk.name, failure.message
            );
            return Some(Problem::pending(reason::PVC_PENDING, message).of_disk(&disk.name));
        }
        let was = match recorded.volume.as_str() {
            "" => "the VirtualMachine used it".to_owned(),
            volume => format!("it was bound to volume {volume}"),
        };
        // The name stays if the VM exists. A new VM gets the PVC that the spec names.
        let is_created = observed.is_named_by_spec(pvc) || observed.own_vm().is_some();
        let instead = if is_created { "an empty disk".to_owned() } else { disk_instead(observed, &disk.name) };
        let message = format!(
            "PersistentVolumeClaim {pvc} of disk {} no longer exists; {was}; restore the PVC from a backup, or start with \
             {instead}: run {}",
            disk.name,
            replace_command(observed, recorded)
        );
        Some(Problem::failed(reason::PVC_LOST, message).of_disk(&disk.name))
    };
    resolved.disks.iter().filter_map(lost).collect()
}

/// A PVC that cannot be replaced now, because the API server did not confirm that it holds no data.
pub(super) fn unconfirmed_replacement(observed: &Observed, disk: &str, pvc: &str) -> Option<Problem> {
    let failure = observed.live_check_failure.as_ref()?;
    observed.pvcs.get(pvc).filter(|view| view.live_version.is_none())?;
    let message = format!(
        "PersistentVolumeClaim {pvc} of disk {disk} differs from the spec and cannot be replaced: {}; the operator retries \
         automatically",
        failure.message
    );
    Some(Problem::pending(reason::PVC_PENDING, message).of_disk(disk))
}

/// What the status records for a PVC that does not exist any more, unless a user consented to its replacement.
fn lost_disk<'a>(observed: &'a Observed, pvc: &str) -> Option<&'a DiskStatus> {
    if observed.pvcs.contains_key(pvc) {
        return None;
    }
    let recorded = observed.recorded_disk(pvc)?;
    let has_consent = observed.consents_to_replace(recorded);
    (!has_consent || observed.live_check_failure.is_some()).then_some(recorded)
}

/// Whether a PVC never had a volume, so that it holds no data, and was created from the spec. A PVC of a user, of a backup or of
/// KubeVirt's restore may have a source that the spec does not name.
pub(crate) fn never_bound(observed: &Observed, pvc: &str) -> bool {
    let is_unbound = |view: &PvcView| view.phase == PvcPhase::Pending && view.volume.is_none();
    let is_created_from_spec = |view: &PvcView| {
        view.identity.as_deref() == Some(observed.uid())
            && view.source.as_deref() != Some("")
            && view.adopt_by.is_none()
    };
    let is_own = |view: &PvcView| ownership::pvc(observed, pvc, view) == Ownership::Own;
    observed.pvcs.get(pvc).is_some_and(|view| is_unbound(view) && is_own(view) && is_created_from_spec(view))
        && observed.recorded_disk(pvc).is_none()
        && observed.is_named_by_spec(pvc)
}

fn storage_class_of(view: &PvcView) -> &str {
    view.storage_class.as_deref().unwrap_or_default()
}

/// If the StorageClass no longer exists, the operator tries, and the API server decides.
pub(crate) fn allows_expansion(observed: &Observed, class: &str) -> bool {
    observed.storage_classes.iter().find(|known| known.name == class).is_none_or(|known| known.allows_expansion)
}
