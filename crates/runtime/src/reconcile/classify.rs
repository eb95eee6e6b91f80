//! From an answer of the API server to a class of failure.
//!
//! The server's words are kept in the message, because they are what helps; which class it is depends only on codes
//! and on the few phrases by which Kubernetes tells refusals apart that share a code.

use std::{borrow::Cow, error::Error as _, time::Duration};

use kube::core::Status;
use vitivirt_api::{Failure, Target, reason};

use crate::client::{DeadlineExceeded, NotLeading};

/// What a server says is shown to users in conditions and events; more than this helps nobody.
const MESSAGE_LIMIT: usize = 1024;

/// `verb` as RBAC names it.
pub fn classify(error: &kube::Error, verb: &str, target: &Target) -> Failure {
    match error {
        kube::Error::Api(status) => classify_status(status, verb, target),
        kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => {
            // The error may quote the answer, and the answer may be a Secret.
            Failure::bug(reason::UNREADABLE_ANSWER, format!("the answer to {verb} {target} could not be read"))
        }
        kube::Error::BuildRequest(_) | kube::Error::HttpError(_) => {
            Failure::bug(reason::BAD_REQUEST, format!("{verb} {target}: {}", bounded(&error.to_string())))
        }
        kube::Error::Auth(_) => Failure::transient(
            reason::UNAUTHORIZED,
            format!("no credentials for {verb} {target}: {}", bounded(&error.to_string())),
        ),
        _ if is_caused_by::<NotLeading>(error) => Failure::transient(
            reason::NOT_LEADING,
            format!("{verb} {target} was not sent: this replica does not lead any more"),
        ),
        _ if is_caused_by::<DeadlineExceeded>(error) => Failure::transient(
            reason::DEADLINE_EXCEEDED,
            format!("the API server did not answer {verb} {target} in time"),
        ),
        _ => Failure::transient(
            reason::API_SERVER_UNREACHABLE,
            format!("the API server could not be reached for {verb} {target}: {}", bounded(&deepest(error))),
        ),
    }
}

fn classify_status(status: &Status, verb: &str, target: &Target) -> Failure {
    let said = bounded(&status.message);
    let about = format!("{verb} {target}: {said}");
    let details = status.details.as_ref();
    let retry_after = details.map(|details| details.retry_after_seconds).filter(|seconds| *seconds > 0);
    let cause = |name: &str| details.is_some_and(|details| details.causes.iter().any(|cause| cause.reason == name));
    let denied = said.contains("denied the request") || said.contains("denied request:");
    let failure = match status.code {
        401 => Failure::transient(reason::UNAUTHORIZED, about),
        _ if cause("NamespaceTerminating") => Failure::transient(reason::NAMESPACE_TERMINATING, about),
        // The second: the quota has not been counted yet.
        403 if said.contains("exceeded quota") || said.contains("status unknown for quota") => {
            Failure::transient(reason::QUOTA_EXCEEDED, about)
        }
        400 | 403 | 422 if denied => Failure::invalid(reason::ADMISSION_REFUSED, about),
        403 if is_authorization(&said) => {
            Failure::forbidden(reason::PERMISSION_MISSING, permission(verb, target, &said))
        }
        // LimitRanger, PodSecurity and the other admission plugins of the server itself.
        403 => Failure::invalid(reason::ADMISSION_REFUSED, about),
        404 if details.is_some_and(|details| details.kind == "namespaces") && !is_namespace(target) => {
            Failure::transient(reason::NAMESPACE_MISSING, about)
        }
        // Without details it is not an object that is missing but the path: the kind.
        404 if details.is_none_or(|details| details.name.is_empty() && details.kind.is_empty()) => Failure::transient(
            reason::API_NOT_INSTALLED,
            format!("the API server does not know {} ({})", target.resource.kind, target.resource.api_version),
        ),
        404 => Failure::conflict(reason::OBJECT_GONE, about),
        // Server-side apply with a UID where there is nothing to apply to.
        409 if said.contains("no existing object was found") => Failure::conflict(reason::OBJECT_GONE, about),
        409 | 410 | 412 => Failure::conflict(reason::OBJECT_CHANGED, about),
        // Server-side apply to an object of another UID: the UID is a field that cannot be changed.
        422 if names_uid(status, &said) => Failure::conflict(reason::OBJECT_CHANGED, about),
        413 | 422 => Failure::invalid(reason::INVALID_OBJECT, about),
        429 => Failure::transient(reason::TOO_MANY_REQUESTS, about),
        500 if said.contains("failed calling webhook") => Failure::transient(reason::WEBHOOK_UNREACHABLE, about),
        408 | 500.. => Failure::transient(reason::API_SERVER_ERROR, about),
        _ => Failure::bug(reason::BAD_REQUEST, about),
    };
    match retry_after {
        Some(seconds) => failure.retry_after(Duration::from_secs(u64::from(seconds))),
        None => failure,
    }
}

fn names_uid(status: &Status, said: &str) -> bool {
    let named =
        status.details.as_ref().is_some_and(|details| details.causes.iter().any(|cause| cause.field == "metadata.uid"));
    named || (said.contains("metadata.uid") && said.contains("immutable"))
}

/// The words of the authorizers, and of the checks on who may hand out rights that he does not have.
fn is_authorization(said: &str) -> bool {
    let words = |first: &str, second: &str| said.split_once(first).is_some_and(|(_, rest)| rest.contains(second));
    words("cannot ", "resource") || words("cannot ", "path") || said.contains("attempting to grant RBAC permissions")
}

fn is_namespace(target: &Target) -> bool {
    target.resource.group.is_empty() && target.resource.kind == "Namespace"
}

fn permission(verb: &str, target: &Target, said: &str) -> String {
    let resource = &target.resource;
    let group = if resource.group.is_empty() { "the core API group" } else { resource.group.as_str() };
    let place = target.key.namespace().map_or_else(|| "the cluster".to_owned(), |name| format!("namespace {name}"));
    format!("the operator may not {verb} {} of {group} in {place}; the server says: {said}", resource.plural)
}

fn is_caused_by<E: std::error::Error + 'static>(error: &kube::Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if error.is::<E>() {
            return true;
        }
        next = error.source();
    }
    false
}

/// "connection refused" rather than the four layers that pass it on.
fn deepest(error: &kube::Error) -> String {
    let mut last: &(dyn std::error::Error + 'static) = error;
    while let Some(source) = last.source() {
        last = source;
    }
    if error.source().is_none() { error.to_string() } else { last.to_string() }
}

fn bounded(text: &str) -> Cow<'_, str> {
    vitivirt_api::text::truncate(text, MESSAGE_LIMIT)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Namespace, Secret};
    use serde_json::json;
    use vitivirt_api::{ErrorClass, ObjectKey};

    use super::*;

    fn target() -> Target {
        Target::of::<Secret>(ObjectKey::namespaced("shop", "db"))
    }

    fn failure(status: serde_json::Value) -> Failure {
        let status: Status = serde_json::from_value(status).unwrap();
        classify(&kube::Error::Api(status.boxed()), "create", &target())
    }

    #[test]
    fn every_answer_has_its_class() {
        let named = json!({"name": "db", "kind": "secrets"});
        for (status, class, reason) in [
            (json!({"code": 401}), ErrorClass::Transient, reason::UNAUTHORIZED),
            (
                json!({"code": 403, "message": "User \"x\" cannot create resource"}),
                ErrorClass::Forbidden,
                reason::PERMISSION_MISSING,
            ),
            (
                json!({"code": 403, "message": "pods \"a\" is forbidden: exceeded quota: q"}),
                ErrorClass::Transient,
                reason::QUOTA_EXCEEDED,
            ),
            (
                json!({"code": 403, "details": {"causes": [{"reason": "NamespaceTerminating"}]}}),
                ErrorClass::Transient,
                reason::NAMESPACE_TERMINATING,
            ),
            (
                json!({"code": 403, "message": "admission webhook \"w\" denied the request: no"}),
                ErrorClass::Invalid,
                reason::ADMISSION_REFUSED,
            ),
            (
                json!({"code": 403, "message": "pods \"a\" is forbidden: status unknown for quota: q, resources: pods"}),
                ErrorClass::Transient,
                reason::QUOTA_EXCEEDED,
            ),
            (
                json!({"code": 403, "message": "pods \"a\" is forbidden: maximum cpu usage per Pod is 1, but limit is 2"}),
                ErrorClass::Invalid,
                reason::ADMISSION_REFUSED,
            ),
            (
                json!({"code": 403, "message": "pods \"a\" is forbidden: violates PodSecurity \"restricted:latest\": x"}),
                ErrorClass::Invalid,
                reason::ADMISSION_REFUSED,
            ),
            (
                json!({"code": 403, "message": "roles \"a\" is forbidden: user \"x\" is attempting to grant RBAC \
                     permissions not currently held"}),
                ErrorClass::Forbidden,
                reason::PERMISSION_MISSING,
            ),
            (json!({"code": 404, "message": "404 page not found"}), ErrorClass::Transient, reason::API_NOT_INSTALLED),
            (json!({"code": 404, "details": named}), ErrorClass::Conflict, reason::OBJECT_GONE),
            (
                json!({"code": 404, "details": {"name": "shop", "kind": "namespaces"}}),
                ErrorClass::Transient,
                reason::NAMESPACE_MISSING,
            ),
            (json!({"code": 409, "reason": "Conflict"}), ErrorClass::Conflict, reason::OBJECT_CHANGED),
            (json!({"code": 410, "reason": "Expired"}), ErrorClass::Conflict, reason::OBJECT_CHANGED),
            (json!({"code": 422, "reason": "Invalid"}), ErrorClass::Invalid, reason::INVALID_OBJECT),
            (
                json!({"code": 422, "details": {"causes": [{"reason": "FieldValueInvalid", "field": "metadata.uid"}]}}),
                ErrorClass::Conflict,
                reason::OBJECT_CHANGED,
            ),
            (
                json!({"code": 422, "message": "metadata.uid: Invalid value: \"u\": field is immutable"}),
                ErrorClass::Conflict,
                reason::OBJECT_CHANGED,
            ),
            (
                json!({"code": 422, "details": {"causes": [{"reason": "FieldValueInvalid", "field": "spec.x"}]}}),
                ErrorClass::Invalid,
                reason::INVALID_OBJECT,
            ),
            (json!({"code": 429}), ErrorClass::Transient, reason::TOO_MANY_REQUESTS),
            (json!({"code": 500}), ErrorClass::Transient, reason::API_SERVER_ERROR),
            (
                json!({"code": 500, "message": "failed calling webhook \"w\""}),
                ErrorClass::Transient,
                reason::WEBHOOK_UNREACHABLE,
            ),
            (json!({"code": 503}), ErrorClass::Transient, reason::API_SERVER_ERROR),
            (json!({"code": 504}), ErrorClass::Transient, reason::API_SERVER_ERROR),
            (json!({"code": 400, "message": "unknown field"}), ErrorClass::Bug, reason::BAD_REQUEST),
            (json!({"code": 405}), ErrorClass::Bug, reason::BAD_REQUEST),
        ] {
            let failure = failure(status.clone());
            assert_eq!((failure.class, failure.reason), (class, reason), "{status}");
        }
    }

    #[test]
    fn a_missing_permission_is_named() {
        let said = "secrets is forbidden: User \"x\" cannot create resource \"secrets\" in API group \"\"";
        let failure = failure(json!({"code": 403, "message": said}));
        assert!(
            failure.message.contains("may not create secrets of the core API group in namespace shop"),
            "{failure}"
        );
    }

    #[test]
    fn a_namespace_that_is_gone_is_an_object_that_is_gone() {
        let status = json!({"code": 404, "details": {"name": "shop", "kind": "namespaces"}});
        let status: Status = serde_json::from_value(status).unwrap();
        let target = Target::of::<Namespace>(ObjectKey::cluster("shop"));
        let failure = classify(&kube::Error::Api(status.boxed()), "patch", &target);
        assert_eq!((failure.class, failure.reason), (ErrorClass::Conflict, reason::OBJECT_GONE));
    }

    #[test]
    fn the_server_decides_how_long_to_wait() {
        let failure = failure(json!({"code": 429, "details": {"retryAfterSeconds": 7}}));
        assert_eq!(failure.retry_after, Some(Duration::from_secs(7)));
    }

    #[test]
    fn what_never_arrived_is_transient() {
        let timeout = kube::Error::Service(DeadlineExceeded(Duration::from_secs(1)).into());
        assert_eq!(classify(&timeout, "patch", &target()).reason, reason::DEADLINE_EXCEEDED);
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let failure = classify(&kube::Error::Service(refused.into()), "patch", &target());
        assert_eq!((failure.class, failure.reason), (ErrorClass::Transient, reason::API_SERVER_UNREACHABLE));
        assert!(failure.message.contains("connection refused"), "{failure}");
    }

    #[test]
    fn an_unreadable_answer_is_not_quoted() {
        let error = serde_json::from_str::<u8>("\"secret canary\"").unwrap_err();
        let failure = classify(&kube::Error::SerdeError(error), "get", &target());
        assert_eq!(failure.class, ErrorClass::Bug);
        assert!(!failure.message.contains("canary"));
    }
}
