//! What happens to VMs whose virt-launcher has another image than the installation: virt-controller migrates or evicts
//! them when the installation is complete, or they stay as they are. The rules are those of its workload updater and of
//! virt-api's webhook for evictions.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::{
    api::policy::v1::PodDisruptionBudget,
    apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta},
};
use serde_json::Value;
use vitivirt_api::{ObjectKey, kubevirt::KubeVirt};

use crate::{
    certificates::NoCertificates, installation::Installation, kind::Kind, names::VIRT_CONTROLLER,
    node_state::NodeState, selectors::selects,
};

/// The labels of the virt-launcher pods of each VMI, by its UID.
pub type Launchers = HashMap<String, Vec<BTreeMap<String, String>>>;

/// A VMI, reduced to what decides about its update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vmi {
    key: ObjectKey,
    uid: String,
    is_running: bool,
    launcher_image: String,
    node: String,
    /// Why it cannot be migrated.
    obstacle: Option<String>,
    eviction_strategy: Option<String>,
    /// Kind and name of the object that starts it again.
    owner: Option<String>,
}

impl Vmi {
    pub fn new(metadata: &ObjectMeta, data: &Value) -> Self {
        let text = |pointer: &str| data.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let owners = metadata.owner_references.iter().flatten();
        let owner = owners.into_iter().find(|owner| owner.controller == Some(true));
        Self {
            key: ObjectKey::from_metadata(metadata),
            uid: metadata.uid.clone().unwrap_or_default(),
            is_running: text("/status/phase") == "Running" && metadata.deletion_timestamp.is_none(),
            launcher_image: text("/status/launcherContainerImageVersion"),
            node: text("/status/nodeName"),
            obstacle: obstacle(data),
            eviction_strategy: Some(text("/spec/evictionStrategy")).filter(|strategy| !strategy.is_empty()),
            owner: owner.map(|owner| format!("{} {}", owner.kind, owner.name)),
        }
    }

    fn is_migratable(&self) -> bool {
        self.obstacle.is_none()
    }
}

fn obstacle(data: &Value) -> Option<String> {
    let conditions = data.pointer("/status/conditions").and_then(Value::as_array);
    let condition = conditions.into_iter().flatten().find(|condition| condition["type"] == "LiveMigratable");
    let Some(condition) = condition else { return Some("it has no condition LiveMigratable".to_owned()) };
    if condition["status"] == "True" {
        return None;
    }
    let part = |name: &str| condition[name].as_str().filter(|text| !text.is_empty());
    let parts: Vec<&str> = ["reason", "message"].into_iter().filter_map(part).collect();
    Some(if parts.is_empty() { "it is not live-migratable".to_owned() } else { parts.join(": ") })
}

/// A PodDisruptionBudget that allows no disruption now.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    key: ObjectKey,
    selector: LabelSelector,
}

impl Budget {
    /// `None` if it allows a disruption, or selects no pod.
    pub fn new(budget: PodDisruptionBudget) -> Option<Self> {
        let is_exhausted = budget.status.as_ref().is_some_and(|status| status.disruptions_allowed < 1);
        let selector = budget.spec.filter(|_| is_exhausted)?.selector?;
        Some(Self { key: ObjectKey::from_metadata(&budget.metadata), selector })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmiEffect {
    Migrated,
    Evicted,
    StaysOutdated,
}

/// A VMI that is outdated when the installation is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutdatedVm {
    pub key: ObjectKey,
    pub effect: VmiEffect,
    pub reason: String,
}

/// The VMIs whose virt-launcher has another image, and what happens to each of them.
pub fn outdated_vms(
    kubevirt: &KubeVirt,
    installation: &Installation,
    vmis: &[Vmi],
    nodes: &[NodeState],
    budgets: &[Budget],
    launchers: &Launchers,
) -> Vec<OutdatedVm> {
    let Some(image) = launcher_image(installation) else { return Vec::new() };
    let rules = UpdateRules::new(kubevirt);
    let is_outdated = |vmi: &&Vmi| vmi.is_running && !vmi.launcher_image.is_empty() && vmi.launcher_image != image;
    let outdated = vmis.iter().filter(is_outdated).map(|vmi| {
        let (effect, reason) = rules.effect(vmi, nodes, budgets, launchers);
        OutdatedVm { key: vmi.key.clone(), effect, reason }
    });
    let mut outdated: Vec<OutdatedVm> = outdated.collect();
    outdated.sort_by(|a, b| a.key.cmp(&b.key));
    outdated
}

/// The image of virt-launcher that virt-controller compares VMs with.
fn launcher_image(installation: &Installation) -> Option<String> {
    let mut objects = installation.objects.iter();
    let controller = objects.find(|object| object.kind == Kind::Deployment && object.key.name() == VIRT_CONTROLLER)?;
    let body = controller.body(&NoCertificates).ok()?.into_json();
    let container = body.pointer("/spec/template/spec/containers/0")?;
    let arguments = ["command", "args"].into_iter().filter_map(|field| container.get(field)?.as_array());
    let arguments: Vec<&str> = arguments.flatten().filter_map(Value::as_str).collect();
    let mut following = arguments.iter().skip_while(|argument| **argument != "--launcher-image").skip(1);
    let assigned = || arguments.iter().find_map(|argument| argument.strip_prefix("--launcher-image="));
    following.next().copied().or_else(assigned).map(str::to_owned)
}

/// What the KubeVirt resource says about updates of VMs.
struct UpdateRules {
    migrates: bool,
    evicts: bool,
    eviction_strategy: String,
}

const METHODS: &str = "spec.workloadUpdateStrategy.workloadUpdateMethods";

impl UpdateRules {
    fn new(kubevirt: &KubeVirt) -> Self {
        let strategy = kubevirt.spec.extra.get("workloadUpdateStrategy");
        let methods = strategy.and_then(|strategy| strategy.get("workloadUpdateMethods")).and_then(Value::as_array);
        let has = |name: &str| methods.is_some_and(|methods| methods.iter().any(|method| method == name));
        let eviction = kubevirt.spec.configuration.extra.get("evictionStrategy").and_then(Value::as_str);
        Self {
            migrates: has("LiveMigrate"),
            evicts: has("Evict"),
            eviction_strategy: eviction.unwrap_or("None").to_owned(),
        }
    }

    fn effect(&self, vmi: &Vmi, nodes: &[NodeState], budgets: &[Budget], launchers: &Launchers) -> (VmiEffect, String) {
        use VmiEffect::{Migrated, StaysOutdated};
        if nodes.iter().any(|node| node.name == vmi.node && !node.is_ready) {
            return (
                StaysOutdated,
                format!("Node {} is not ready; the VM is updated when the node is ready", vmi.node),
            );
        }
        let migrates = self.migrates && vmi.is_migratable();
        if !migrates && self.evicts {
            return self.eviction(vmi, nodes, budgets, launchers);
        }
        if !migrates {
            let reason = match (&vmi.obstacle, self.migrates) {
                (Some(obstacle), true) => format!(
                    "it cannot be migrated ({obstacle}), and {METHODS} does not contain Evict; restart the VM to update it"
                ),
                _ => format!("{METHODS} is empty; migrate or restart the VM to update it"),
            };
            return (StaysOutdated, reason);
        }
        if !has_migration_target(vmi, nodes) {
            return (StaysOutdated, no_target(vmi));
        }
        (Migrated, format!("it is live-migratable, and {METHODS} contains LiveMigrate"))
    }

    /// virt-controller evicts the pod. What follows depends on the eviction strategy.
    fn eviction(
        &self,
        vmi: &Vmi,
        nodes: &[NodeState],
        budgets: &[Budget],
        launchers: &Launchers,
    ) -> (VmiEffect, String) {
        use VmiEffect::{Evicted, Migrated, StaysOutdated};
        let strategy = vmi.eviction_strategy.as_deref().unwrap_or(&self.eviction_strategy);
        match (strategy, &vmi.obstacle) {
            ("LiveMigrate", Some(obstacle)) => {
                let reason = format!(
                    "its eviction strategy is LiveMigrate and it cannot be migrated ({obstacle}), so virt-api refuses the \
                     eviction; restart the VM to update it"
                );
                return (StaysOutdated, reason);
            }
            ("LiveMigrate" | "LiveMigrateIfPossible", None) if !has_migration_target(vmi, nodes) => {
                return (StaysOutdated, no_target(vmi));
            }
            ("LiveMigrate" | "LiveMigrateIfPossible", None) => {
                return (Migrated, format!("{METHODS} contains Evict, and its eviction strategy is {strategy}"));
            }
            ("External", _) => {
                let reason = "its eviction strategy is External; the external controller moves or stops it".to_owned();
                return (StaysOutdated, reason);
            }
            _ => {}
        }
        let pods = launchers.get(&vmi.uid).map(Vec::as_slice).unwrap_or_default();
        let covers = |budget: &&Budget| {
            budget.key.namespace() == vmi.key.namespace() && pods.iter().any(|labels| selects(&budget.selector, labels))
        };
        if let Some(budget) = budgets.iter().find(covers) {
            let reason = format!("PodDisruptionBudget {} allows no disruption, so the eviction is refused", budget.key);
            return (StaysOutdated, reason);
        }
        let cause = match &vmi.obstacle {
            Some(obstacle) if self.migrates => {
                format!("it cannot be migrated ({obstacle}), and {METHODS} contains Evict")
            }
            _ => format!("{METHODS} contains Evict"),
        };
        let after = match &vmi.owner {
            Some(owner) => format!("it stops, and {owner} starts it again if its run strategy says so"),
            None => "it stops, and nothing starts it again".to_owned(),
        };
        (Evicted, format!("{cause}; {after}"))
    }
}

fn has_migration_target(vmi: &Vmi, nodes: &[NodeState]) -> bool {
    nodes.iter().any(|node| node.name != vmi.node && node.can_run_vms())
}

fn no_target(vmi: &Vmi) -> String {
    format!("a migration needs another node that is ready and runs VMs, and Node {} is the only one", vmi.node)
}
