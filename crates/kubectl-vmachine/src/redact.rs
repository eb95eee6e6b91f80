//! Removes from an object what must not be in a bug report: cloud-init data, environment variables, arguments, credentials
//! in URLs, and the values of annotations, which may be copies of the object.

use serde_json::Value;

const REMOVED: &str = "(removed)";
/// Fields with user data, of Machines and of KubeVirt's volumes.
const SECRET_FIELDS: [&str; 8] =
    ["userData", "userDataBase64", "networkData", "networkDataBase64", "userdata", "networkdata", "password", "token"];

/// Prefixes of annotations whose values stay. Other annotations may contain a copy of the object, or user data.
const KEPT_ANNOTATIONS: [&str; 4] = ["vitistack.io/", "pv.kubernetes.io/", "volume.kubernetes.io/", "cdi.kubevirt.io/"];

pub(crate) fn redact(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("managedFields");
            for (name, field) in fields.iter_mut() {
                match (name.as_str(), &mut *field) {
                    (name, Value::String(text)) if SECRET_FIELDS.contains(&name) => REMOVED.clone_into(text),
                    ("env", Value::Array(variables)) => variables.iter_mut().for_each(redact_variable),
                    ("args" | "command", Value::Array(words)) => words.fill(REMOVED.into()),
                    ("annotations", Value::Object(annotations)) => annotations.iter_mut().for_each(redact_annotation),
                    _ => redact(field),
                }
            }
        }
        Value::Array(elements) => elements.iter_mut().for_each(redact),
        Value::String(text) if text.contains("://") => *text = without_credentials(text),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn redact_annotation((key, value): (&String, &mut Value)) {
    if !KEPT_ANNOTATIONS.iter().any(|prefix| key.starts_with(prefix)) {
        *value = REMOVED.into();
    }
}

fn redact_variable(variable: &mut Value) {
    if let Some(value @ Value::String(_)) = variable.get_mut("value") {
        *value = REMOVED.into();
    }
}

/// The text with every URL in it, but without users, passwords, queries and fragments.
fn without_credentials(text: &str) -> String {
    let (mut result, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("://") {
        let is_end = |letter: char| letter.is_whitespace() || "\"'`<>".contains(letter);
        let (url, tail) = after.split_at_checked(after.find(is_end).unwrap_or(after.len())).unwrap_or((after, ""));
        let authority = url.split(['/', '?', '#']).next().unwrap_or_default();
        let path = url.strip_prefix(authority).unwrap_or_default().split(['?', '#']).next().unwrap_or_default();
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let query = if url.contains('?') { "?(removed)" } else { "" };
        result.extend([before, "://", host, path, query]);
        rest = tail;
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn user_data_and_credentials_are_removed_and_the_rest_stays() {
        let mut object = json!({
            "metadata": {
                "name": "web", "managedFields": [{}],
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "hunter2", "vitistack.io/adopt": "pvc/a"},
            },
            "spec": {
                "cloudInit": {"userData": "hunter2", "networkData": "hunter2", "secretRef": {"name": "s"}},
                "disks": [{"source": {"http": {"url": "https://joe:hunter2@example.com/a.img?token=hunter2"}}}],
                "volumes": [{"cloudInitNoCloud": {"userDataBase64": "hunter2", "secretRef": {"name": "s"}}}],
                "containers": [{
                    "env": [{"name": "A", "value": "hunter2"}],
                    "args": ["--url=https://joe:hunter2@example.com"],
                    "image": "docker://example.com/x:1",
                }],
                "template": {"metadata": {"annotations": {"kubevirt.io/ignitiondata": "hunter2"}}},
            },
            "status": {"message": "cannot read \"https://joe:hunter2@example.com/b?token=hunter2\": 403"},
        });
        redact(&mut object);
        assert!(!object.to_string().contains("hunter2"), "{object}");
        assert_eq!(object["spec"]["disks"][0]["source"]["http"]["url"], "https://example.com/a.img?(removed)");
        assert_eq!(object["spec"]["cloudInit"]["secretRef"]["name"], "s");
        assert_eq!(object["metadata"]["annotations"]["vitistack.io/adopt"], "pvc/a");
        assert_eq!(object["status"]["message"], "cannot read \"https://example.com/b?(removed)\": 403");
        assert_eq!(object["spec"]["containers"][0]["image"], "docker://example.com/x:1");
    }
}
