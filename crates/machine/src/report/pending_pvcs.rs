//! The PVCs that a machine waits for, and those that lost their volumes. `summary` and the condition StorageReady use the
//! same message.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use vitivirt_api::machine::PvcPhase;

use crate::{
    assessment::Assessment,
    observed::{Observed, PvcView},
    resolve::DiskBacking,
};

/// PVCs that are not bound.
pub(super) struct PendingPvcs {
    /// Their names, and what each waits for.
    pub(super) message: String,
    /// One of them waits only for its volume, for longer than [`PROVISIONING`].
    pub(super) overdue: bool,
    /// One of them has lost its volume.
    pub(super) lost: bool,
}

/// How long the storage may take to create an empty volume before that is an error. Filling a volume may take hours.
const PROVISIONING: SignedDuration = SignedDuration::from_mins(1);

pub(super) fn pending_pvcs(observed: &Observed, assessment: &Assessment) -> Option<PendingPvcs> {
    let resolved = assessment.resolved.as_ref()?;
    let (mut pending, mut overdue, mut lost) = (Vec::new(), false, false);
    for disk in resolved.disks.iter().filter(|disk| !assessment.moved_disks.contains(&disk.name)) {
        let DiskBacking::Pvc { pvc, .. } = &disk.backing else { continue };
        let view = observed.pvcs.get(pvc);
        if view.is_some_and(|view| view.phase == PvcPhase::Bound) {
            continue;
        }
        if let Some(view) = view.filter(|view| view.phase == PvcPhase::Lost) {
            lost = true;
            pending.push(lost_message(pvc, view));
            continue;
        }
        let class = view.and_then(|view| view.storage_class.as_deref());
        let waits =
            observed.storage_classes.iter().any(|known| Some(known.name.as_str()) == class && known.waits_for_consumer);
        overdue |= !waits && view.is_some_and(|view| is_overdue(observed, view));
        pending.push(match (view, waits) {
            (None, _) if !assessment.problems.is_empty() => {
                format!(
                    "PersistentVolumeClaim {pvc} does not exist; see condition Ready for what prevents its creation"
                )
            }
            (None, _) => format!("PersistentVolumeClaim {pvc} is being created"),
            (Some(_), true) => {
                format!(
                    "PersistentVolumeClaim {pvc} will be bound when the machine's pod is scheduled \
                     (WaitForFirstConsumer)"
                )
            }
            (Some(_), false) => format!(
                "PersistentVolumeClaim {pvc} is waiting for a volume from StorageClass {}; see `kubectl -n {} describe \
                 pvc {pvc}`",
                class.unwrap_or_default(),
                observed.namespace()
            ),
        });
    }
    (!pending.is_empty()).then(|| PendingPvcs { message: pending.join("; "), overdue, lost })
}

fn lost_message(pvc: &str, view: &PvcView) -> String {
    let volume = view.volume.as_deref().unwrap_or_default();
    format!(
        "PersistentVolumeClaim {pvc} has lost its data: PersistentVolume {volume} no longer exists; create the \
         PersistentVolume again if its storage still exists, or delete the PVC and restore it from a backup"
    )
}

fn is_overdue(observed: &Observed, pvc: &PvcView) -> bool {
    let since = Timestamp::from_second(pvc.created).unwrap_or(observed.now);
    pvc.source.is_none() && observed.now.duration_since(since) > PROVISIONING
}
