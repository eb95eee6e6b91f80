//! What the API server adds to an object: the defaults of its type, fields that follow from others, and
//! `managedFields`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

/// The default of a field applies if its parent exists. `*` is every element of a list.
fn defaults(kind: &str) -> Vec<(&'static str, Value)> {
    match kind {
        "Deployment" => [
            vec![
                ("spec/progressDeadlineSeconds", json!(600)),
                ("spec/revisionHistoryLimit", json!(10)),
                (
                    "spec/strategy",
                    json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}}),
                ),
            ],
            pod_defaults(),
        ]
        .concat(),
        "DaemonSet" => [
            vec![("spec/revisionHistoryLimit", json!(10)), ("spec/updateStrategy/rollingUpdate/maxSurge", json!(0))],
            pod_defaults(),
        ]
        .concat(),
        "Service" => vec![
            ("spec/internalTrafficPolicy", json!("Cluster")),
            ("spec/ipFamilies", json!(["IPv4"])),
            ("spec/ipFamilyPolicy", json!("SingleStack")),
            ("spec/sessionAffinity", json!("None")),
        ],
        "APIService" => vec![("spec/service/port", json!(443))],
        "ValidatingWebhookConfiguration" => webhook_defaults(),
        "MutatingWebhookConfiguration" => {
            [webhook_defaults(), vec![("webhooks/*/reinvocationPolicy", json!("Never"))]].concat()
        }
        "ValidatingAdmissionPolicy" => match_defaults("spec/matchConstraints"),
        "ValidatingAdmissionPolicyBinding" => match_defaults("spec/matchResources"),
        "CustomResourceDefinition" => vec![("spec/conversion", json!({"strategy": "None"}))],
        _ => Vec::new(),
    }
}

fn pod_defaults() -> Vec<(&'static str, Value)> {
    vec![
        ("spec/template/spec/dnsPolicy", json!("ClusterFirst")),
        ("spec/template/spec/restartPolicy", json!("Always")),
        ("spec/template/spec/schedulerName", json!("default-scheduler")),
        ("spec/template/spec/securityContext", json!({})),
        ("spec/template/spec/terminationGracePeriodSeconds", json!(30)),
        ("spec/template/spec/volumes/*/secret/defaultMode", json!(420)),
        ("spec/template/spec/volumes/*/downwardAPI/defaultMode", json!(420)),
        ("spec/template/spec/volumes/*/downwardAPI/items/*/fieldRef/apiVersion", json!("v1")),
        ("spec/template/spec/volumes/*/hostPath/type", json!("")),
        ("spec/template/spec/initContainers/*/imagePullPolicy", json!("IfNotPresent")),
        ("spec/template/spec/initContainers/*/resources", json!({})),
        ("spec/template/spec/initContainers/*/terminationMessagePath", json!("/dev/termination-log")),
        ("spec/template/spec/containers/*/resources", json!({})),
        ("spec/template/spec/containers/*/terminationMessagePath", json!("/dev/termination-log")),
        ("spec/template/spec/containers/*/env/*/valueFrom/fieldRef/apiVersion", json!("v1")),
        ("spec/template/spec/containers/*/livenessProbe/failureThreshold", json!(3)),
        ("spec/template/spec/containers/*/livenessProbe/periodSeconds", json!(10)),
        ("spec/template/spec/containers/*/livenessProbe/successThreshold", json!(1)),
        ("spec/template/spec/containers/*/livenessProbe/timeoutSeconds", json!(1)),
        ("spec/template/spec/containers/*/readinessProbe/failureThreshold", json!(3)),
        ("spec/template/spec/containers/*/readinessProbe/periodSeconds", json!(10)),
        ("spec/template/spec/containers/*/readinessProbe/successThreshold", json!(1)),
        ("spec/template/spec/containers/*/readinessProbe/timeoutSeconds", json!(1)),
    ]
}

fn webhook_defaults() -> Vec<(&'static str, Value)> {
    vec![
        ("webhooks/*/matchPolicy", json!("Equivalent")),
        ("webhooks/*/namespaceSelector", json!({})),
        ("webhooks/*/objectSelector", json!({})),
        ("webhooks/*/rules/*/scope", json!("*")),
        ("webhooks/*/clientConfig/service/port", json!(443)),
    ]
}

fn match_defaults(at: &'static str) -> Vec<(&'static str, Value)> {
    let paths = match at {
        "spec/matchConstraints" => [
            "spec/matchConstraints/matchPolicy",
            "spec/matchConstraints/namespaceSelector",
            "spec/matchConstraints/objectSelector",
            "spec/matchConstraints/resourceRules/*/scope",
        ],
        _ => [
            "spec/matchResources/matchPolicy",
            "spec/matchResources/namespaceSelector",
            "spec/matchResources/objectSelector",
            "spec/matchResources/resourceRules/*/scope",
        ],
    };
    paths.into_iter().zip([json!("Equivalent"), json!({}), json!({}), json!("*")]).collect()
}

pub(crate) fn add_defaults(object: &mut Value) {
    let kind = object["kind"].as_str().unwrap().to_owned();
    for (path, value) in defaults(&kind) {
        let path: Vec<&str> = path.split('/').collect();
        set_default(object, &path, &value);
    }
    set_derived_fields(&kind, object);
}

fn set_default(value: &mut Value, path: &[&str], default: &Value) {
    match path {
        [] => {}
        ["*", rest @ ..] => {
            for element in value.as_array_mut().into_iter().flatten() {
                set_default(element, rest, default);
            }
        }
        [last] => {
            if let Some(map) = value.as_object_mut() {
                map.entry(*last).or_insert_with(|| default.clone());
            }
        }
        [first, rest @ ..] => {
            if let Some(inner) = value.get_mut(*first) {
                set_default(inner, rest, default);
            }
        }
    }
}

/// Fields that follow from other fields.
fn set_derived_fields(kind: &str, object: &mut Value) {
    match kind {
        "Deployment" | "DaemonSet" => {
            let pod = &mut object["spec"]["template"]["spec"];
            pod["serviceAccount"] = pod["serviceAccountName"].clone();
        }
        "Service" if object["spec"]["clusterIP"] == "None" => object["spec"]["clusterIPs"] = json!(["None"]),
        "CustomResourceDefinition" => {
            let names = &mut object["spec"]["names"];
            let list = format!("{}List", names["kind"].as_str().unwrap());
            names.as_object_mut().unwrap().entry("listKind").or_insert_with(|| list.into());
        }
        _ => {}
    }
}

/// Whether the API server counts the generations of this kind.
pub(crate) fn has_generation(kind: &str) -> bool {
    const WITHOUT: [&str; 10] = [
        "APIService",
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "Namespace",
        "Role",
        "RoleBinding",
        "Secret",
        "Service",
        "ServiceAccount",
    ];
    !WITHOUT.contains(&kind)
}

/// A path in the form of `managedFields`.
type Path = Vec<String>;

/// The keys of the elements of a list, by the name of the list. Any other list has one manager.
fn list_keys(kind: &str, list: &str) -> &'static [&'static str] {
    match (kind, list) {
        ("Deployment" | "DaemonSet", "containers" | "initContainers" | "env" | "volumes" | "imagePullSecrets") => {
            &["name"]
        }
        ("Deployment" | "DaemonSet", "volumeMounts") => &["mountPath"],
        ("Service", "ports") => &["port", "protocol"],
        ("ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration", "webhooks") => &["name"],
        _ => &[],
    }
}

/// Every value of an object that has a manager.
fn managed_values(object: &Value) -> BTreeMap<Path, Value> {
    let kind = object["kind"].as_str().unwrap_or_default();
    let mut values = BTreeMap::new();
    for (key, value) in object.as_object().into_iter().flatten() {
        let part = format!("f:{key}");
        match key.as_str() {
            "apiVersion" | "kind" | "status" => {}
            "metadata" => {
                for field in ["labels", "annotations", "ownerReferences"] {
                    if let Some(value) = value.get(field) {
                        collect_managed(kind, field, value, vec![part.clone(), format!("f:{field}")], &mut values);
                    }
                }
            }
            // It is large, and its metadata is all that the operator reads.
            "spec" if kind == "CustomResourceDefinition" => drop(values.insert(vec![part], value.clone())),
            _ => collect_managed(kind, key, value, vec![part], &mut values),
        }
    }
    values
}

fn collect_managed(kind: &str, name: &str, value: &Value, path: Path, values: &mut BTreeMap<Path, Value>) {
    let below = |part: String| [path.clone(), vec![part]].concat();
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                collect_managed(kind, key, value, below(format!("f:{key}")), values);
            }
        }
        Value::Array(elements) if !elements.is_empty() && !list_keys(kind, name).is_empty() => {
            for element in elements {
                let keys: Map<String, Value> = list_keys(kind, name)
                    .iter()
                    .filter_map(|key| Some(((*key).to_owned(), element.get(*key)?.clone())))
                    .collect();
                collect_managed(kind, "", element, below(format!("k:{}", Value::Object(keys))), values);
            }
        }
        _ => drop(values.insert(path, value.clone())),
    }
}

/// Updates `managedFields` after a client changed an object: the client becomes the only manager of every value that it
/// changed or that got a default by its change, and every other value keeps its managers.
pub(crate) fn set_managers(before: &Value, object: &mut Value, manager: &str) {
    let (old, new) = (managed_values(before), managed_values(object));
    let changed: BTreeSet<&Path> =
        new.iter().filter(|(path, value)| old.get(*path) != Some(*value)).map(|(path, _)| path).collect();
    let mut managers: BTreeMap<String, BTreeSet<Path>> = BTreeMap::new();
    for entry in before["metadata"]["managedFields"].as_array().into_iter().flatten() {
        let mut paths = BTreeSet::new();
        collect_paths(&entry["fieldsV1"], Vec::new(), &mut paths);
        paths.retain(|path| new.contains_key(path) && !changed.contains(path));
        managers.insert(entry["manager"].as_str().unwrap().to_owned(), paths);
    }
    managers.entry(manager.to_owned()).or_default().extend(changed.into_iter().cloned());
    let entries = managers.into_iter().filter(|(_, paths)| !paths.is_empty()).map(|(manager, paths)| {
        let mut tree = json!({});
        for path in paths {
            let mut at = &mut tree;
            for part in path {
                at = at.as_object_mut().unwrap().entry(part).or_insert_with(|| json!({}));
            }
        }
        json!({"manager": manager, "operation": "Update", "fieldsV1": tree})
    });
    object["metadata"]["managedFields"] = entries.collect();
}

fn collect_paths(tree: &Value, path: Path, paths: &mut BTreeSet<Path>) {
    match tree.as_object().filter(|parts| !parts.is_empty()) {
        Some(parts) => {
            for (part, below) in parts {
                collect_paths(below, [path.clone(), vec![part.clone()]].concat(), paths);
            }
        }
        None => drop(paths.insert(path)),
    }
}
