//! The writes of a removal.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use vitivirt_api::{ObjectKey, Operation, Plan, Step, Target, Wait, Write, kubevirt::KubeVirt, remove_finalizer};

use super::{
    CRD_FINALIZER, Instance, RemovalInput, RemovalMode, RemovalStage, Workloads, is_cleaned_up, is_own_finalizer,
    obstacles::obstacles,
};
use crate::{
    kind::Kind,
    live::LiveObject,
    names::{FINALIZER, VIRT_API, VIRT_TEMPLATE_CONTROLLER},
    pods::examples,
    report::phase,
};

/// Reasons of waits.
pub(super) mod wait {
    pub(in crate::removal) const INSTANCES: &str = "WaitingForInstances";
    pub(in crate::removal) const DELETION: &str = "WaitingForDeletion";
    pub(in crate::removal) const CACHES: &str = "WaitingForCaches";
}

/// Usually a watch event ends a wait.
const RETRY: Duration = Duration::from_secs(5);
/// For waits that no watch event ends.
const POLL: Duration = Duration::from_secs(1);

/// When a removal has found that a CRD has no objects.
const CHECKED_ANNOTATION: &str = "kubevirt.io/removal-checked";

/// What could reject the deletion of other objects, or of the namespace.
const BLOCKING_KINDS: [Kind; 3] =
    [Kind::ValidatingWebhookConfiguration, Kind::MutatingWebhookConfiguration, Kind::ApiService];

pub fn removal_plan(input: &RemovalInput) -> Plan {
    let steps = match (input.mode, input.stage()) {
        (RemovalMode::NamespaceDeleted(workloads), _) => abandon(input, workloads),
        (_, RemovalStage::Instances) => delete_instances(input),
        (_, RemovalStage::Objects) => delete_objects(input),
        (_, RemovalStage::Nodes) => finish(input),
    };
    Plan { steps: steps.into_iter().filter(|step| !step.writes.is_empty() || step.wait.is_some()).collect() }
}

/// The API server deletes the objects of a CRD that is being deleted, and creates no others.
fn delete_instances(input: &RemovalInput) -> Vec<Step> {
    let mut keep = Step::new("CRD finalizers");
    keep.writes.extend(input.crds().filter_map(|(key, live)| add_finalizer(key, live)));
    let mut delete = Step::new("CRDs");
    delete.writes.extend(deletions(input, |kind| kind == Kind::CustomResourceDefinition));
    // Webhooks of a component that does not run reject the requests that would remove finalizers.
    let mut webhooks = Step::new("unreachable webhooks").independent(true);
    if input.is_irrevocable() {
        webhooks.writes.extend(unreachable_webhooks(input));
    }
    let mut strip = Step::new("finalizers of instances").independent(true);
    strip.writes.extend(input.instances.iter().filter_map(|instance| strip_finalizers(input, instance)));
    let mut notify = Step::new("CRDs whose objects are gone").independent(true);
    notify.writes.extend(input.crds().filter_map(|(key, live)| notify_api_server(input, key, live)));
    let mut release = Step::new("CRDs without instances");
    if input.crds().all(|(_, live)| is_cleaned_up(live)) {
        release.writes.extend(input.crds().flat_map(|(key, live)| release_crd(input, key, live)));
    }
    let message = waits_for(input, "the objects of KubeVirt's CRDs are being deleted");
    vec![
        keep,
        delete,
        webhooks,
        strip,
        notify,
        release.wait(Wait { reason: wait::INSTANCES, message, requeue_after: Some(RETRY) }),
    ]
}

fn delete_objects(input: &RemovalInput) -> Vec<Step> {
    let mut blocking = Step::new("webhooks");
    blocking.writes.extend(deletions(input, |kind| BLOCKING_KINDS.contains(&kind)));
    let mut others = Step::new("objects");
    others.writes.extend(deletions(input, |kind| !BLOCKING_KINDS.contains(&kind)));
    if matches!(input.mode, RemovalMode::Command { force: true }) {
        let stuck = input.removable().into_iter().filter(|(_, _, live)| live.deleting && !live.finalizers.is_empty());
        others
            .writes
            .extend(stuck.map(|(kind, key, live)| replace_finalizers(target(kind, key), &live.uid, live, &[])));
    }
    let message = waits_for(input, "the objects of the installation are being deleted");
    vec![blocking, others.wait(Wait { reason: wait::DELETION, message, requeue_after: Some(POLL) })]
}

/// The phase `Deleted` is reported before the finalizer is removed, so that a client can see it.
fn finish(input: &RemovalInput) -> Vec<Step> {
    if !input.complete {
        let message = "the operator is checking which objects are left".to_owned();
        return vec![Step::new("caches").wait(Wait { reason: wait::CACHES, message, requeue_after: Some(POLL) })];
    }
    let handlers = input.running_handlers();
    if !handlers.is_empty() {
        let examples = examples(handlers.iter().map(|(key, pod)| format!("pod {key} on node {}", pod.node)));
        let message = format!("virt-handler is being stopped; its nodes are cleaned up afterwards ({examples})");
        let wait = Wait { reason: wait::DELETION, message, requeue_after: Some(POLL) };
        return vec![Step::new("pods of virt-handler").wait(wait)];
    }
    let mut nodes = Step::new("nodes");
    nodes.writes.extend(input.nodes.iter().map(super::MarkedNode::remove_marks));
    let is_reported = |kubevirt: &&KubeVirt| {
        let phase = kubevirt.status.as_ref().map(|status| status.phase.as_str());
        phase == Some(phase::DELETED) || input.mode != RemovalMode::Operator
    };
    let mut resource = Step::new("resource");
    resource.writes.extend(input.kubevirt.as_ref().filter(is_reported).and_then(release_kubevirt));
    vec![nodes, resource]
}

/// The control plane is about to end, and the ServiceAccount of the operator too. First what keeps the namespace from
/// being deleted. Every step is tried, whatever fails.
fn abandon(input: &RemovalInput, workloads: Workloads) -> Vec<Step> {
    let mut blocking = Step::new("webhooks").independent(true);
    blocking.writes.extend(deletions(input, |kind| BLOCKING_KINDS.contains(&kind)));
    let mut steps = vec![blocking];
    if workloads != Workloads::Protected {
        let crds = |kind: Kind| kind == Kind::CustomResourceDefinition;
        let mut instances = Step::new("CRDs").independent(true);
        instances.writes.extend(deletions(input, crds));
        instances.writes.extend(input.crds().flat_map(|(key, live)| release_crd(input, key, live)));
        let mut strip = Step::new("finalizers of instances").independent(true);
        strip.writes.extend(input.instances.iter().filter_map(|instance| strip_finalizers(input, instance)));
        let mut nodes = Step::new("nodes").independent(true);
        nodes.writes.extend(input.nodes.iter().map(super::MarkedNode::remove_marks));
        let mut others = Step::new("objects").independent(true);
        others.writes.extend(deletions(input, |kind| !BLOCKING_KINDS.contains(&kind) && !crds(kind)));
        steps.extend([instances, strip, nodes, others]);
    }
    let mut resource = Step::new("resource").independent(true);
    if workloads != Workloads::Deleted || input.crds().next().is_none() {
        resource.writes.extend(input.kubevirt.as_ref().and_then(release_kubevirt));
    } else {
        let message = waits_for(input, "the objects of KubeVirt's CRDs are being deleted");
        resource = resource.wait(Wait { reason: wait::INSTANCES, message, requeue_after: Some(POLL) });
    }
    steps.push(resource);
    steps
}

fn waits_for(input: &RemovalInput, usual: &str) -> String {
    obstacles(input).unwrap_or_else(|| usual.to_owned())
}

fn deletions<'a>(input: &'a RemovalInput, matches: impl Fn(Kind) -> bool + 'a) -> impl Iterator<Item = Write> + 'a {
    let objects = input.removable().into_iter().filter(move |(kind, _, live)| matches(*kind) && !live.deleting);
    objects.map(|(kind, key, live)| delete(kind, key, live))
}

/// The response to a lazy write has only metadata. A CRD is large.
fn delete(kind: Kind, key: &ObjectKey, live: &LiveObject) -> Write {
    let (target, uid) = (target(kind, key), live.uid.clone());
    match kind {
        Kind::CustomResourceDefinition => Write::lazy(target.clone(), "delete", move || {
            Ok(Write::Delete { target: target.clone(), uid: uid.clone(), resource_version: None })
        }),
        _ => Write::Delete { target, uid, resource_version: None },
    }
}

fn unreachable_webhooks(input: &RemovalInput) -> impl Iterator<Item = Write> + '_ {
    let configurations = input.removable().into_iter().filter(|(kind, key, live)| {
        let is_webhook = BLOCKING_KINDS.contains(kind) && *kind != Kind::ApiService;
        let server = if key.name().starts_with("virt-template") { VIRT_TEMPLATE_CONTROLLER } else { VIRT_API };
        let is_of_operator = key.name().starts_with("virt-operator") && input.mode == RemovalMode::Operator;
        is_webhook && !live.deleting && !is_of_operator && !input.is_ready(server)
    });
    configurations.map(|(kind, key, live)| delete(kind, key, live))
}

fn target(kind: Kind, key: &ObjectKey) -> Target {
    Target::new(kind.resource(), key.clone())
}

fn add_finalizer(key: &ObjectKey, live: &Arc<LiveObject>) -> Option<Write> {
    if live.deleting || live.finalizers.iter().any(|finalizer| finalizer.name == CRD_FINALIZER) {
        return None;
    }
    let mut names: Vec<&str> = live.finalizers.iter().map(|finalizer| finalizer.name.as_str()).collect();
    names.push(CRD_FINALIZER);
    Some(replace_finalizers(target(Kind::CustomResourceDefinition, key), &live.uid, live, &names))
}

/// Any change of a CRD makes the API server check again whether its objects are gone. It forgets a CRD if its own update
/// conflicts with another one, until it lists all CRDs again minutes later.
fn notify_api_server(input: &RemovalInput, key: &ObjectKey, live: &Arc<LiveObject>) -> Option<Write> {
    if is_cleaned_up(live) || !live.deleting || !input.empty_crds.contains(key) {
        return None;
    }
    let (target, uid) = (target(Kind::CustomResourceDefinition, key), live.uid.clone());
    let time = json!(input.now.to_string());
    let operation = if live.annotations.is_empty() {
        Operation::set("/metadata/annotations", json!({CHECKED_ANNOTATION: time}))
    } else {
        Operation::set(format!("/metadata/annotations/{}", Operation::escape(CHECKED_ANNOTATION)), time)
    };
    let write = Write::Patch { target: target.clone(), uid, operations: vec![operation] };
    Some(Write::lazy(target, "patch", move || Ok(write.clone())))
}

/// Removes the operator's finalizer, and with force every one except the API server's.
fn release_crd(input: &RemovalInput, key: &ObjectKey, live: &Arc<LiveObject>) -> Option<Write> {
    let force = matches!(input.mode, RemovalMode::Command { force: true }) && is_cleaned_up(live);
    let kept = live.finalizers.iter().map(|finalizer| finalizer.name.as_str());
    let kept: Vec<&str> = kept.filter(|name| !force && *name != CRD_FINALIZER).collect();
    let target = target(Kind::CustomResourceDefinition, key);
    (kept.len() < live.finalizers.len()).then(|| replace_finalizers(target, &live.uid, live, &kept))
}

/// Finalizers that no component removes, because none runs, and with force those of other clients.
fn strip_finalizers(input: &RemovalInput, instance: &Instance) -> Option<Write> {
    let force = matches!(input.mode, RemovalMode::Command { force: true });
    let is_stripped = |name: &str| if is_own_finalizer(name) { input.is_control_plane_gone() } else { force };
    let kept = instance.finalizers.iter().map(|finalizer| finalizer.name.as_str());
    let kept: Vec<&str> = kept.filter(|name| !is_stripped(name)).collect();
    let before = instance.finalizers.iter().map(|finalizer| finalizer.name.as_str());
    (kept.len() < instance.finalizers.len())
        .then(|| set_finalizers(instance.target.clone(), &instance.uid, &before.collect::<Vec<_>>(), &kept))
}

fn replace_finalizers(target: Target, uid: &str, live: &Arc<LiveObject>, names: &[&str]) -> Write {
    let before: Vec<&str> = live.finalizers.iter().map(|finalizer| finalizer.name.as_str()).collect();
    let write = set_finalizers(target.clone(), uid, &before, names);
    Write::lazy(target, "patch", move || Ok(write.clone()))
}

fn set_finalizers(target: Target, uid: &str, before: &[&str], names: &[&str]) -> Write {
    const PATH: &str = "/metadata/finalizers";
    let expected = if before.is_empty() { Value::Null } else { json!(before) };
    let operation = if names.is_empty() { Operation::remove(PATH) } else { Operation::set(PATH, json!(names)) };
    Write::Patch { target, uid: uid.to_owned(), operations: vec![operation.expecting(expected)] }
}

fn release_kubevirt(kubevirt: &KubeVirt) -> Option<Write> {
    let mut finalizers = kubevirt.metadata.finalizers.iter().flatten();
    let index = finalizers.position(|finalizer| finalizer == FINALIZER)?;
    let target = Target::of_kind::<KubeVirt>(ObjectKey::from_metadata(&kubevirt.metadata));
    Some(remove_finalizer(target, kubevirt.metadata.uid.as_deref()?, FINALIZER, index))
}
