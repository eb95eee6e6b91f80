//! What a rehearsal decides about VMs, nodes and permissions.

use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::{Value, json};
use vitivirt_api::{ObjectKey, Plan, Step, Target, Write, kubevirt::KubeVirt};

use super::*;
use crate::{
    environment::{Cluster, Environment},
    node_state::NodeState,
    rbac::{operator, rule, with_names},
};

fn kubevirt(spec: &Value) -> KubeVirt {
    let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt"}, "spec": spec});
    serde_json::from_value(object).unwrap()
}

fn installation(spec: &Value) -> Installation {
    let image = ("VIRT_OPERATOR_IMAGE".to_owned(), "quay.io/kubevirt/virt-operator:v1.8.4".to_owned());
    let cluster = Cluster { admission_policies: true, schedulable_nodes: 2, ..Cluster::default() };
    Installation::new(&kubevirt(spec), &Environment::from_variables([image]), &cluster).unwrap()
}

fn node(name: &str, ready: bool, more: &Value) -> NodeState {
    let mut node = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/os": "linux", "kubevirt.io/schedulable": "true",
            "node-role.kubernetes.io/control-plane": ""}},
        "spec": {},
        "status": {"conditions": [{"type": "Ready", "status": if ready { "True" } else { "Unknown" }}]},
    });
    for (field, value) in more.as_object().unwrap() {
        node["spec"][field] = value.clone();
    }
    NodeState::new(serde_json::from_value(node).unwrap())
}

const OLD: &str = "quay.io/kubevirt/virt-launcher:v1.7.0";
const NEW: &str = "quay.io/kubevirt/virt-launcher:v1.8.4";

/// A VMI with an old virt-launcher, and `change` applied to it.
fn vmi(migratable: bool, change: impl Fn(&mut Value)) -> Vmi {
    let condition = if migratable {
        json!({"type": "LiveMigratable", "status": "True"})
    } else {
        json!({"type": "LiveMigratable", "status": "False", "reason": "DisksNotLiveMigratable", "message": "cd"})
    };
    let mut object = json!({
        "metadata": {"name": "vm", "namespace": "ns", "uid": "1",
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vm", "uid": "2",
                "controller": true}]},
        "spec": {},
        "status": {"phase": "Running", "nodeName": "a", "launcherContainerImageVersion": OLD,
            "conditions": [condition]},
    });
    change(&mut object);
    Vmi::new(&serde_json::from_value(object["metadata"].clone()).unwrap(), &object)
}

fn effect_with(spec: &Value, vmi: Vmi, nodes: &[NodeState], budgets: &[Budget]) -> Option<(VmiEffect, String)> {
    let labels = [("app".to_owned(), "vm".to_owned())].into();
    let launchers: Launchers = [("1".to_owned(), vec![labels])].into();
    let vms = outdated_vms(&kubevirt(spec), &installation(spec), &[vmi], nodes, budgets, &launchers);
    assert!(vms.len() <= 1);
    vms.into_iter().next().map(|vm| (vm.effect, vm.reason))
}

fn methods(methods: &[&str], eviction: Option<&str>) -> Value {
    json!({
        "workloadUpdateStrategy": {"workloadUpdateMethods": methods},
        "configuration": {"evictionStrategy": eviction},
    })
}

#[test]
fn methods_eviction_strategy_and_condition_decide_about_a_vm() {
    use VmiEffect::{Evicted, Migrated, StaysOutdated};
    let nodes = [node("a", true, &json!({})), node("b", true, &json!({}))];
    let (both, evict, migrate) = (&["LiveMigrate", "Evict"][..], &["Evict"][..], &["LiveMigrate"][..]);
    for (method, eviction, migratable, expected, reason) in [
        (both, None, true, Migrated, "contains LiveMigrate"),
        (both, None, false, Evicted, "DisksNotLiveMigratable: cd"),
        (both, Some("LiveMigrate"), false, StaysOutdated, "virt-api refuses the eviction"),
        (both, Some("LiveMigrateIfPossible"), false, Evicted, "VirtualMachine vm starts it again"),
        (evict, None, true, Evicted, "contains Evict"),
        (evict, Some("LiveMigrate"), true, Migrated, "its eviction strategy is LiveMigrate"),
        (evict, Some("External"), true, StaysOutdated, "External"),
        (migrate, None, false, StaysOutdated, "does not contain Evict"),
        (&[], None, true, StaysOutdated, "workloadUpdateMethods is empty"),
    ] {
        let spec = methods(method, eviction);
        let (effect, text) = effect_with(&spec, vmi(migratable, |_| ()), &nodes, &[]).unwrap();
        assert!(effect == expected && text.contains(reason), "{method:?} {eviction:?} {migratable}: {effect:?} {text}");
    }
    // The VM's own strategy wins over that of the cluster.
    let own = vmi(false, |vmi| vmi["spec"]["evictionStrategy"] = json!("None"));
    let (effect, _) = effect_with(&methods(both, Some("LiveMigrate")), own, &nodes, &[]).unwrap();
    assert_eq!(effect, Evicted);
    let alone = vmi(false, |vmi| vmi["metadata"]["ownerReferences"] = json!([]));
    let (_, reason) = effect_with(&methods(both, None), alone, &nodes, &[]).unwrap();
    assert!(reason.contains("nothing starts it again"), "{reason}");
}

#[test]
fn only_running_vms_with_another_virt_launcher_are_outdated() {
    let nodes = [node("a", true, &json!({})), node("b", true, &json!({}))];
    let set = |pointer: &'static str, value: &'static str| {
        let vmi = vmi(true, |vmi| *vmi.pointer_mut(pointer).unwrap() = json!(value));
        effect_with(&methods(&["LiveMigrate"], None), vmi, &nodes, &[]).map(|(effect, _)| effect)
    };
    assert_eq!(set("/status/launcherContainerImageVersion", OLD), Some(VmiEffect::Migrated));
    assert_eq!(set("/status/launcherContainerImageVersion", NEW), None);
    assert_eq!(set("/status/launcherContainerImageVersion", ""), None);
    assert_eq!(set("/status/phase", "Scheduling"), None);
}

#[test]
fn nodes_and_budgets_can_prevent_the_update_of_a_vm() {
    let ready = node("b", true, &json!({}));
    let spec = methods(&["LiveMigrate", "Evict"], None);
    let outcome = |migratable: bool, nodes: &[NodeState], budgets: &[Budget]| {
        effect_with(&spec, vmi(migratable, |_| ()), nodes, budgets).unwrap()
    };
    let dead = node("a", false, &json!({}));
    let (effect, reason) = outcome(true, &[dead, ready.clone()], &[]);
    assert!(effect == VmiEffect::StaysOutdated && reason.contains("Node a is not ready"), "{reason}");
    let own = node("a", true, &json!({}));
    let cordoned = node("b", true, &json!({"unschedulable": true}));
    for nodes in [vec![own.clone()], vec![own.clone(), cordoned]] {
        let (effect, reason) = outcome(true, &nodes, &[]);
        assert!(effect == VmiEffect::StaysOutdated && reason.contains("is the only one"), "{reason}");
    }
    let budget = |namespace: &str, allowed: i32, label: &str| {
        let budget = json!({"metadata": {"name": "b", "namespace": namespace},
            "spec": {"selector": {"matchLabels": {"app": label}}},
            "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1}});
        Budget::new(serde_json::from_value(budget).unwrap())
    };
    let nodes = [own, ready];
    let effect = |budget: Option<Budget>| outcome(false, &nodes, budget.as_slice());
    let (refused, reason) = effect(budget("ns", 0, "vm"));
    assert!(refused == VmiEffect::StaysOutdated && reason.contains("PodDisruptionBudget ns/b"), "{reason}");
    for allowing in [budget("ns", 1, "vm"), budget("other", 0, "vm"), budget("ns", 0, "other")] {
        assert_eq!(effect(allowing).0, VmiEffect::Evicted);
    }
}

/// A plan that patches every object of an installation.
fn patches(installation: &Installation) -> Plan {
    let mut step = Step::new("components");
    step.writes = installation
        .objects
        .iter()
        .map(|object| Write::Patch { target: object.target(), uid: String::new(), operations: Vec::new() })
        .collect();
    Plan { steps: vec![step] }
}

#[test]
fn a_component_without_a_node_blocks_and_a_dead_node_of_virt_handler_does_not() {
    let installation = installation(&json!({}));
    let plan = patches(&installation);
    let problems = |nodes: &[NodeState]| node_problems(&installation, &plan, nodes);
    let (ready, dead) = (node("a", true, &json!({})), node("b", false, &json!({})));
    assert_eq!(problems(std::slice::from_ref(&ready)), (vec![], vec![]));
    let (blockers, warnings) = problems(&[ready, dead.clone()]);
    assert_eq!(blockers, [""; 0]);
    assert!(warnings.len() == 1 && warnings[0].contains("Node b is not ready: virt-handler keeps"), "{warnings:?}");
    // As the node lifecycle controller leaves them.
    let taint = |key: &str, effect: &str| json!({"key": format!("node.kubernetes.io/{key}"), "effect": effect});
    let unreachable = json!({"taints": [taint("unreachable", "NoSchedule"), taint("unreachable", "NoExecute")]});
    let (blockers, warnings) = problems(&[node("a", true, &json!({})), node("b", false, &unreachable)]);
    assert_eq!((blockers.len(), warnings.len()), (0, 1), "{blockers:?} {warnings:?}");
    let cordoned = json!({"unschedulable": true, "taints": [taint("unschedulable", "NoSchedule")]});
    let (blockers, _) = problems(&[node("a", true, &cordoned)]);
    assert_eq!(blockers.len(), 2, "a DaemonSet ignores that: {blockers:?}");
    let (blockers, _) = problems(&[dead]);
    assert_eq!(blockers.len(), 3, "virt-api, virt-controller and virt-handler: {blockers:?}");
    assert!(blockers[0].contains("none of the nodes that it can run on is ready"), "{blockers:?}");
    let taint = json!({"taints": [{"key": "other", "effect": "NoSchedule"}]});
    let (blockers, _) = problems(&[node("a", true, &taint)]);
    assert!(
        blockers.iter().any(|blocker| blocker.contains("Deployment kubevirt/virt-api cannot start")),
        "{blockers:?}"
    );
    let cordoned = node("a", true, &json!({"unschedulable": true}));
    let (blockers, _) = problems(&[cordoned]);
    assert_eq!(blockers.len(), 2, "a DaemonSet ignores that: {blockers:?}");
    assert_eq!(node_problems(&installation, &Plan::default(), &[]), (vec![], vec![]), "nothing restarts");
}

fn access(cluster: &[PolicyRule], namespaced: &[PolicyRule]) -> Access {
    let object = |value: Value| serde_json::from_value(value).unwrap();
    let subjects = json!([{"kind": "ServiceAccount", "name": "kubevirt-operator", "namespace": "kubevirt"}]);
    let binding = |kind: &str| {
        json!({"metadata": {"name": "b", "namespace": "kubevirt"}, "subjects": subjects,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "r"}})
    };
    let objects = RbacObjects {
        cluster_roles: vec![object(json!({"metadata": {"name": "r"}, "rules": cluster}))],
        cluster_role_bindings: vec![serde_json::from_value(binding("ClusterRole")).unwrap()],
        roles: vec![
            serde_json::from_value(json!({"metadata": {"name": "r", "namespace": "kubevirt"}, "rules": namespaced}))
                .unwrap(),
        ],
        role_bindings: vec![serde_json::from_value(binding("Role")).unwrap()],
    };
    Access::new("kubevirt", "kubevirt-operator", &objects)
}

#[test]
fn the_permissions_of_the_manifests_are_enough_and_fewer_are_named() {
    let installation = installation(&json!({}));
    let plan = patches(&installation);
    let (cluster, namespaced) = (operator::cluster_rules(), operator::namespace_rules());
    let missing = |cluster: &[PolicyRule]| missing_permissions(&access(cluster, &namespaced), &installation, &plan);
    assert_eq!(missing(&cluster), None);
    let workloads = |rule: &PolicyRule| rule.resources.iter().flatten().any(|resource| resource == "daemonsets");
    let fewer: Vec<PolicyRule> = cluster.iter().filter(|rule| !workloads(rule)).cloned().collect();
    let message = missing(&fewer).unwrap();
    for part in ["kubevirt/kubevirt-operator", "patch daemonsets.apps in namespace kubevirt", "virt-operator manifests"]
    {
        assert!(message.contains(part), "{message}");
    }
    // A role may not grant more than the operator holds.
    let clones = |rule: &PolicyRule| rule.api_groups.iter().flatten().any(|group| group == "clone.kubevirt.io");
    let fewer: Vec<PolicyRule> = cluster.iter().filter(|rule| !clones(rule)).cloned().collect();
    let message = missing(&fewer).unwrap();
    assert!(message.contains("clone.kubevirt.io, which ClusterRole"), "{message}");
    // With this permission it may.
    let escalate = rule(&["rbac.authorization.k8s.io"], &["clusterroles"], &["escalate"]);
    let escalating: Vec<PolicyRule> = fewer.into_iter().chain([escalate]).collect();
    assert_eq!(missing(&escalating), None);
}

#[test]
fn a_permission_with_names_covers_only_these() {
    let installation = installation(&json!({}));
    let target = |name: &str| Target::new(Kind::Secret.resource(), ObjectKey::namespaced("kubevirt", name));
    let plan = |name: &str| {
        let delete = Write::Delete { target: target(name), uid: String::new(), resource_version: None };
        Plan { steps: vec![Step::new("components").write(delete)] }
    };
    let everything = rule(&["*"], &["*"], &["list", "watch"]);
    let named = with_names(rule(&[""], &["secrets"], &["delete"]), &["mine"]);
    let access = access(&[everything], &[named]);
    assert_eq!(missing_permissions(&access, &installation, &plan("mine")), None);
    let missing = missing_permissions(&access, &installation, &plan("other")).unwrap();
    assert!(missing.contains("delete secrets in namespace kubevirt"), "{missing}");
}
