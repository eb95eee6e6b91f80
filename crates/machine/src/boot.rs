//! Warnings about a Machine that works. Whether a guest can boot: a Machine whose disks are all empty runs, but its guest finds no operating system. That is
//! not an error: a user may install one over the network or from a CD-ROM that is removed later. Whether other users can
//! read passwords.

use vitivirt_api::{docs_url, machine::Machine};

use crate::{
    assessment::Assessed,
    render::vm::BootOrder,
    resolve::{DiskBacking, Resolved},
};

/// A sentence about a Machine whose boot devices have no content, without a period. It is part of the condition Ready,
/// and `plan` and `render` print it. The admission policy `machines-warnings` applies the same rule.
pub fn boot_warning(assessed: &Assessed) -> Option<String> {
    let resolved = assessed.assessment().resolved.as_ref()?;
    let order = BootOrder::new(resolved);
    let has_content = |name: &&str| has_content(assessed, resolved, name);
    if !order.interfaces.is_empty() || order.disks.iter().any(has_content) {
        return None;
    }
    let disk = order.disks.first()?;
    Some(format!(
        "disk {disk} has no source, so the guest has nothing to boot from unless an operating system was installed on the \
         disk; create the disk with a source, or boot an installer with bootOrder; see {}",
        docs_url("first-machine.md")
    ))
}

/// A sentence about inline user data that seems to contain a password or a private key, without a period. `plan` and
/// `render` print it.
pub fn exposure_warning(machine: &Machine) -> Option<String> {
    const MARKS: [&str; 4] = ["passwd:", "password:", "chpasswd:", "PRIVATE KEY-----"];
    let cloud_init = machine.spec.cloud_init.as_ref()?;
    let fields = [("userData", &cloud_init.user_data), ("networkData", &cloud_init.network_data)];
    let contains_mark = |text: &&String| MARKS.iter().any(|mark| text.contains(mark));
    let (field, _) = fields.into_iter().find(|(_, text)| text.as_ref().filter(contains_mark).is_some())?;
    Some(format!(
        "spec.cloudInit.{field} seems to contain a password or a private key, and every user who can read the Machine can \
         read it; put it into a Secret and name that in spec.cloudInit.secretRef"
    ))
}

fn has_content(assessed: &Assessed, resolved: &Resolved, name: &str) -> bool {
    let Some(disk) = resolved.disks.iter().find(|disk| disk.name == name) else { return false };
    match &disk.backing {
        DiskBacking::ContainerDisk { .. } | DiskBacking::Pvc { source: Some(_), .. } => true,
        DiskBacking::Pvc { source: None, pvc, .. } => {
            // A PVC of a user or of an earlier Machine, and one that KubeVirt restored or moved.
            let adoption = assessed.observed().adoption();
            let is_adopted = adoption.includes_pvc(pvc) || adoption.identity().is_some();
            is_adopted || assessed.assessment().moved_disks.iter().any(|moved| moved == name)
        }
    }
}
