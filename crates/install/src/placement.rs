//! The placement of components: that of the component combined with that of the KubeVirt resource.
//!
//! Node selectors of the component take precedence. Affinity terms and tolerations are combined.

use k8s_openapi::api::core::v1::{
    Affinity, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodAffinity, PodAntiAffinity,
    PodSpec, PreferredSchedulingTerm, Toleration,
};
use vitivirt_api::kubevirt::{ComponentConfig, NodePlacement};

const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";
const MASTER: &str = "node-role.kubernetes.io/master";
const WORKER: &str = "node-role.kubernetes.io/worker";

/// Where a component runs if the resource has no placement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum DefaultPlacement {
    AnyNode,
    /// On the control plane, preferably on nodes that are not also workers.
    ControlPlane,
    /// On the control plane if there are such nodes, else anywhere.
    PreferControlPlane,
}

pub(crate) fn place(pod: &mut PodSpec, asked: Option<&ComponentConfig>, default: DefaultPlacement) {
    let asked = asked.and_then(|component| component.node_placement.clone());
    let placement = asked.unwrap_or_else(|| match default {
        DefaultPlacement::AnyNode => NodePlacement::default(),
        DefaultPlacement::ControlPlane => control_plane(true),
        DefaultPlacement::PreferControlPlane => control_plane(false),
    });
    let own = pod.node_selector.get_or_insert_default();
    let linux = ("kubernetes.io/os".to_owned(), "linux".to_owned());
    for (key, value) in placement.node_selector.unwrap_or_default().into_iter().chain([linux]) {
        own.entry(key).or_insert(value);
    }
    if let Some(affinity) = placement.affinity {
        pod.affinity = Some(match pod.affinity.take() {
            Some(own) => add_affinity(own, affinity),
            None => affinity,
        });
    }
    let tolerations = placement.tolerations.unwrap_or_default();
    if !tolerations.is_empty() {
        pod.tolerations.get_or_insert_default().extend(tolerations);
    }
}

fn add_affinity(own: Affinity, more: Affinity) -> Affinity {
    Affinity {
        node_affinity: join(own.node_affinity, more.node_affinity, |own, more| NodeAffinity {
            required_during_scheduling_ignored_during_execution: join(
                own.required_during_scheduling_ignored_during_execution,
                more.required_during_scheduling_ignored_during_execution,
                |own, more| NodeSelector {
                    node_selector_terms: [own.node_selector_terms, more.node_selector_terms].concat(),
                },
            ),
            preferred_during_scheduling_ignored_during_execution: lists(
                own.preferred_during_scheduling_ignored_during_execution,
                more.preferred_during_scheduling_ignored_during_execution,
            ),
        }),
        pod_affinity: join(own.pod_affinity, more.pod_affinity, |own, more| PodAffinity {
            required_during_scheduling_ignored_during_execution: lists(
                own.required_during_scheduling_ignored_during_execution,
                more.required_during_scheduling_ignored_during_execution,
            ),
            preferred_during_scheduling_ignored_during_execution: lists(
                own.preferred_during_scheduling_ignored_during_execution,
                more.preferred_during_scheduling_ignored_during_execution,
            ),
        }),
        pod_anti_affinity: join(own.pod_anti_affinity, more.pod_anti_affinity, |own, more| PodAntiAffinity {
            required_during_scheduling_ignored_during_execution: lists(
                own.required_during_scheduling_ignored_during_execution,
                more.required_during_scheduling_ignored_during_execution,
            ),
            preferred_during_scheduling_ignored_during_execution: lists(
                own.preferred_during_scheduling_ignored_during_execution,
                more.preferred_during_scheduling_ignored_during_execution,
            ),
        }),
    }
}

fn join<T>(own: Option<T>, more: Option<T>, both: impl FnOnce(T, T) -> T) -> Option<T> {
    match (own, more) {
        (Some(own), Some(more)) => Some(both(own, more)),
        (own, more) => own.or(more),
    }
}

fn lists<T: Clone>(own: Option<Vec<T>>, more: Option<Vec<T>>) -> Option<Vec<T>> {
    join(own, more, |own, more| [own, more].concat())
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

    fn placed(pod: Value, asked: Value, default: DefaultPlacement) -> Value {
        let mut pod: PodSpec = serde_json::from_value(pod).unwrap();
        let asked: Option<ComponentConfig> = serde_json::from_value(asked).unwrap();
        place(&mut pod, asked.as_ref(), default);
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
        let own = json!({"containers": [], "nodeSelector": {"a": "own"}, "affinity": affinity("x"),
                         "tolerations": [{"key": "t"}]});
        let asked = json!({"nodePlacement": {"nodeSelector": {"a": "asked", "b": "asked", "kubernetes.io/os": "other"},
                           "affinity": affinity("y"), "tolerations": [{"key": "u"}]}});
        let result = placed(own, asked, DefaultPlacement::ControlPlane);
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
