//! Warnings about a Machine that works.
//!
//! - Its guest has nothing to boot from. That is not an error: a user may install an operating system over the network, or
//!   from a CD-ROM that is removed later.
//! - Other users can read a password.
//! - cloud-init does not recognize the user data.

use vitivirt_api::{docs_url, machine::Machine};

use crate::{
    assessment::Assessed,
    render::{
        cloud_init::{is_mime, known_content_type},
        vm::BootOrder,
    },
    resolve::{DiskBacking, Resolved},
};

/// What `plan` and `render` warn about, in sentences without a period.
pub fn warnings(assessed: &Assessed) -> Vec<String> {
    let machine = &assessed.observed().machine;
    boot_warning(assessed).into_iter().chain(exposure_warning(machine)).chain(user_data_warning(machine)).collect()
}

/// A sentence about a Machine whose boot devices have no content, without a period. It is part of the condition Ready.
/// The admission policy `machines-warnings` applies the same rule.
pub(crate) fn boot_warning(assessed: &Assessed) -> Option<String> {
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

/// A sentence about inline user data that seems to contain a password or a private key.
fn exposure_warning(machine: &Machine) -> Option<String> {
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

/// A sentence about inline user data whose first line cloud-init does not recognize. Other programs in the guest may: Ignition
/// reads JSON, cloudbase-init runs scripts for PowerShell and cmd.
fn user_data_warning(machine: &Machine) -> Option<String> {
    // The operator gives each of two parts its type.
    let cloud_init = machine.spec.cloud_init.as_ref().filter(|given| given.secret_ref.is_none())?;
    let text = cloud_init.user_data.as_ref()?;
    let is_recognized = is_mime(text.as_bytes()) || known_content_type(text.as_bytes()).is_some();
    let start = text.trim_start();
    let of_others = start.is_empty() || ["{", "<", "#ps1", "rem cmd"].iter().any(|mark| start.starts_with(mark));
    (!is_recognized && !of_others).then(|| {
        "the first line of spec.cloudInit.userData is not one that cloud-init recognizes, so the guest ignores the user data; \
         start it with #cloud-config for YAML, or with #!/bin/sh for a script"
            .to_owned()
    })
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
