//! Whether a live object is what it should be, and what to change if it is not.
//!
//! The server completes what it is given with defaults, and tells in `managedFields` who set what. So an object is as
//! wanted when everything that we want is in it, and nothing that somebody else has added to the fields we manage.
//! No table of the server's defaults is needed, and what a newer server adds of its own accord is no difference.
//! Labels and annotations of others stay.

use serde_json::{Map, Value};
use vitivirt_api::{Failure, Operation};

use crate::{
    kind::Kind,
    live::LiveObject,
    names::{annotation, label},
};

/// What is to be done with an object that is there.
#[derive(Clone, PartialEq)]
pub enum Drift {
    None,
    Patch(Vec<Operation>),
    /// What differs cannot be changed: it has to be deleted and made again.
    Replace,
}

/// Labels that are ours also when they are not wanted any more.
const OUR_LABELS: [&str; 3] = [label::VERSION, label::PART_OF, label::COMPONENT];
const OUR_ANNOTATIONS: [&str; 1] = [annotation::CUSTOMIZER_IDENTIFIER];
/// Which deployment a pod is of. It is not worth a restart.
const IDENTITY: [&str; 3] = [annotation::VERSION, annotation::REGISTRY, annotation::IDENTIFIER];
/// What the server has given to a Service, and no one may change.
const ALLOCATED: [&str; 5] = ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "healthCheckNodePort"];

/// How a live object differs from `wanted`, which is the object as it would be created. Nothing but metadata is
/// compared of an object of which only metadata is known.
pub fn drift(kind: Kind, wanted: &Value, live: &LiveObject) -> Result<Drift, Failure> {
    let mut operations = marks(wanted, live);
    if let Some(fields) = live.fields()? {
        let Some(wanted) = wanted.as_object() else { return Ok(Drift::None) };
        for (key, value) in content(kind, wanted) {
            let have = fields.content.get(key).unwrap_or(&Value::Null);
            let value = completed(kind, value, have);
            let added = fields
                .foreign
                .iter()
                .filter_map(|tree| tree.get(format!("f:{key}")))
                .any(|tree| adds(&value, have, tree));
            if same(kind, &value, have) && !added {
                continue;
            }
            if is_fixed(kind, key, &value, have) {
                return Ok(Drift::Replace);
            }
            let operation = Operation::set(format!("/{key}"), value);
            // Others bring certificates in ConfigMaps of ours. What came since we looked must not be lost.
            let shared = kind == Kind::ConfigMap;
            operations.push(if shared { operation.expecting(have.clone()) } else { operation });
        }
        operations.extend(foreign_fields(kind, wanted, &fields.content, &fields.foreign));
    }
    if operations.is_empty() {
        return Ok(Drift::None);
    }
    // It says at which generation of the resource an object changed last, so it alone is no difference.
    if let Some(generation) = wanted.pointer("/metadata/annotations").and_then(|all| all.get(annotation::GENERATION)) {
        let path = format!("/metadata/annotations/{}", Operation::escape(annotation::GENERATION));
        if !operations.iter().any(|operation| operation.path == "/metadata/annotations") {
            operations.push(Operation::set(path, generation.clone()));
        }
    }
    Ok(Drift::Patch(operations))
}

/// The parts of an object that are compared.
fn content(kind: Kind, object: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    object.iter().filter(move |(key, _)| {
        let aside = ["apiVersion", "kind", "metadata", "status"].contains(&key.as_str());
        // Others add tokens and pull secrets to an account. The type of a Secret is fixed: one of another is not ours.
        !aside && kind != Kind::ServiceAccount && !(kind == Kind::Secret && *key == "type")
    })
}

/// What no patch can change.
fn is_fixed(kind: Kind, key: &str, wanted: &Value, have: &Value) -> bool {
    match kind {
        Kind::RoleBinding | Kind::ClusterRoleBinding => key == "roleRef",
        Kind::Service => {
            let headless = |spec: &Value| spec.get("clusterIP").is_some_and(|address| address == "None");
            headless(wanted) != headless(have)
        }
        _ => false,
    }
}

/// Of labels and annotations alone.
pub(crate) fn marks(wanted: &Value, live: &LiveObject) -> Vec<Operation> {
    let mut operations = Vec::new();
    for (field, have, ours) in
        [("labels", &live.labels, OUR_LABELS.as_slice()), ("annotations", &live.annotations, &OUR_ANNOTATIONS)]
    {
        let nothing = Map::new();
        let wanted = wanted.pointer(&format!("/metadata/{field}")).and_then(Value::as_object).unwrap_or(&nothing);
        let differs = |(key, value): &(&String, &Value)| {
            key.as_str() != annotation::GENERATION && have.get(*key).map(String::as_str) != value.as_str()
        };
        let path = |key: &str| format!("/metadata/{field}/{}", Operation::escape(key));
        let changed: Vec<_> = wanted.iter().filter(differs).collect();
        if have.is_empty() && !changed.is_empty() {
            operations.push(Operation::set(format!("/metadata/{field}"), Value::Object(wanted.clone())));
            continue;
        }
        operations.extend(changed.into_iter().map(|(key, value)| Operation::set(path(key), value.clone())));
        let stale = ours.iter().filter(|key| have.contains_key(**key) && !wanted.contains_key(**key));
        operations.extend(stale.map(|key| Operation::remove(path(key))));
    }
    operations
}

/// What we want, together with what the server alone decides.
fn completed(kind: Kind, wanted: &Value, have: &Value) -> Value {
    if matches!(kind, Kind::Deployment | Kind::DaemonSet) {
        return with_identity_of(wanted, have);
    }
    let mut wanted = wanted.clone();
    if kind == Kind::Service
        && let (Some(wanted), Some(have)) = (wanted.as_object_mut(), have.as_object())
    {
        let headless = have.get("clusterIP").is_some_and(|address| address == "None");
        for key in ALLOCATED.into_iter().filter(|_| !headless) {
            if let (None, Some(value)) = (wanted.get(key), have.get(key)) {
                wanted.insert(key.to_owned(), value.clone());
            }
        }
    }
    wanted
}

fn same(kind: Kind, wanted: &Value, have: &Value) -> bool {
    match kind {
        // Exact: there are no defaults in data.
        Kind::Secret | Kind::ConfigMap => wanted == have,
        _ => covers(wanted, have),
    }
}

/// The pods keep the marks of the deployment that started them, if nothing else about them changes: whatever else of
/// the workload does, they are not restarted for it.
fn with_identity_of(asked: &Value, have: &Value) -> Value {
    const ANNOTATIONS: &str = "/template/metadata/annotations";
    let mut wanted = asked.clone();
    let theirs = have.pointer(ANNOTATIONS).and_then(Value::as_object);
    if let (Some(ours), Some(theirs)) = (wanted.pointer_mut(ANNOTATIONS).and_then(Value::as_object_mut), theirs) {
        for mark in IDENTITY {
            if let Some(value) = theirs.get(mark) {
                ours.insert(mark.to_owned(), value.clone());
            }
        }
    }
    let same_pods = match (wanted.get("template"), have.get("template")) {
        (Some(wanted), Some(have)) => covers(wanted, have),
        _ => false,
    };
    if same_pods { wanted } else { asked.clone() }
}

/// Whether all of `wanted` is in `have`. An empty value and none are the same: the server leaves empty ones out.
fn covers(wanted: &Value, have: &Value) -> bool {
    match (wanted, have) {
        (Value::Object(wanted), Value::Object(have)) => wanted.iter().all(|(key, value)| {
            let have = have.get(key).unwrap_or(&Value::Null);
            let amounts = ["limits", "requests", "sizeLimit"].contains(&key.as_str());
            covers(value, have) || amounts && same_amounts(value, have)
        }),
        (Value::Array(wanted), Value::Array(have)) => {
            wanted.len() == have.len() && wanted.iter().zip(have).all(|(wanted, have)| covers(wanted, have))
        }
        (wanted, Value::Null) => is_empty(wanted),
        (Value::Number(wanted), Value::Number(have)) => wanted == have || wanted.as_f64() == have.as_f64(),
        _ => wanted == have,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(fields) => fields.values().all(is_empty),
        Value::Array(elements) => elements.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Bool(true) => false,
    }
}

fn same_amounts(wanted: &Value, have: &Value) -> bool {
    match (wanted, have) {
        (Value::Object(wanted), Value::Object(have)) => {
            wanted.iter().all(|(name, amount)| have.get(name).is_some_and(|have| same_amounts(amount, have)))
        }
        (Value::String(wanted), Value::String(have)) => wanted == have || same_quantity(wanted, have),
        _ => false,
    }
}

/// The server writes `0.5` of a CPU as `500m`, and `1024Mi` as `1Gi`.
fn same_quantity(a: &str, b: &str) -> bool {
    matches!((quantity(a), quantity(b)), (Some(a), Some(b)) if (a - b).abs() <= a.abs() * 1e-12)
}

fn quantity(text: &str) -> Option<f64> {
    let end = text.find(|character: char| !(character.is_ascii_digit() || "+-.".contains(character)));
    let (number, suffix) = text.split_at(end.unwrap_or(text.len()));
    let factor = match suffix {
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1_048_576.0,
        "Gi" => 1_073_741_824.0,
        "Ti" => 1_099_511_627_776.0,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

/// Whether somebody else has set something here that we do not want. `tree` is of the form that `managedFields` has:
/// `f:` names a field, `k:` an element of a list by its keys, `.` the thing itself.
fn adds(wanted: &Value, have: &Value, tree: &Value) -> bool {
    let Some(parts) = tree.as_object() else { return false };
    parts.iter().any(|(part, below)| {
        let find = |value: &'_ Value| -> Option<Value> {
            if let Some(field) = part.strip_prefix("f:") {
                return value.get(field).cloned();
            }
            let keys: Value = serde_json::from_str(part.strip_prefix("k:")?).ok()?;
            let matches = |element: &&Value| {
                keys.as_object().is_some_and(|keys| keys.iter().all(|(key, value)| element.get(key) == Some(value)))
            };
            value.as_array()?.iter().find(matches).cloned()
        };
        let Some(have) = find(have).filter(|have| !is_empty(have)) else { return false };
        let wanted = find(wanted).unwrap_or(Value::Null);
        match below.as_object().is_some_and(|below| !below.is_empty()) {
            true => adds(&wanted, &have, below),
            // All of it is theirs: whatever of it we do not want.
            false => exceeds(&wanted, &have),
        }
    })
}

/// Whether something is in `have` that is not in `wanted`.
fn exceeds(wanted: &Value, have: &Value) -> bool {
    match (wanted, have) {
        (_, have) if is_empty(have) => false,
        (Value::Object(wanted), Value::Object(have)) => {
            have.iter().any(|(key, value)| exceeds(wanted.get(key).unwrap_or(&Value::Null), value))
        }
        // Values and lengths of what we want are compared elsewhere.
        (wanted, _) => wanted.is_null(),
    }
}

/// Whole fields of the object that others have added beside ours.
fn foreign_fields(kind: Kind, wanted: &Map<String, Value>, have: &Value, foreign: &[Value]) -> Vec<Operation> {
    let names =
        foreign.iter().filter_map(Value::as_object).flat_map(Map::keys).filter_map(|key| key.strip_prefix("f:"));
    let mut names: Vec<&str> = names.filter(|name| !["metadata", "status"].contains(name)).collect();
    names.sort_unstable();
    names.dedup();
    let added = names.into_iter().filter(|name| {
        kind != Kind::ServiceAccount
            && !wanted.contains_key(*name)
            && have.get(name).is_some_and(|value| !is_empty(value))
    });
    added.map(|name| Operation::remove(format!("/{name}"))).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use serde_json::json;

    use super::*;

    fn live(object: &Value) -> LiveObject {
        let metadata: ObjectMeta = serde_json::from_value(object["metadata"].clone()).unwrap();
        LiveObject::new(&metadata, object.clone())
    }

    fn paths(kind: Kind, wanted: &Value, have: &Value) -> Vec<String> {
        match drift(kind, wanted, &live(have)).unwrap() {
            Drift::None => Vec::new(),
            Drift::Replace => vec!["replace".to_owned()],
            Drift::Patch(operations) => operations
                .into_iter()
                .map(|operation| format!("{}{}", if operation.value.is_none() { "-" } else { "" }, operation.path))
                .collect(),
        }
    }

    fn deployment() -> Value {
        json!({
            "metadata": {"labels": {"a": "1"}, "annotations": {"kubevirt.io/generation": "1"}},
            "spec": {"replicas": 2, "template": {
                "metadata": {"annotations": {"kubevirt.io/install-strategy-identifier": "one"}},
                "spec": {"containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "0.5"}}}]},
            }},
        })
    }

    /// What the server makes of it.
    fn stored() -> Value {
        let mut stored = deployment();
        stored["spec"]["progressDeadlineSeconds"] = json!(600);
        stored["spec"]["template"]["spec"]["dnsPolicy"] = json!("ClusterFirst");
        stored["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("500m");
        stored["metadata"]["managedFields"] = json!([
            {"manager": "virt-operator", "operation": "Update", "fieldsV1": {"f:spec": {"f:progressDeadlineSeconds": {}}}},
            {"manager": "kube-controller-manager", "operation": "Update", "subresource": "status",
             "fieldsV1": {"f:status": {}}},
        ]);
        stored
    }

    fn by(manager: &str, fields: &Value) -> Value {
        json!([{"manager": manager, "operation": "Update", "fieldsV1": fields}])
    }

    #[test]
    fn what_the_server_completes_is_no_difference() {
        assert_eq!(paths(Kind::Deployment, &deployment(), &stored()), [""; 0]);
    }

    #[test]
    fn a_changed_and_a_removed_value_are_put_back() {
        let mut have = stored();
        have["spec"]["replicas"] = json!(3);
        let generation = "/metadata/annotations/kubevirt.io~1generation";
        assert_eq!(paths(Kind::Deployment, &deployment(), &have), ["/spec", generation]);
        let mut have = stored();
        have["spec"]["template"]["spec"]["containers"][0].as_object_mut().unwrap().remove("image");
        assert_eq!(paths(Kind::Deployment, &deployment(), &have), ["/spec", generation]);
    }

    #[test]
    fn what_somebody_else_adds_is_removed() {
        let path = json!({"f:spec": {"f:template": {"f:spec": {
            "f:containers": {"k:{\"name\":\"c\"}": {"f:tty": {}}},
        }}}});
        let mut have = stored();
        have["spec"]["template"]["spec"]["containers"][0]["tty"] = json!(true);
        assert_eq!(paths(Kind::Deployment, &deployment(), &have), [""; 0], "nobody is known to have set it");
        have["metadata"]["managedFields"] = by("kubectl-edit", &path);
        assert_eq!(paths(Kind::Deployment, &deployment(), &have)[0], "/spec");
        // The same by a name of our own is what an older release of ours wanted: it goes with the next change.
        have["metadata"]["managedFields"] = by("virt-operator", &path);
        assert_eq!(paths(Kind::Deployment, &deployment(), &have), [""; 0]);
        // Somebody changed a default.
        let mut have = stored();
        have["spec"]["progressDeadlineSeconds"] = json!(5);
        have["metadata"]["managedFields"] = by("kubectl-edit", &json!({"f:spec": {"f:progressDeadlineSeconds": {}}}));
        assert_eq!(paths(Kind::Deployment, &deployment(), &have)[0], "/spec");
        // Somebody set what we want too.
        let mut have = stored();
        have["metadata"]["managedFields"] = by("kubectl-edit", &json!({"f:spec": {"f:replicas": {}}}));
        assert_eq!(paths(Kind::Deployment, &deployment(), &have), [""; 0]);
    }

    #[test]
    fn another_deployment_of_the_same_pods_restarts_none() {
        let mut wanted = deployment();
        wanted["spec"]["template"]["metadata"]["annotations"]["kubevirt.io/install-strategy-identifier"] = json!("two");
        wanted["metadata"]["annotations"]["kubevirt.io/generation"] = json!("2");
        assert_eq!(paths(Kind::Deployment, &wanted, &stored()), [""; 0]);
        wanted["spec"]["template"]["spec"]["containers"][0]["image"] = json!("j");
        assert_eq!(paths(Kind::Deployment, &wanted, &stored())[0], "/spec");
    }

    #[test]
    fn labels_of_others_stay_and_ours_are_exact() {
        let mut have = stored();
        have["metadata"]["labels"] = json!({"a": "2", "theirs": "x", "app.kubernetes.io/part-of": "old"});
        let generation = "/metadata/annotations/kubevirt.io~1generation";
        let expected = ["/metadata/labels/a", "-/metadata/labels/app.kubernetes.io~1part-of", generation];
        assert_eq!(paths(Kind::Deployment, &deployment(), &have), expected);
        have["metadata"]["labels"] = Value::Null;
        assert_eq!(paths(Kind::Deployment, &deployment(), &have)[0], "/metadata/labels");
    }

    #[test]
    fn a_service_keeps_its_addresses() {
        let wanted = json!({"metadata": {}, "spec": {"ports": [{"port": 443, "targetPort": 8443}]}});
        let mut have = json!({"metadata": {}, "spec": {"clusterIP": "1.2.3.4", "type": "ClusterIP",
            "ports": [{"port": 443, "targetPort": 8443, "protocol": "TCP"}]}});
        assert_eq!(paths(Kind::Service, &wanted, &have), [""; 0]);
        have["spec"]["ports"][0]["targetPort"] = json!(1);
        let Drift::Patch(operations) = drift(Kind::Service, &wanted, &live(&have)).unwrap() else { panic!() };
        assert_eq!(operations[0].value.as_ref().unwrap()["clusterIP"], "1.2.3.4");
    }

    #[test]
    fn what_cannot_be_changed_is_made_again() {
        let wanted = json!({"metadata": {}, "roleRef": {"name": "a"}, "subjects": []});
        let have = json!({"metadata": {}, "roleRef": {"name": "b"}});
        assert_eq!(paths(Kind::RoleBinding, &wanted, &have), ["replace"]);
    }

    #[test]
    fn data_is_exact() {
        let wanted = json!({"metadata": {}, "data": {"a": "1"}});
        let have = json!({"metadata": {}, "data": {"a": "1", "b": "2"}});
        assert_eq!(paths(Kind::ConfigMap, &wanted, &have), ["/data"]);
    }

    #[test]
    fn whole_fields_of_others_go() {
        let wanted = json!({"metadata": {}, "rules": []});
        let mut have =
            json!({"metadata": {}, "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]}});
        have["metadata"]["managedFields"] = by("kubectl-edit", &json!({"f:aggregationRule": {}}));
        assert_eq!(paths(Kind::ClusterRole, &wanted, &have), ["-/aggregationRule"]);
    }
}
