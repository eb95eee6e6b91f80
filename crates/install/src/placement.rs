//! The placement of components: that of the component combined with that of the KubeVirt resource.
//!
//! Node selectors of the component take precedence. Affinity terms and tolerations are combined.

use k8s_openapi::api::core::v1::{
    Affinity, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodAffinity, PodAntiAffinity,
    PodSpec, PreferredSchedulingTerm, Toleration,
};
use vitivirt_api::kubevirt::{ComponentConfig, KubeVirtSpec, NodePlacement};

use crate::pods::Problems;

const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";
const MASTER: &str = "node-role.kubernetes.io/master";
const WORKER: &str = "node-role.kubernetes.io/worker";

/// Where a component runs if the KubeVirt resource has no placement for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum DefaultPlacement {
    AnyNode,
    /// On the control plane, preferably on nodes that are not also workers.
    ControlPlane,
    /// On the control plane if there are such nodes, otherwise on any node.
    PreferControlPlane,
}

pub(crate) fn place(pod: &mut PodSpec, component: Option<&ComponentConfig>, default: DefaultPlacement) {
    let component = component.and_then(|component| component.node_placement.clone());
    let placement = component.unwrap_or_else(|| match default {
        DefaultPlacement::AnyNode => NodePlacement::default(),
        DefaultPlacement::ControlPlane => control_plane(true),
        DefaultPlacement::PreferControlPlane => control_plane(false),
    });
    let present = pod.node_selector.get_or_insert_default();
    let linux = ("kubernetes.io/os".to_owned(), "linux".to_owned());
    for (key, value) in placement.node_selector.unwrap_or_default().into_iter().chain([linux]) {
        present.entry(key).or_insert(value);
    }
    if let Some(affinity) = placement.affinity {
        pod.affinity = Some(match pod.affinity.take() {
            Some(present) => merge_affinity(present, affinity),
            None => affinity,
        });
    }
    let tolerations = placement.tolerations.unwrap_or_default();
    if !tolerations.is_empty() {
        pod.tolerations.get_or_insert_default().extend(tolerations);
    }
}

/// Why pods of the infrastructure cannot be scheduled on a cluster without control-plane nodes, such as a managed one.
pub(crate) fn default_placement_remedy(spec: &KubeVirtSpec, problems: &Problems) -> Option<String> {
    let is_default = spec.infra.as_ref().is_none_or(|infra| infra.node_placement.is_none());
    (is_default && problems.misplaced).then(|| {
        format!(
            "spec.infra.nodePlacement is not set, so these pods run only on nodes with the label {CONTROL_PLANE} or \
             {MASTER}; to use any node, set it to {{}}"
        )
    })
}

fn merge_affinity(present: Affinity, added: Affinity) -> Affinity {
    Affinity {
        node_affinity: merge_options(present.node_affinity, added.node_affinity, |present, added| NodeAffinity {
            required_during_scheduling_ignored_during_execution: merge_options(
                present.required_during_scheduling_ignored_during_execution,
                added.required_during_scheduling_ignored_during_execution,
                |present, added| NodeSelector {
                    node_selector_terms: [present.node_selector_terms, added.node_selector_terms].concat(),
                },
            ),
            preferred_during_scheduling_ignored_during_execution: concat_options(
                present.preferred_during_scheduling_ignored_during_execution,
                added.preferred_during_scheduling_ignored_during_execution,
            ),
        }),
        pod_affinity: merge_options(present.pod_affinity, added.pod_affinity, |present, added| PodAffinity {
            required_during_scheduling_ignored_during_execution: concat_options(
                present.required_during_scheduling_ignored_during_execution,
                added.required_during_scheduling_ignored_during_execution,
            ),
            preferred_during_scheduling_ignored_during_execution: concat_options(
                present.preferred_during_scheduling_ignored_during_execution,
                added.preferred_during_scheduling_ignored_during_execution,
            ),
        }),
        pod_anti_affinity: merge_options(present.pod_anti_affinity, added.pod_anti_affinity, |present, added| {
            PodAntiAffinity {
                required_during_scheduling_ignored_during_execution: concat_options(
                    present.required_during_scheduling_ignored_during_execution,
                    added.required_during_scheduling_ignored_during_execution,
                ),
                preferred_during_scheduling_ignored_during_execution: concat_options(
                    present.preferred_during_scheduling_ignored_during_execution,
                    added.preferred_during_scheduling_ignored_during_execution,
                ),
            }
        }),
    }
}

fn merge_options<T>(present: Option<T>, added: Option<T>, merge: impl FnOnce(T, T) -> T) -> Option<T> {
    match (present, added) {
        (Some(present), Some(added)) => Some(merge(present, added)),
        (present, added) => present.or(added),
    }
}

fn concat_options<T: Clone>(present: Option<Vec<T>>, added: Option<Vec<T>>) -> Option<Vec<T>> {
    merge_options(present, added, |present, added| [present, added].concat())
}

fn control_plane(required: bool) -> NodePlacement {
    let having = |key: &str, operator: &str| NodeSelectorTerm {
        match_expressions: Some(vec![NodeSelectorRequirement {
            key: key.to_owned(),
            operator: operator.to_owned(),
            values: None,
        }]),
        match_fields: None,
    };
    let tolerating = |key: &str| Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoSchedule".to_owned()),
        ..Toleration::default()
    };
    let preferred_term = |preference: NodeSelectorTerm| PreferredSchedulingTerm { weight: 100, preference };
    let control_plane = vec![having(CONTROL_PLANE, "Exists"), having(MASTER, "Exists")];
    let mut preferred = vec![preferred_term(having(WORKER, "DoesNotExist"))];
    let required = if required {
        Some(NodeSelector { node_selector_terms: control_plane })
    } else {
        preferred.extend(control_plane.into_iter().map(preferred_term));
        None
    };
    let affinity = NodeAffinity {
        required_during_scheduling_ignored_during_execution: required,
        preferred_during_scheduling_ignored_during_execution: Some(preferred),
    };
    NodePlacement {
        affinity: Some(Affinity { node_affinity: Some(affinity), ..Affinity::default() }),
        tolerations: Some(vec![tolerating(CONTROL_PLANE), tolerating(MASTER)]),
        ..NodePlacement::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn placed(pod: Value, component: Value, default: DefaultPlacement) -> Value {
        let mut pod: PodSpec = serde_json::from_value(pod).unwrap();
        let component: Option<ComponentConfig> = serde_json::from_value(component).unwrap();
        place(&mut pod, component.as_ref(), default);
        serde_json::to_value(pod).unwrap()
    }

    #[test]
    fn an_empty_placement_selects_only_linux() {
        let plain = json!({"containers": [], "nodeSelector": {"kubernetes.io/os": "linux"}});
        assert_eq!(
            placed(json!({"containers": []}), json!({"nodePlacement": {}}), DefaultPlacement::ControlPlane),
            plain
        );
        assert_eq!(placed(json!({"containers": []}), Value::Null, DefaultPlacement::AnyNode), plain);
    }

    #[test]
    fn the_selector_of_the_component_takes_precedence_and_terms_are_combined() {
        let term = |key: &str| json!({"matchExpressions": [{"key": key, "operator": "Exists"}]});
        let affinity = |key: &str| {
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [term(key)]}}})
        };
        let present = json!({"containers": [], "nodeSelector": {"a": "own"}, "affinity": affinity("x"),
                         "tolerations": [{"key": "t"}]});
        let component = json!({"nodePlacement": {"nodeSelector": {"a": "asked", "b": "asked", "kubernetes.io/os": "other"},
                           "affinity": affinity("y"), "tolerations": [{"key": "u"}]}});
        let result = placed(present, component, DefaultPlacement::ControlPlane);
        assert_eq!(result["nodeSelector"], json!({"a": "own", "b": "asked", "kubernetes.io/os": "other"}));
        let terms = "/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
        assert_eq!(result.pointer(terms), Some(&json!([term("x"), term("y")])));
        assert_eq!(result["tolerations"], json!([{"key": "t"}, {"key": "u"}]));
    }

    #[test]
    fn without_a_placement_a_component_tolerates_the_control_plane() {
        let result = placed(json!({"containers": []}), json!({"replicas": 3}), DefaultPlacement::ControlPlane);
        assert_eq!(result["tolerations"].as_array().map(Vec::len), Some(2));
    }
}
