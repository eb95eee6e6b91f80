//! Parses verb and resource of a request from its method, path and query.
//!
//! Rules use verbs and resources, HTTP uses methods and paths. The API server makes the same translation before
//! authorization (its `RequestInfo`), so that a rule and the audit log use the same names. The body of the request is
//! not needed.

use http::{Method, Uri};

/// A verb, as in authorization and in the audit log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestVerb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
    DeleteCollection,
    /// A method without a verb, such as `OPTIONS`.
    Other,
}

impl RequestVerb {
    /// Whether the verb can change an object.
    pub fn is_write(self) -> bool {
        matches!(self, Self::Create | Self::Update | Self::Patch | Self::Delete | Self::DeleteCollection)
    }

    fn from_method(method: &Method) -> Self {
        match *method {
            Method::GET | Method::HEAD => Self::Get,
            Method::POST => Self::Create,
            Method::PUT => Self::Update,
            Method::PATCH => Self::Patch,
            Method::DELETE => Self::Delete,
            _ => Self::Other,
        }
    }
}

/// The verb and the object of a request. An absent field is an empty string: the core group, a cluster-scoped object, a
/// collection. If `resource` is empty, the path is not a resource (`/healthz`, discovery, `/openapi/v3`).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RequestInfo {
    pub verb: RequestVerb,
    pub group: String,
    pub version: String,
    pub resource: String,
    pub subresource: String,
    /// As in the API server, the namespace of `namespaces/foo` is `foo`.
    pub namespace: String,
    /// The name in the path, or in a `metadata.name=` field selector.
    pub name: String,
}

impl RequestInfo {
    pub fn parse(method: &Method, uri: &Uri) -> Self {
        let segments: Vec<String> = uri.path().split('/').filter(|part| !part.is_empty()).map(decode).collect();
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let verb = RequestVerb::from_method(method);
        match segments.as_slice() {
            ["api", version, rest @ ..] if !rest.is_empty() => resource(verb, "", version, rest, uri.query()),
            ["apis", group, version, rest @ ..] if !rest.is_empty() => {
                resource(verb, group, version, rest, uri.query())
            }
            _ => Self {
                verb,
                group: String::new(),
                version: String::new(),
                resource: String::new(),
                subresource: String::new(),
                namespace: String::new(),
                name: String::new(),
            },
        }
    }
}

fn resource(method: RequestVerb, group: &str, version: &str, path: &[&str], query: Option<&str>) -> RequestInfo {
    // `/api/v1/watch/…` is the deprecated form of `?watch=true`. The API server still serves it.
    let (watch_path, path) = match path {
        ["watch", rest @ ..] if !rest.is_empty() => (true, rest),
        other => (false, other),
    };
    let (namespace, path) = match path {
        ["namespaces", namespace, "status" | "finalize", ..] | ["namespaces", namespace] => (*namespace, path),
        ["namespaces", namespace, rest @ ..] => (*namespace, rest),
        other => ("", other),
    };
    let mut parts = path.iter().map(|part| (*part).to_owned());
    let resource = parts.next().unwrap_or_default();
    let mut name = parts.next().unwrap_or_default();
    let subresource = parts.next().unwrap_or_default();

    let verb = match method {
        RequestVerb::Get if watch_path => RequestVerb::Watch,
        RequestVerb::Get if name.is_empty() && is_watch(query) => RequestVerb::Watch,
        RequestVerb::Get if name.is_empty() => RequestVerb::List,
        RequestVerb::Delete if name.is_empty() => RequestVerb::DeleteCollection,
        other => other,
    };
    if name.is_empty() && matches!(verb, RequestVerb::List | RequestVerb::Watch | RequestVerb::DeleteCollection) {
        name = selected_name(query).unwrap_or_default();
    }
    RequestInfo {
        verb,
        group: group.to_owned(),
        version: version.to_owned(),
        resource,
        subresource,
        namespace: namespace.to_owned(),
        name,
    }
}

/// The API server treats every value except `false` and `0` as true, also an empty one.
fn is_watch(query: Option<&str>) -> bool {
    parameter(query, "watch").is_some_and(|value| value != "0" && !value.eq_ignore_ascii_case("false"))
}

fn selected_name(query: Option<&str>) -> Option<String> {
    let selector = parameter(query, "fieldSelector")?;
    selector.split(',').find_map(|term| {
        let value = term.trim().strip_prefix("metadata.name=")?;
        Some(value.strip_prefix('=').unwrap_or(value).to_owned())
    })
}

fn parameter(query: Option<&str>, key: &str) -> Option<String> {
    query?.split('&').find_map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(name) == key).then(|| decode(value))
    })
}

/// Percent-decoding. Names of RBAC objects contain colons, and only some clients escape them.
fn decode(text: &str) -> String {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        let escaped = (byte == b'%').then(|| {
            let mut ahead = bytes.clone();
            let high = char::from(ahead.next()?).to_digit(16)?;
            let low = char::from(ahead.next()?).to_digit(16)?;
            bytes = ahead;
            u8::try_from(high * 16 + low).ok()
        });
        decoded.push(escaped.flatten().unwrap_or(byte));
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `METHOD path` on the left; `verb group/version resource/subresource namespace name` on the right, `-` for
    /// absent.
    const TABLE: &[(&str, &str)] = &[
        ("GET /api/v1/pods", "List -/v1 pods/- - -"),
        ("GET /api/v1/namespaces/ns/pods", "List -/v1 pods/- ns -"),
        ("GET /api/v1/namespaces/ns/pods/p", "Get -/v1 pods/- ns p"),
        ("HEAD /api/v1/namespaces/ns/pods/p", "Get -/v1 pods/- ns p"),
        ("GET /api/v1/namespaces/ns/pods/p/log?follow=true", "Get -/v1 pods/log ns p"),
        ("GET /api/v1/namespaces/ns/services/s/proxy/a/b", "Get -/v1 services/proxy ns s"),
        ("POST /api/v1/namespaces/ns/pods", "Create -/v1 pods/- ns -"),
        ("POST /api/v1/namespaces/ns/pods/p/eviction", "Create -/v1 pods/eviction ns p"),
        ("POST /api/v1/namespaces/ns/serviceaccounts/s/token", "Create -/v1 serviceaccounts/token ns s"),
        ("PUT /api/v1/namespaces/ns/configmaps/c", "Update -/v1 configmaps/- ns c"),
        ("DELETE /api/v1/namespaces/ns/pods/p", "Delete -/v1 pods/- ns p"),
        ("DELETE /api/v1/namespaces/ns/pods?labelSelector=a%3Db", "DeleteCollection -/v1 pods/- ns -"),
        ("OPTIONS /api/v1/namespaces/ns/pods", "Other -/v1 pods/- ns -"),
        // Namespaces themselves.
        ("GET /api/v1/namespaces", "List -/v1 namespaces/- - -"),
        ("POST /api/v1/namespaces", "Create -/v1 namespaces/- - -"),
        ("GET /api/v1/namespaces/foo", "Get -/v1 namespaces/- foo foo"),
        ("DELETE /api/v1/namespaces/foo", "Delete -/v1 namespaces/- foo foo"),
        ("PUT /api/v1/namespaces/foo/finalize", "Update -/v1 namespaces/finalize foo foo"),
        ("PATCH /api/v1/namespaces/foo/status", "Patch -/v1 namespaces/status foo foo"),
        ("GET /api/v1/namespaces?watch=1", "Watch -/v1 namespaces/- - -"),
        // Groups, cluster-scoped and namespaced; server-side apply is a patch.
        ("GET /apis/apps/v1/deployments", "List apps/v1 deployments/- - -"),
        (
            "PATCH /apis/apps/v1/namespaces/ns/deployments/d?fieldManager=x&force=true",
            "Patch apps/v1 deployments/- ns d",
        ),
        ("PATCH /apis/kubevirt.io/v1/namespaces/ns/kubevirts/k/status", "Patch kubevirt.io/v1 kubevirts/status ns k"),
        (
            "PUT /apis/subresources.kubevirt.io/v1/namespaces/ns/virtualmachines/v/start",
            "Update subresources.kubevirt.io/v1 virtualmachines/start ns v",
        ),
        (
            "GET /apis/rbac.authorization.k8s.io/v1/clusterroles/system%3Anode",
            "Get rbac.authorization.k8s.io/v1 clusterroles/- - system:node",
        ),
        (
            "GET /apis/rbac.authorization.k8s.io/v1/clusterroles/system:node",
            "Get rbac.authorization.k8s.io/v1 clusterroles/- - system:node",
        ),
        ("DELETE /apis/example.org/v1/widgets", "DeleteCollection example.org/v1 widgets/- - -"),
        // Watches, and values of `watch` that do not start one.
        ("GET /api/v1/pods?resourceVersion=5&watch=true", "Watch -/v1 pods/- - -"),
        ("GET /api/v1/pods?watch", "Watch -/v1 pods/- - -"),
        ("GET /api/v1/pods?watch=false", "List -/v1 pods/- - -"),
        ("GET /api/v1/pods?watch=0", "List -/v1 pods/- - -"),
        ("GET /api/v1/pods?xwatch=true", "List -/v1 pods/- - -"),
        ("GET /api/v1/watch/namespaces/ns/pods", "Watch -/v1 pods/- ns -"),
        ("GET /api/v1/watch/namespaces/ns/pods/p", "Watch -/v1 pods/- ns p"),
        (
            "GET /apis/vitistack.io/v1alpha1/namespaces/ns/machines?&watch=true&allowWatchBookmarks=true",
            "Watch vitistack.io/v1alpha1 machines/- ns -",
        ),
        ("GET /api/v1/pods?watch=true&fieldSelector=metadata.name%3Dp", "Watch -/v1 pods/- - p"),
        ("GET /api/v1/pods?fieldSelector=status.phase%3DRunning,metadata.name==p", "List -/v1 pods/- - p"),
        // Discovery and other paths that are not resources.
        ("GET /api", "Get -/- -/- - -"),
        ("GET /api/v1", "Get -/- -/- - -"),
        ("GET /apis", "Get -/- -/- - -"),
        ("GET /apis/apps", "Get -/- -/- - -"),
        ("GET /apis/apps/v1/", "Get -/- -/- - -"),
        ("GET /healthz", "Get -/- -/- - -"),
        ("GET /openapi/v3?watch=true", "Get -/- -/- - -"),
        ("POST /", "Create -/- -/- - -"),
        // Invalid escapes are not changed.
        ("GET /api/v1/pods/100%25%zz%4", "Get -/v1 pods/- - 100%%zz%4"),
    ];

    fn or_dash(text: &str) -> &str {
        if text.is_empty() { "-" } else { text }
    }

    #[test]
    fn requests_are_parsed_like_in_the_api_server() {
        for (request, expected) in TABLE {
            let (method, uri) = request.split_once(' ').unwrap();
            let info = RequestInfo::parse(&method.parse().unwrap(), &uri.parse().unwrap());
            let actual = format!(
                "{:?} {}/{} {}/{} {} {}",
                info.verb,
                or_dash(&info.group),
                or_dash(&info.version),
                or_dash(&info.resource),
                or_dash(&info.subresource),
                or_dash(&info.namespace),
                or_dash(&info.name),
            );
            assert_eq!(&actual, expected, "{request}");
        }
    }
}
