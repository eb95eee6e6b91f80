//! The verb of a request, as RBAC and the audit log name it. Metrics count requests by verb, and the client treats a
//! watch differently from all other requests.

use std::time::Duration;

use http::{Method, Uri, uri::PathAndQuery};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
    Other,
}

impl Verb {
    pub(crate) fn from_request(method: &Method, uri: &Uri) -> Self {
        match *method {
            Method::GET if parameter(uri, "watch").is_some_and(|value| value == "true" || value == "1") => Self::Watch,
            Method::GET if names_one_object(uri.path()) => Self::Get,
            Method::GET => Self::List,
            Method::POST => Self::Create,
            Method::PUT => Self::Update,
            Method::PATCH => Self::Patch,
            Method::DELETE => Self::Delete,
            _ => Self::Other,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Watch => "watch",
            Self::Create => "create",
            Self::Update => "update",
            Self::Patch => "patch",
            Self::Delete => "delete",
            Self::Other => "other",
        }
    }
}

/// How long the request asks the server to keep a watch open.
pub(crate) fn server_timeout(uri: &Uri) -> Option<Duration> {
    parameter(uri, "timeoutSeconds")?.parse().ok().map(Duration::from_secs)
}

pub(crate) fn parameter<'a>(uri: &'a Uri, name: &str) -> Option<&'a str> {
    uri.query()?
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .find_map(|(key, value)| (key == name).then_some(value))
}

/// The address with another value of a query parameter. The value needs no escaping.
pub(crate) fn with_parameter(uri: &Uri, name: &str, value: &str) -> Uri {
    let is_other = |pair: &&str| !pair.is_empty() && pair.split_once('=').is_none_or(|(key, _)| key != name);
    let others = uri.query().unwrap_or_default().split('&').filter(is_other);
    let query: Vec<String> = others.map(ToOwned::to_owned).chain([format!("{name}={value}")]).collect();
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(format!("{}?{}", uri.path(), query.join("&"))).ok();
    Uri::from_parts(parts).unwrap_or_else(|_| uri.clone())
}

/// The resource of a request, such as `pods`. `None` for paths that are not those of objects (discovery, version).
pub(crate) fn resource(path: &str) -> Option<&str> {
    resource_and_rest(path).map(|(resource, _)| resource)
}

fn names_one_object(path: &str) -> bool {
    resource_and_rest(path).is_none_or(|(_, names_object)| names_object)
}

/// `/api/v1/…` and `/apis/group/version/…`, with or without `namespaces/<name>/` before `<resource>[/<name>[/…]]`: the
/// resource, and whether a name follows. Every other path is a single document.
fn resource_and_rest(path: &str) -> Option<(&str, bool)> {
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    let prefix = match parts.next()? {
        "api" => 1,
        "apis" => 2,
        _ => return None,
    };
    let rest: Vec<&str> = parts.skip(prefix).collect();
    match rest.as_slice() {
        [] => None,
        ["namespaces", _, resource, rest @ ..] | [resource, rest @ ..] => Some((resource, !rest.is_empty())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verb(method: &Method, uri: &'static str) -> Verb {
        Verb::from_request(method, &Uri::from_static(uri))
    }

    #[test]
    fn a_read_of_one_object_is_a_get_and_of_a_collection_a_list() {
        assert_eq!(verb(&Method::GET, "/api/v1/pods"), Verb::List);
        assert_eq!(verb(&Method::GET, "/api/v1/namespaces/a/pods?limit=5"), Verb::List);
        assert_eq!(verb(&Method::GET, "/api/v1/namespaces/a/pods/b"), Verb::Get);
        assert_eq!(verb(&Method::GET, "/api/v1/namespaces/a"), Verb::Get);
        assert_eq!(verb(&Method::GET, "/api/v1/namespaces"), Verb::List);
        assert_eq!(verb(&Method::GET, "/apis/kubevirt.io/v1/virtualmachines"), Verb::List);
        assert_eq!(verb(&Method::GET, "/apis/kubevirt.io/v1/namespaces/a/virtualmachines/b/status"), Verb::Get);
        assert_eq!(verb(&Method::GET, "/version"), Verb::Get);
        assert_eq!(verb(&Method::GET, "/apis/kubevirt.io/v1"), Verb::Get);
    }

    #[test]
    fn only_a_get_with_the_parameter_watch_is_a_watch() {
        assert_eq!(verb(&Method::GET, "/api/v1/pods?&watch=true&timeoutSeconds=290"), Verb::Watch);
        assert_eq!(verb(&Method::GET, "/api/v1/pods?watch=false"), Verb::List);
        assert_eq!(verb(&Method::GET, "/api/v1/pods?labelSelector=watch%3Dtrue"), Verb::List);
        assert_eq!(verb(&Method::POST, "/api/v1/namespaces/a/pods?watch=true"), Verb::Create);
        assert_eq!(
            server_timeout(&Uri::from_static("/p?&watch=true&timeoutSeconds=290")),
            Some(Duration::from_secs(290))
        );
    }
}
