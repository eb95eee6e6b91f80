//! What the API server adds to an object: the defaults of its type, and fields that follow from others.

use serde_json::{Value, json};

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
        "Service" if object["spec"].get("clusterIP").is_some() => object["spec"]["clusterIPs"] = json!(["None"]),
        "CustomResourceDefinition" => {
            let names = &mut object["spec"]["names"];
            let list = format!("{}List", names["kind"].as_str().unwrap());
            names.as_object_mut().unwrap().entry("listKind").or_insert_with(|| list.into());
        }
        _ => {}
    }
}
