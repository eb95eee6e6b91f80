//! Compares the manifests of the operator with those that the KubeVirt release has for its operator
//! (`reference/operator.expected.json`, `cargo xtask generate --release-data`).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use vitivirt_api::kubevirt::KubeVirt;
use vitivirt_install::{DeploymentConfig, Environment, InstallStrategy, Kind, manifests::Manifests};

const IMAGE: &str = "registry.example.com/ours:1";

fn by_name(objects: impl IntoIterator<Item = Value>) -> BTreeMap<String, Value> {
    let name = |object: &Value| {
        format!("{} {}", object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap())
    };
    objects.into_iter().map(|object| (name(&object), object)).collect()
}

fn upstream() -> BTreeMap<String, Value> {
    by_name(serde_json::from_str::<Vec<Value>>(include_str!("../reference/operator.expected.json")).unwrap())
}

pub(super) fn ours(namespace: &str) -> BTreeMap<String, Value> {
    by_name(
        Manifests { namespace: namespace.to_owned(), image: IMAGE.to_owned(), image_pull_secrets: Vec::new() }
            .objects()
            .unwrap(),
    )
}

/// Everything that the operator can install.
pub(super) fn largest_installation() -> InstallStrategy {
    let kubevirt: KubeVirt = serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
        "spec": {"configuration": {"developerConfiguration": {"featureGates": ["Template"]}}},
    }))
    .unwrap();
    let image = ("VIRT_OPERATOR_IMAGE".to_owned(), "quay.io/kubevirt/virt-operator:v1.8.4".to_owned());
    let config = DeploymentConfig::new(&kubevirt, &Environment::from_variables([image]));
    InstallStrategy::generate(&config, Some("monitoring"), None).unwrap()
}

/// One verb on one resource, or on one object of it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Permission {
    group: String,
    resource: String,
    name: Option<String>,
    verb: String,
}

impl Permission {
    fn new(group: &str, resource: &str, name: Option<&str>, verb: &str) -> Self {
        Self {
            group: group.to_owned(),
            resource: resource.to_owned(),
            name: name.map(ToOwned::to_owned),
            verb: verb.to_owned(),
        }
    }

    fn covers(&self, other: &Self) -> bool {
        let all_or = |own: &str, other: &str| own == "*" || own == other;
        all_or(&self.group, &other.group)
            && all_or(&self.resource, &other.resource)
            && all_or(&self.verb, &other.verb)
            && (self.name.is_none() || self.name == other.name)
    }
}

fn permissions(rules: &Value) -> BTreeSet<Permission> {
    let list = |rule: &Value, field: &str| -> Vec<String> {
        rule.get(field).map(|list| serde_json::from_value(list.clone()).unwrap()).unwrap_or_default()
    };
    let mut permissions = BTreeSet::new();
    for rule in rules.as_array().unwrap() {
        let names: Vec<Option<String>> = match list(rule, "resourceNames") {
            names if names.is_empty() => vec![None],
            names => names.into_iter().map(Some).collect(),
        };
        for verb in list(rule, "verbs") {
            for group in list(rule, "apiGroups") {
                for resource in list(rule, "resources") {
                    for name in &names {
                        permissions.insert(Permission::new(&group, &resource, name.as_deref(), &verb));
                    }
                }
            }
            for url in list(rule, "nonResourceURLs") {
                permissions.insert(Permission::new("(url)", &url, None, &verb));
            }
        }
    }
    permissions
}

#[test]
fn the_operator_has_the_permissions_of_upstream_and_six_more() {
    let (upstream, ours) = (upstream(), ours("kubevirt"));
    let constraint = |name| Permission::new("security.openshift.io", "securitycontextconstraints", Some(name), "patch");
    let event = |verb| Permission::new("events.k8s.io", "events", None, verb);
    for (role, count, additions, more) in [
        (
            "ClusterRole kubevirt-operator",
            136,
            4,
            BTreeSet::from([
                Permission::new("apiextensions.k8s.io", "customresourcedefinitions/status", None, "patch"),
                Permission::new("migrations.kubevirt.io", "migrationpolicies", None, "patch"),
                event("create"),
                event("patch"),
                constraint("kubevirt-handler"),
                constraint("kubevirt-controller"),
            ]),
        ),
        ("Role kubevirt-operator", 14, 0, BTreeSet::new()),
    ] {
        let (their_rules, our_rules) = (&upstream[role]["rules"], &ours[role]["rules"]);
        assert_eq!(their_rules.as_array().unwrap().len(), count);
        assert_eq!(our_rules.as_array().unwrap().len(), count + additions);
        let (their_rules, our_rules) = (permissions(their_rules), permissions(our_rules));
        let missing: Vec<_> = their_rules.difference(&our_rules).collect();
        assert!(missing.is_empty(), "{role} lacks {missing:#?}");
        assert_eq!(our_rules.difference(&their_rules).cloned().collect::<BTreeSet<_>>(), more, "{role}");
    }
}

/// The API server allows a client to grant only permissions that the client holds.
#[test]
fn the_operator_holds_every_permission_that_it_grants() {
    let strategy = largest_installation();
    let ours = ours("kubevirt");
    let held = [&ours["ClusterRole kubevirt-operator"]["rules"], &ours["Role kubevirt-operator"]["rules"]];
    let [everywhere, here] = held.map(permissions);
    let mut granted = 0;
    for item in strategy.items().iter().filter(|item| matches!(item.kind, Kind::ClusterRole | Kind::Role)) {
        for permission in permissions(&item.object().unwrap()["rules"]) {
            granted += 1;
            let locally = here.iter().filter(|_| item.kind == Kind::Role);
            let is_held = everywhere.iter().chain(locally).any(|held| held.covers(&permission));
            assert!(is_held, "{:?} grants {permission:?}, which the operator does not hold", item.key);
        }
    }
    assert!(granted > 500, "{granted}");
}

#[test]
fn accounts_bindings_and_the_priority_class_equal_those_of_upstream() {
    let (upstream, ours) = (upstream(), ours("kubevirt"));
    for name in [
        "ServiceAccount kubevirt-operator",
        "RoleBinding kubevirt-operator-rolebinding",
        "ClusterRoleBinding kubevirt-operator",
        "PriorityClass kubevirt-cluster-critical",
    ] {
        let (mut upstream, mut ours) = (upstream[name].clone(), ours[name].clone());
        for object in [&mut upstream, &mut ours] {
            // A description and a default.
            object.as_object_mut().unwrap().retain(|key, _| key != "description" && key != "globalDefault");
        }
        assert_eq!(ours, upstream, "{name}");
    }
    for name in ["Role kubevirt-operator", "ClusterRole kubevirt-operator", "Deployment virt-operator"] {
        assert_eq!(ours[name]["metadata"], upstream[name]["metadata"], "{name}");
    }
}

/// The paths at which the two differ, without values.
fn differing_paths(at: &str, upstream: &Value, ours: &Value, differing: &mut BTreeSet<String>) {
    match (upstream, ours) {
        (Value::Object(upstream), Value::Object(ours)) => {
            for key in upstream.keys().chain(ours.keys()) {
                let (upstream, ours) =
                    (upstream.get(key).unwrap_or(&Value::Null), ours.get(key).unwrap_or(&Value::Null));
                differing_paths(&format!("{at}/{key}"), upstream, ours, differing);
            }
        }
        (upstream, ours) if upstream != ours => drop(differing.insert(at.to_owned())),
        _ => {}
    }
}

#[test]
fn the_deployment_differs_from_upstream_only_where_the_program_does() {
    let (upstream, ours) = (&upstream()["Deployment virt-operator"], &ours("kubevirt")["Deployment virt-operator"]);
    let mut differing = BTreeSet::new();
    differing_paths("", &upstream["spec"], &ours["spec"], &mut differing);
    let expected = [
        "/template/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution",
        "/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution",
        "/template/spec/containers",
        "/template/spec/volumes",
    ];
    assert_eq!(differing.iter().map(String::as_str).collect::<Vec<_>>(), expected);

    let mut differing = BTreeSet::new();
    let container = "/spec/template/spec/containers/0";
    differing_paths("", upstream.pointer(container).unwrap(), ours.pointer(container).unwrap(), &mut differing);
    let expected = [
        "/env",
        "/image",
        "/livenessProbe/httpGet/path",
        "/readinessProbe/httpGet/path",
        "/resources/requests/memory",
        "/securityContext/readOnlyRootFilesystem",
        "/volumeMounts",
    ];
    assert_eq!(differing.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    let upstream_image = json!({"name": "VIRT_OPERATOR_IMAGE", "value": "quay.io/kubevirt/virt-operator:v1.8.4"});
    let env = ours.pointer(container).unwrap()["env"].as_array().unwrap();
    assert!(env.contains(&upstream_image), "KubeVirt's images are derived from the image of upstream virt-operator");
    assert!(upstream.pointer(container).unwrap()["env"].as_array().unwrap().contains(&upstream_image));
}

#[test]
fn every_object_is_in_the_chosen_namespace() {
    let ours = ours("elsewhere");
    assert_eq!(ours.len(), 10);
    assert_eq!(ours["Namespace elsewhere"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "privileged");
    for (name, object) in &ours {
        let namespace = &object["metadata"]["namespace"];
        assert!(namespace.is_null() || namespace == "elsewhere", "{name}");
        let subjects = object["subjects"].as_array().into_iter().flatten();
        assert!(subjects.into_iter().all(|subject| subject["namespace"] == "elsewhere"), "{name}");
    }
}
