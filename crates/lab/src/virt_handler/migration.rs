//! A live migration as the two virt-handlers write it: each call returns the next write of one of them.
//!
//! virt-controller advances a migration when the handlers write fields of `status.migrationState`. The order here is
//! the order in which it expects those fields.

use serde_json::{Value, json};

use super::lifecycle::{remove, remove_condition, set};

const NODE_LABEL: &str = "kubevirt.io/nodeName";
const TARGET_LABEL: &str = "kubevirt.io/migrationTargetNodeName";

/// The next write of a migration, and the node whose virt-handler makes it.
pub(crate) struct MigrationStep {
    pub(crate) node: String,
    pub(crate) vmi: Value,
    /// The memory of the guest is copied before this write.
    pub(crate) copies: bool,
}

pub(crate) struct MigrationContext<'a> {
    pub(crate) now: &'a str,
    pub(crate) fails: bool,
    pub(crate) address_of: &'a dyn Fn(&str) -> String,
}

pub(crate) fn next(vmi: &Value, context: &MigrationContext<'_>) -> Option<MigrationStep> {
    let now = context.now;
    let state = vmi.pointer("/status/migrationState")?;
    let text = |key: &str| state.get(key).and_then(Value::as_str).unwrap_or_default();
    let flag = |key: &str| state.get(key).and_then(Value::as_bool) == Some(true);
    let has = |key: &str| !text(key).is_empty();
    let (source, target) = (text("sourceNode"), text("targetNode"));
    let mut next = vmi.clone();
    let mut put = |key: &str, value: Value| set(&mut next, &format!("/status/migrationState/{key}"), value);

    let (node, copies) = if flag("failed") || target.is_empty() {
        return None;
    } else if flag("completed") {
        label(vmi, TARGET_LABEL)?;
        remove(&mut next, "/metadata/labels", TARGET_LABEL);
        (target, false)
    } else if flag("abortRequested") && !has("endTimestamp") {
        put("abortStatus", "Succeeded".into());
        put("failed", true.into());
        put("failureReason", "migration was aborted".into());
        put("endTimestamp", now.into());
        (source, false)
    } else if !has("targetNodeAddress") {
        // The target's virt-handler acts after virt-controller has set the label with the target node.
        (label(vmi, TARGET_LABEL)? == target).then_some(())?;
        put("targetNodeAddress", (context.address_of)(target).into());
        put("targetDirectMigrationNodePorts", json!({"40001": 0, "40002": 49152}));
        (target, false)
    } else if !has("startTimestamp") {
        put("startTimestamp", now.into());
        put("mode", "PreCopy".into());
        (source, false)
    } else if context.fails {
        put("failed", true.into());
        put("failureReason", "the lab is configured to fail migrations".into());
        put("endTimestamp", now.into());
        (source, true)
    } else if !has("targetNodeDomainReadyTimestamp") {
        put("targetNodeDomainDetected", true.into());
        put("targetNodeDomainReadyTimestamp", now.into());
        remove_condition(&mut next, "MigrationRequired");
        (target, true)
    } else if !has("endTimestamp") {
        put("endTimestamp", now.into());
        move_to(&mut next, target);
        (target, false)
    } else {
        put("completed", true.into());
        apply_pending_changes(&mut next);
        (target, false)
    };
    Some(MigrationStep { node: node.to_owned(), vmi: next, copies })
}

fn label<'a>(vmi: &'a Value, name: &str) -> Option<&'a str> {
    vmi.pointer("/metadata/labels")?.get(name)?.as_str()
}

/// The guest now runs on the target.
fn move_to(vmi: &mut Value, target: &str) {
    set(vmi, "/status/nodeName", target.into());
    set(vmi, &format!("/metadata/labels/{}", NODE_LABEL.replace('/', "~1")), target.into());
    remove(vmi, "/metadata/labels", "kubevirt.io/outdatedLauncherImage");
    remove(vmi, "/metadata/annotations", "kubevirt.io/eviction-source");
    remove(vmi, "/status", "launcherContainerImageVersion");
    remove(vmi, "/status", "evacuationNodeName");
}

/// Changes that required a new launcher pod take effect.
fn apply_pending_changes(vmi: &mut Value) {
    for condition in ["HotVCPUChange", "HotMemoryChange", "VolumesChange"] {
        remove_condition(vmi, condition);
    }
    for label in [
        "kubevirt.io/vmi-pod-cpu-resource-limits",
        "kubevirt.io/vmi-pod-memory-resource-requests",
        "kubevirt.io/memory-hotplug-overhead-ratio",
    ] {
        remove(vmi, "/metadata/labels", label);
    }
    remove(vmi, "/status", "migratedVolumes");
    if let Some(cpu) = vmi.pointer("/spec/domain/cpu").cloned() {
        let topology =
            ["cores", "sockets", "threads"].into_iter().filter_map(|key| Some((key.to_owned(), cpu.get(key)?.clone())));
        set(vmi, "/status/currentCPUTopology", Value::Object(topology.collect()));
    }
    if let Some(memory) = vmi.pointer("/spec/domain/memory/guest").cloned() {
        set(vmi, "/status/memory/guestRequested", memory.clone());
        set(vmi, "/status/memory/guestCurrent", memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vmi_after_handover() -> Value {
        json!({
            "metadata": {"labels": {NODE_LABEL: "a", TARGET_LABEL: "b"}},
            "spec": {"domain": {}},
            "status": {"nodeName": "a", "migrationState": {"sourceNode": "a", "targetNode": "b", "migrationUid": "m"}},
        })
    }

    fn run_migration(fails: bool) -> (Vec<String>, Value) {
        let context =
            MigrationContext { now: "2026-01-01T00:00:00Z", fails, address_of: &|node| format!("address of {node}") };
        let (mut vmi, mut writers) = (vmi_after_handover(), Vec::new());
        while let Some(write) = next(&vmi, &context) {
            writers.push(write.node);
            vmi = write.vmi;
            assert!(writers.len() < 20, "the migration does not end");
        }
        (writers, vmi)
    }

    #[test]
    fn a_migration_ends_on_the_target() {
        let (writers, vmi) = run_migration(false);
        assert_eq!(writers, ["b", "a", "b", "b", "b", "b"]);
        assert_eq!(vmi["status"]["nodeName"], "b");
        assert_eq!(vmi["metadata"]["labels"], json!({NODE_LABEL: "b"}));
        assert_eq!(vmi["status"]["migrationState"]["completed"], true);
    }

    #[test]
    fn after_a_failed_migration_the_guest_stays_on_the_source() {
        let (_, vmi) = run_migration(true);
        assert_eq!(vmi["status"]["nodeName"], "a");
        assert_eq!(vmi["status"]["migrationState"]["failed"], true);
    }

    #[test]
    fn virt_handler_writes_nothing_before_virt_controller_hands_over() {
        let mut vmi = vmi_after_handover();
        remove(&mut vmi, "/metadata/labels", TARGET_LABEL);
        let context = MigrationContext { now: "", fails: false, address_of: &|_| String::new() };
        assert!(next(&vmi, &context).is_none());
    }
}
