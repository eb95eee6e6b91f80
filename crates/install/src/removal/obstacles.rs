//! What keeps a removal from being complete: the objects that are left, their finalizers, and the clients that set them.

use super::{CLEANUP_FINALIZER, CRD_FINALIZER, Instance, RemovalInput, RemovalMode, is_own_finalizer};
use crate::{
    kind::Kind,
    live::Finalizer,
    names::{VIRT_API, VIRT_CONTROLLER, VIRT_HANDLER},
};

/// A message names so many objects.
const NAMED: usize = 3;

/// Why the removal waits, if that is known. Objects with finalizers of other clients are named first, because no
/// component of KubeVirt removes those.
pub fn obstacles(input: &RemovalInput) -> Option<String> {
    let mut instances: Vec<&Instance> = input.instances.iter().collect();
    instances.sort_by_key(|instance| foreign(&instance.finalizers).next().is_none());
    let objects = input.removable().into_iter().filter(|(_, _, live)| live.deleting).filter_map(|(kind, key, live)| {
        let finalizers = live.finalizers.iter().filter(|finalizer| !is_expected(&finalizer.name));
        let finalizers: Vec<Finalizer> = finalizers.cloned().collect();
        (!finalizers.is_empty()).then(|| format!("{} {key} has {}", kind.name(), describe(&finalizers)))
    });
    let texts: Vec<String> = instances.iter().map(|instance| instance_text(instance)).chain(objects).collect();
    if texts.is_empty() {
        return None;
    }
    let more = texts.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(", and {more} others") } else { String::new() };
    let named = texts.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    Some(format!("{named}{more}; {}", remedy(input)))
}

fn remedy(input: &RemovalInput) -> String {
    let instances = || input.instances.iter().flat_map(|instance| &instance.finalizers);
    let objects = input.removable();
    let objects = objects.iter().filter(|(_, _, live)| live.deleting).flat_map(|(_, _, live)| &live.finalizers);
    let is_foreign = |finalizer: &Finalizer| !is_own_finalizer(&finalizer.name) && !is_expected(&finalizer.name);
    if instances().chain(objects).any(is_foreign) {
        return "the client that set the finalizer must remove it; if that client no longer exists, remove the finalizer \
                with `kubectl edit`"
            .to_owned();
    }
    let missing: Vec<&str> = missing_components(input);
    if missing.is_empty() || matches!(input.mode, RemovalMode::NamespaceDeleted(_)) {
        "KubeVirt removes its finalizers when the guests have stopped".to_owned()
    } else {
        format!("{} has no ready pod, and KubeVirt's finalizers stay until it runs", missing.join(" and "))
    }
}

fn missing_components(input: &RemovalInput) -> Vec<&'static str> {
    let handlers = input.objects.managed(Kind::DaemonSet).filter(|(key, _)| key.name() == VIRT_HANDLER);
    let is_handled = handlers.filter_map(|(_, live)| live.rollout).any(|rollout| rollout.ready > 0);
    let deployments = [VIRT_API, VIRT_CONTROLLER].into_iter().filter(|name| !input.is_ready(name));
    deployments.chain((!is_handled).then_some(VIRT_HANDLER)).collect()
}

fn instance_text(instance: &Instance) -> String {
    let node = instance.node.as_ref().map(|node| format!(" on node {node}")).unwrap_or_default();
    let Instance { target, finalizers, .. } = instance;
    match finalizers.as_slice() {
        [] => format!("{target}{node} is being deleted"),
        finalizers => {
            let named: Vec<Finalizer> = foreign(finalizers).cloned().collect();
            format!("{target}{node} has {}", describe(if named.is_empty() { finalizers } else { &named }))
        }
    }
}

fn describe(finalizers: &[Finalizer]) -> String {
    let one = |finalizer: &Finalizer| match &finalizer.manager {
        Some(manager) => format!("{} (set by {manager})", finalizer.name),
        None => finalizer.name.clone(),
    };
    let names = finalizers.iter().map(one).collect::<Vec<_>>().join(", ");
    if finalizers.len() == 1 { format!("the finalizer {names}") } else { format!("the finalizers {names}") }
}

fn foreign(finalizers: &[Finalizer]) -> impl Iterator<Item = &Finalizer> {
    finalizers.iter().filter(|finalizer| !is_own_finalizer(&finalizer.name))
}

/// Finalizers that the API server and this operator remove.
fn is_expected(name: &str) -> bool {
    [CLEANUP_FINALIZER, CRD_FINALIZER, "foregroundDeletion", "orphan"].contains(&name)
}
