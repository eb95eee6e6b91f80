//! One Machine as a tree: Machine → VirtualMachine → VirtualMachineInstance → pod, and next to the VirtualMachine the
//! disks, the networks and the cloud-init Secret. Each step has the state that decides whether the next one can happen.

use vitivirt_api::{
    machine::{Machine, PrintableStatus, PvcPhase, VmiPhase, machine_reason},
    view::{StepState, TreeStep},
};

use super::{MachineRow, cpus};
use crate::{
    assessment::assess,
    observed::{Observed, PvcView, VmiView},
    ownership::{self, Ownership},
    render::{cloud_init::secret_name, live_parts::pvc_of},
    resolve::{Attachment, DiskBacking, PowerState, Resolved, ResolvedDisk, ResolvedNetwork},
};

/// The pod of a guest. The operator does not cache pods, so its page shows what is known from the VMI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodView {
    pub name: String,
    pub phase: String,
    pub node: Option<String>,
    pub ready: bool,
    /// Why a container waits, or why the pod cannot be scheduled.
    pub problem: Option<String>,
}

/// `pods`: the pods of the VMI, or `None` if they were not read.
pub fn machine_tree(observed: &Observed, pods: Option<&[PodView]>) -> TreeStep {
    let row = MachineRow::new(&observed.machine);
    let assessment = assess(observed);
    let resolved = assessment.resolved.as_ref();
    let mut steps = vec![vm_step(observed, &row, resolved, pods)];
    match resolved {
        Some(resolved) => {
            let disks = resolved.disks.iter().map(|disk| match assessment.moved_disks.contains(&disk.name) {
                true => moved_disk_step(observed, &disk.name),
                false => disk_step(observed, disk),
            });
            steps.extend(disks);
            steps.extend(surplus_pvcs(observed, resolved));
            steps.extend(resolved.networks.iter().map(|network| network_step(observed, network)));
            steps.extend(resolved.cloud_init.as_ref().map(|_| secret_step(observed)));
        }
        None => steps.extend(observed.pvcs.iter().map(|(name, pvc)| pvc_step(observed, name, pvc))),
    }
    machine_step(observed, &row, resolved).steps(steps)
}

fn machine_step(observed: &Observed, row: &MachineRow, resolved: Option<&Resolved>) -> TreeStep {
    let is_error = machine_reason::ERRORS.contains(&row.reason.as_str());
    let state = match (row.ready, is_error) {
        (true, _) => StepState::Ok,
        (false, true) => StepState::Failed,
        (false, false) => StepState::Waiting,
    };
    let ready = if row.ready { "ready" } else { "not ready" };
    let reason = if row.reason.is_empty() { String::new() } else { format!(" ({})", row.reason) };
    let summary = match (&row.diagnosis, row.deleting) {
        (Some(diagnosis), _) => format!("{}, {ready}{reason}: {diagnosis}", row.phase),
        (None, true) => format!("{}, is being deleted", row.phase),
        (None, false) => format!("{}, {ready}{reason}", row.phase),
    };
    let resources = row.cpu.zip(row.memory.as_ref()).map(|(cpu, memory)| format!("{}, {memory} memory", cpus(cpu)));
    let power = resolved.map(|resolved| match resolved.power {
        PowerState::Running => "Running",
        PowerState::Stopped => "Stopped",
    });
    TreeStep::new("Machine", observed.name(), state, summary)
        .fact("template", resolved.and_then(|resolved| resolved.template).unwrap_or_default())
        .fact("resources", resources.unwrap_or_default())
        .fact("power state", power.unwrap_or_default())
        .fact("rejected changes", row.changes_rejected.clone().unwrap_or_default())
        .fact("pending changes", row.restart_required.clone().unwrap_or_default())
        .fact("spec", unobserved_change(&observed.machine).unwrap_or_default())
}

/// A change of the spec that the operator has not reconciled yet.
fn unobserved_change(machine: &Machine) -> Option<String> {
    let observed = machine.status.as_ref()?.observed_generation?;
    let current = machine.metadata.generation?;
    (observed < current)
        .then(|| format!("the status is for generation {observed}, but the Machine has generation {current}"))
}

fn vm_step(observed: &Observed, row: &MachineRow, resolved: Option<&Resolved>, pods: Option<&[PodView]>) -> TreeStep {
    const KIND: &str = "VirtualMachine";
    let name = observed.name();
    let Some(vm) = &observed.vm else {
        let (state, summary) = match observed.installed.kubevirt {
            true => (StepState::Waiting, "does not exist"),
            false => (StepState::Failed, "KubeVirt is not installed"),
        };
        return TreeStep::new(KIND, name, state, summary);
    };
    if !ownership::vm(observed, vm).is_own() {
        return TreeStep::new(KIND, name, StepState::Failed, "exists and does not belong to this Machine");
    }
    use PrintableStatus as Is;
    let is_stopped = resolved.is_some_and(|resolved| resolved.power == PowerState::Stopped);
    let state = match vm.printable_status {
        _ if vm.failure.is_some() => StepState::Failed,
        Is::Running | Is::Migrating => StepState::Ok,
        Is::Stopped if is_stopped => StepState::Ok,
        Is::CrashLoopBackOff
        | Is::ErrorUnschedulable
        | Is::ErrImagePull
        | Is::ImagePullBackOff
        | Is::ErrorPvcNotFound
        | Is::DataVolumeError => StepState::Failed,
        Is::Unset
        | Is::Stopped
        | Is::Provisioning
        | Is::Starting
        | Is::Paused
        | Is::Stopping
        | Is::Terminating
        | Is::WaitingForVolumeBinding
        | Is::WaitingForReceiver
        | Is::Unknown => StepState::Waiting,
    };
    let status = match vm.printable_status {
        Is::Unset => "virt-controller has not reported a status yet",
        status => status.as_str(),
    };
    let flag = |is: bool, text: &str| if is { text.to_owned() } else { String::new() };
    TreeStep::new(KIND, name, state, status)
        .fact("error", vm.failure.clone().unwrap_or_default())
        .fact("deletion", flag(vm.deleting, "is being deleted"))
        .fact("restore", flag(vm.restoring, "is being restored from a snapshot"))
        .steps([vmi_step(observed, row, is_stopped, pods)])
}

fn vmi_step(observed: &Observed, row: &MachineRow, is_stopped: bool, pods: Option<&[PodView]>) -> TreeStep {
    const KIND: &str = "VirtualMachineInstance";
    let name = observed.name();
    let Some(vmi) = &observed.vmi else {
        let (state, summary) = match is_stopped {
            true => (StepState::Ok, "does not exist: the guest is stopped"),
            false => (StepState::Waiting, "does not exist"),
        };
        return TreeStep::new(KIND, name, state, summary);
    };
    let state = match vmi.phase {
        VmiPhase::Running if vmi.not_ready.is_none() && !vmi.paused => StepState::Ok,
        VmiPhase::Failed => StepState::Failed,
        VmiPhase::Succeeded if is_stopped => StepState::Ok,
        _ if vmi.failure.is_some() || vmi.unschedulable.is_some() => StepState::Failed,
        _ => StepState::Waiting,
    };
    let phase = match vmi.phase {
        VmiPhase::Unset => "no phase yet",
        phase => phase.as_str(),
    };
    let flags = [(vmi.paused, "paused"), (vmi.migrating, "migrating"), (vmi.deleting, "being deleted")];
    let flags = flags.into_iter().filter_map(|(is, text)| is.then_some(text));
    let summary: Vec<&str> = [phase].into_iter().chain(flags).collect();
    let pods = match pods {
        Some(pods) => pods.iter().map(pod_step).collect(),
        None => vec![pod_of_vmi(row, vmi)],
    };
    TreeStep::new(KIND, name, state, summary.join(", "))
        .fact("node", vmi.node.clone().unwrap_or_default())
        .fact("addresses", vmi.addresses.join(", "))
        .fact("not ready", vmi.not_ready.clone().unwrap_or_default())
        .fact("error", vmi.failure.clone().unwrap_or_default())
        .steps(pods)
}

/// The pod as far as VMI and report show it.
fn pod_of_vmi(row: &MachineRow, vmi: &VmiView) -> TreeStep {
    let reported = row.diagnosis.clone().filter(|_| row.reason == machine_reason::POD_NOT_STARTED);
    let (state, summary) = match (&vmi.unschedulable, reported, vmi.phase) {
        (Some(message), _, _) => (StepState::Failed, format!("cannot be scheduled: {message}")),
        (None, Some(diagnosis), _) => (StepState::Failed, diagnosis),
        (None, None, VmiPhase::Running) => (StepState::Ok, "runs the guest".to_owned()),
        (None, None, VmiPhase::Scheduled) => (StepState::Ok, "runs; virt-handler is starting the guest".to_owned()),
        (None, None, VmiPhase::Scheduling) => (StepState::Waiting, "is being scheduled or started".to_owned()),
        (None, None, VmiPhase::Succeeded | VmiPhase::Failed) => (StepState::Unknown, "has ended".to_owned()),
        (None, None, _) => (StepState::Waiting, "does not exist".to_owned()),
    };
    TreeStep::new("Pod", format!("virt-launcher-{}-…", row.name), state, summary)
        .fact("node", vmi.node.clone().unwrap_or_default())
}

fn pod_step(pod: &PodView) -> TreeStep {
    let state = match (pod.phase.as_str(), &pod.problem) {
        (_, Some(_)) | ("Failed", _) => StepState::Failed,
        ("Running", None) if pod.ready => StepState::Ok,
        ("Succeeded", None) => StepState::Unknown,
        _ => StepState::Waiting,
    };
    let summary = match &pod.problem {
        Some(problem) => format!("{}: {problem}", pod.phase),
        None if pod.ready => format!("{}, ready", pod.phase),
        None => pod.phase.clone(),
    };
    TreeStep::new("Pod", &pod.name, state, summary).fact("node", pod.node.clone().unwrap_or_default())
}

fn disk_step(observed: &Observed, disk: &ResolvedDisk) -> TreeStep {
    let DiskBacking::Pvc { pvc: name, size, .. } = &disk.backing else {
        let summary = "its changes are lost when the guest stops";
        return TreeStep::new("ContainerDisk", &disk.name, StepState::Ok, summary);
    };
    let step = match observed.pvcs.get(name) {
        Some(pvc) => pvc_step(observed, name, pvc),
        None if observed.recorded_disk(name).is_some() => {
            TreeStep::new(PVC, name, StepState::Failed, "is lost: it was bound, and no longer exists")
        }
        None => TreeStep::new(PVC, name, StepState::Waiting, "does not exist").fact("size", size.to_string()),
    };
    step.fact("disk", &disk.name)
}

/// A disk that the VM has in a PVC of another owner.
fn moved_disk_step(observed: &Observed, disk: &str) -> TreeStep {
    let pvc = observed.own_vm().and_then(|vm| pvc_of(&vm.spec, disk)).unwrap_or_default();
    TreeStep::new(PVC, pvc, StepState::Ok, "the disk was moved here; does not belong to the Machine").fact("disk", disk)
}

const PVC: &str = "PersistentVolumeClaim";

/// PVCs of disks that are no longer in the spec, and those in which a disk was before KubeVirt restored it.
fn surplus_pvcs<'a>(observed: &'a Observed, resolved: &'a Resolved) -> impl Iterator<Item = TreeStep> + 'a {
    let surplus = observed.pvcs.iter().filter(|(name, pvc)| {
        let is_named = resolved.pvc_names().any(|named| named == name.as_str());
        !is_named && ownership::pvc(observed, name, pvc).is_own()
    });
    surplus.map(|(name, pvc)| pvc_step(observed, name, pvc).fact("disk", "not in the spec"))
}

fn pvc_step(observed: &Observed, name: &str, pvc: &PvcView) -> TreeStep {
    let ownership = ownership::pvc(observed, name, pvc);
    let (state, summary) = match (ownership, pvc.phase) {
        (Ownership::Own | Ownership::Unmarked, _) if pvc.deleting => (StepState::Failed, "is being deleted"),
        (Ownership::Own | Ownership::Unmarked, PvcPhase::Bound) => (StepState::Ok, "Bound"),
        (Ownership::Own | Ownership::Unmarked, PvcPhase::Lost) => (StepState::Failed, "Lost"),
        (Ownership::Own | Ownership::Unmarked, PvcPhase::Pending | PvcPhase::Unknown) => {
            (StepState::Waiting, "Pending: it is not bound to a volume")
        }
        (Ownership::Leaving, _) => (StepState::Waiting, "belongs to an earlier Machine and is being deleted"),
        (Ownership::Adoptable(_), _) => {
            (StepState::Failed, "belongs to an earlier Machine; the diagnosis has the command that adopts it")
        }
        (Ownership::Foreign, _) => (StepState::Failed, "exists and does not belong to this Machine"),
    };
    TreeStep::new(PVC, name, state, summary)
        .fact("size", &pvc.requested)
        .fact("storage class", pvc.storage_class.clone().unwrap_or_default())
        .fact("volume", pvc.volume.clone().unwrap_or_default())
}

fn network_step(observed: &Observed, network: &ResolvedNetwork) -> TreeStep {
    let step = match &network.attachment {
        Attachment::Pod => TreeStep::new("Network", "pod", StepState::Ok, "the pod network"),
        Attachment::Configuration(name) => configured_network(observed, name),
    };
    step.fact("interface", &network.name).fact("MAC address", &network.mac)
}

fn configured_network(observed: &Observed, name: &str) -> TreeStep {
    const KIND: &str = "NetworkConfiguration";
    let Some(network) = observed.networks.get(name) else {
        return TreeStep::new(KIND, name, StepState::Failed, "not found in this namespace");
    };
    let attachment = observed.network_attachments.get(name);
    let (state, summary) = match attachment {
        _ if !observed.installed.multus => (StepState::Failed, "Multus is not installed"),
        Some(attachment) if attachment.controller_uid.as_deref() != Some(&network.uid) => {
            (StepState::Failed, "the NetworkAttachmentDefinition of this name does not belong to it")
        }
        Some(_) if network.deleting => (StepState::Waiting, "is being deleted, and stays until no Machine uses it"),
        Some(_) => (StepState::Ok, "its NetworkAttachmentDefinition exists"),
        None => (StepState::Waiting, "its NetworkAttachmentDefinition does not exist"),
    };
    TreeStep::new(KIND, name, state, summary)
        .fact("bridge", network.bridge.clone().unwrap_or_default())
        .fact("VLAN", network.vlan.map(|vlan| vlan.to_string()).unwrap_or_default())
}

/// Never its content.
fn secret_step(observed: &Observed) -> TreeStep {
    let name = secret_name(observed.name());
    let (state, summary) = match &observed.secret {
        None => (StepState::Waiting, "does not exist"),
        Some(secret) if !ownership::secret(observed, secret).is_own() => {
            (StepState::Failed, "exists and does not belong to this Machine")
        }
        Some(secret) if secret.deleting => (StepState::Waiting, "is being deleted"),
        Some(_) => (StepState::Ok, "has the cloud-init data"),
    };
    TreeStep::new("Secret", name, state, summary)
}
