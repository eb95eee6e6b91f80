//! Names that other objects have. The operator never takes over an object of another owner without consent.

use vitivirt_api::machine::{
    ANNOTATION_ADOPT, ANNOTATION_ADOPT_BY, ANNOTATION_REPLACE, Adoption, DiskStatus, LABEL_MACHINE,
    machine_reason as reason,
};

use super::disk_instead;
use crate::{
    observed::{Observed, consent_to_replace},
    ownership::{self, Ownership},
    problem::{Part, Problem},
    render::{cloud_init::secret_name, pvc::needs_import_source},
    resolve::{DiskBacking, Resolved},
};

pub(super) fn conflicts(observed: &Observed, resolved: &Resolved) -> Vec<Problem> {
    let mut found: Vec<(Problem, Option<String>)> = Vec::new();
    if let Some(vm) = &observed.vm {
        let conflict = conflict("VirtualMachine", observed.name(), None, ownership::vm(observed, vm));
        found.extend(conflict.map(|(problem, item)| (problem.of(Part::Machine), item)));
    }
    if let Some(secret) = observed.secret.as_ref().filter(|_| resolved.cloud_init.is_some()) {
        let name = secret_name(observed.name());
        let conflict = conflict("Secret", &name, None, ownership::secret(observed, secret));
        found.extend(conflict.map(|(problem, item)| (problem.of(Part::CloudInit), item)));
    }
    for disk in &resolved.disks {
        let DiskBacking::Pvc { pvc: name, .. } = &disk.backing else { continue };
        let conflict_of_pvc = moved_disk(observed, name).or_else(|| pvc_conflict(observed, name));
        found.extend(conflict_of_pvc.map(|(problem, item)| (problem.of_disk(&disk.name), item)));
        let source = observed.import_sources.get(name).filter(|_| needs_import_source(&disk.backing));
        let conflict = source
            .and_then(|source| conflict("VolumeImportSource", name, None, ownership::import_source(observed, source)));
        found.extend(conflict.map(|(problem, item)| (problem.of_disk(&disk.name), item)));
    }
    let items: Vec<String> = found.iter().filter_map(|(_, item)| item.clone()).collect();
    let with_command = |(problem, item): (Problem, Option<String>)| match item {
        Some(_) => problem.with_remedy(&adoption_remedy(observed, items.iter().map(String::as_str))),
        None => problem,
    };
    found.into_iter().map(with_command).collect()
}

/// A disk that a user or KubeVirt moved to a PVC of another owner. The VM that used the PVC is gone, or the disk was removed from it.
/// To use the PVC again needs consent.
fn moved_disk(observed: &Observed, name: &str) -> Option<(Problem, Option<String>)> {
    let recorded = observed.recorded_disk(name).filter(|recorded| recorded.external)?;
    let item = match ownership::pvc(observed, name, observed.pvcs.get(name)?) {
        Ownership::Own | Ownership::Unmarked => return None,
        Ownership::Adoptable(item) => Some(item),
        Ownership::Leaving | Ownership::Foreign => None,
    };
    let message = format!(
        "Disk {} was moved to PersistentVolumeClaim {name}, which does not belong to this Machine, and no \
         VirtualMachine of the Machine uses it now; to start with {}, run {}",
        recorded.name,
        disk_instead(observed, &recorded.name),
        replace_command(observed, recorded)
    );
    Some((Problem::failed(reason::DISK_MOVED, message), item))
}

/// The command by which a user gives up the PVC of a disk.
pub(super) fn replace_command(observed: &Observed, recorded: &DiskStatus) -> String {
    let (namespace, name) = (observed.namespace(), observed.name());
    let consent = consent_to_replace(recorded);
    // The consent for another disk stays.
    let is_of_disk = |item: &&str| observed.recorded_disks().iter().any(|disk| consent_to_replace(disk) == *item);
    let others = observed.replacements().filter(is_of_disk).filter(|item| *item != consent);
    let value = others.chain([consent]).collect::<Vec<_>>().join(",");
    format!("`kubectl -n {namespace} annotate machines.vitistack.io {name} {ANNOTATION_REPLACE}={value} --overwrite`")
}

fn pvc_conflict(observed: &Observed, name: &str) -> Option<(Problem, Option<String>)> {
    let pvc = observed.pvcs.get(name)?;
    let ownership = ownership::pvc(observed, name, pvc);
    if ownership.is_own() {
        let problem = pvc.deleting.then(|| deleting_pvc(observed, name))?;
        return Some((problem, None));
    }
    conflict("PersistentVolumeClaim", name, pvc.labels.get(LABEL_MACHINE).map(String::as_str), ownership)
}

/// A problem, and the item of the annotation that would solve it.
fn conflict(kind: &str, name: &str, machine: Option<&str>, ownership: Ownership) -> Option<(Problem, Option<String>)> {
    let failed = |message: String| Problem::failed(reason::NAME_TAKEN, message);
    let owner = |verb: &str| match machine {
        Some(machine) => format!("{verb} to Machine {machine}"),
        None => "does not belong to this Machine".to_owned(),
    };
    let other_name = format!("delete the {kind}, or create this Machine under another name");
    match ownership {
        Ownership::Own | Ownership::Unmarked => None,
        Ownership::Leaving => {
            let message =
                format!("{kind} {name} of an earlier Machine is being deleted; the operator continues when it is gone");
            Some((Problem::pending(reason::WAITING_FOR_DELETION, message), None))
        }
        Ownership::Adoptable(item) if is_machine(&item) => {
            let message = format!("{kind} {name} already exists and belongs to an earlier Machine with UID {item}");
            Some((failed(message), Some(item)))
        }
        Ownership::Adoptable(item) => {
            Some((failed(format!("{kind} {name} already exists and {}", owner("belonged"))), Some(item)))
        }
        Ownership::Foreign => {
            Some((failed(format!("{kind} {name} already exists and {}; {other_name}", owner("belongs"))), None))
        }
    }
}

fn is_machine(item: &str) -> bool {
    !item.contains('/')
}

/// The command by which a user consents to the adoption of these items.
pub(crate) fn adoption_remedy<'a>(observed: &Observed, items: impl IntoIterator<Item = &'a str>) -> String {
    let items: Vec<&str> = items.into_iter().collect();
    let (namespace, name) = (observed.namespace(), observed.name());
    let consents = items.iter().filter(|item| ownership::needs_own_consent(observed, item)).map(|item| {
        let object = item.replacen('/', " ", 1);
        format!("`kubectl -n {namespace} annotate {object} {ANNOTATION_ADOPT_BY}={name}` and ")
    });
    let consents: String = consents.collect();
    let value = Adoption::from_metadata(&observed.machine.metadata).with(items);
    format!(
        "to use it for this Machine, run {consents}`kubectl -n {namespace} annotate machines.vitistack.io {name} \
         {ANNOTATION_ADOPT}={value} --overwrite`; otherwise delete it, or create this Machine under another name",
    )
}

fn deleting_pvc(observed: &Observed, name: &str) -> Problem {
    let holds_data = !super::never_bound(observed, name);
    if holds_data {
        // Kubernetes keeps the PVC while a pod uses it.
        let remedy = match &observed.vmi {
            Some(_) => " as soon as the machine stops; copy the data now, while the machine runs",
            None => "; restore it from a backup",
        };
        let message = format!("PersistentVolumeClaim {name} is being deleted, and its data with it{remedy}");
        return Problem::pending(reason::PVC_LOST, message);
    }
    Problem::pending(
        reason::PVC_PENDING,
        format!("PersistentVolumeClaim {name} is being deleted; the operator creates it again when it is gone"),
    )
}
