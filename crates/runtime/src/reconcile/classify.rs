//! Classifies the errors of requests to the API server.
//!
//! The message keeps the server's own text, because it is what helps the user. The class depends only on status codes,
//! and on the few phrases that distinguish errors of Kubernetes with the same code.

use std::{borrow::Cow, time::Duration};

use kube::core::Status;
use vitivirt_api::{Failure, Target, reason};

use crate::{
    client::{DeadlineExceeded, NotLeading, is_caused_by},
    root_cause::root_cause,
};

/// Conditions and events show the server's message to users. A longer one is not more useful.
const MESSAGE_LIMIT: usize = 1024;

/// `verb` as RBAC names it.
pub fn classify(error: &kube::Error, verb: &str, target: &Target) -> Failure {
    match error {
        kube::Error::Api(status) => classify_status(status, verb, target),
        kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => {
            // The error may quote the response, and the response may be a Secret.
            Failure::bug(
                reason::UNREADABLE_ANSWER,
                format!("cannot {verb} {target}: the API server's response is not readable"),
            )
        }
        kube::Error::BuildRequest(_) | kube::Error::HttpError(_) => {
            Failure::bug(reason::BAD_REQUEST, format!("cannot {verb} {target}: {}", bounded(&error.to_string())))
        }
        kube::Error::Auth(_) => Failure::transient(
            reason::UNAUTHORIZED,
            format!("cannot {verb} {target}: no valid credentials: {}", bounded(&error.to_string())),
        ),
        _ if is_caused_by::<NotLeading>(error) => Failure::transient(
            reason::NOT_LEADING,
            format!("cannot {verb} {target}: this replica is no longer the leader"),
        ),
        _ if is_caused_by::<DeadlineExceeded>(error) => Failure::transient(
            reason::DEADLINE_EXCEEDED,
            format!("cannot {verb} {target}: the API server did not respond in time"),
        ),
        _ => Failure::transient(
            reason::API_SERVER_UNREACHABLE,
            format!("cannot {verb} {target}: the API server is not reachable: {}", bounded(&root_cause(error))),
        ),
    }
}

fn classify_status(status: &Status, verb: &str, target: &Target) -> Failure {
    let text = bounded(&status.message);
    let message = format!("cannot {verb} {target}: {text}");
    let details = status.details.as_ref();
    let retry_after = details.map(|details| details.retry_after_seconds).filter(|seconds| *seconds > 0);
    let has_cause = |name: &str| details.is_some_and(|details| details.causes.iter().any(|cause| cause.reason == name));
    let denied = text.contains("denied the request") || text.contains("denied request:");
    let failure = match status.code {
        401 => Failure::transient(reason::UNAUTHORIZED, message),
        _ if has_cause("NamespaceTerminating") => Failure::transient(reason::NAMESPACE_TERMINATING, message),
        // "status unknown": the quota controller has not counted the usage yet.
        403 if text.contains("exceeded quota") || text.contains("status unknown for quota") => {
            Failure::transient(reason::QUOTA_EXCEEDED, message)
        }
        400 | 403 | 422 if denied => Failure::invalid(reason::ADMISSION_REFUSED, message),
        403 if is_authorization_error(&text) => {
            let message = grant_message(verb, target, &text).unwrap_or_else(|| permission_message(verb, target, &text));
            Failure::forbidden(reason::PERMISSION_MISSING, message)
        }
        // LimitRanger, PodSecurity and the other admission plugins of the server itself.
        403 => Failure::invalid(reason::ADMISSION_REFUSED, message),
        404 if details.is_some_and(|details| details.kind == "namespaces") && !is_namespace(target) => {
            Failure::transient(reason::NAMESPACE_MISSING, message)
        }
        // Without details the path does not exist: the API server does not serve the kind.
        404 if details.is_none_or(|details| details.name.is_empty() && details.kind.is_empty()) => Failure::transient(
            reason::API_NOT_INSTALLED,
            format!("the API server does not serve {} ({})", target.resource.kind, target.resource.api_version),
        ),
        404 => Failure::conflict(reason::OBJECT_GONE, message),
        // Server-side apply with a UID, and no object has the name.
        409 if text.contains("no existing object was found") => Failure::conflict(reason::OBJECT_GONE, message),
        409 | 410 | 412 => Failure::conflict(reason::OBJECT_CHANGED, message),
        // Server-side apply to an object with another UID: the UID is immutable.
        422 if rejects_uid(status, &text) => Failure::conflict(reason::OBJECT_CHANGED, message),
        413 | 422 => Failure::invalid(reason::INVALID_OBJECT, message),
        429 => Failure::transient(reason::TOO_MANY_REQUESTS, message),
        500 if text.contains("failed calling webhook") || text.contains("conversion webhook for ") => {
            Failure::transient(reason::WEBHOOK_UNREACHABLE, message)
        }
        // The API server itself, or the server behind an APIService, does not answer yet.
        503 => Failure::transient(reason::API_UNAVAILABLE, message),
        408 | 500.. => Failure::transient(reason::API_SERVER_ERROR, message),
        _ => Failure::bug(reason::BAD_REQUEST, message),
    };
    match retry_after {
        Some(seconds) => failure.retry_after(Duration::from_secs(u64::from(seconds))),
        None => failure,
    }
}

fn rejects_uid(status: &Status, text: &str) -> bool {
    let named =
        status.details.as_ref().is_some_and(|details| details.causes.iter().any(|cause| cause.field == "metadata.uid"));
    named || (text.contains("metadata.uid") && text.contains("immutable"))
}

/// Recognizes the messages of the authorizers, and of the check that rejects granting permissions that the user lacks.
fn is_authorization_error(text: &str) -> bool {
    let has = |first: &str, second: &str| text.split_once(first).is_some_and(|(_, rest)| rest.contains(second));
    has("cannot ", "resource") || has("cannot ", "path") || text.contains("attempting to grant RBAC permissions")
}

fn is_namespace(target: &Target) -> bool {
    target.resource.group.is_empty() && target.resource.kind == "Namespace"
}

fn permission_message(verb: &str, target: &Target, text: &str) -> String {
    let resource = &target.resource;
    let group = if resource.group.is_empty() { "the core API group" } else { resource.group.as_str() };
    let scope = target.key.namespace().map_or_else(|| "the cluster".to_owned(), |name| format!("namespace {name}"));
    format!("the operator may not {verb} {} of {group} in {scope}; the API server responded: {text}", resource.plural)
}

/// The API server lets a client grant only permissions that the client has itself, and its message lists the others. The
/// names of the user and of its groups come first, and would hide them in a short message.
fn grant_message(verb: &str, target: &Target, text: &str) -> Option<String> {
    let (_, rules) = text.split_once("permissions not currently held:")?;
    let rules: Vec<&str> = rules.lines().map(str::trim).filter(|rule| !rule.is_empty()).collect();
    Some(format!(
        "cannot {verb} {target}: it grants permissions that the operator does not have; add these rules to the operator's \
         own role, for example by applying its manifests of this version: {}",
        rules.join(", ")
    ))
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
        Target::of_kind::<Secret>(ObjectKey::namespaced("shop", "db"))
    }

    fn failure(status: serde_json::Value) -> Failure {
        let status: Status = serde_json::from_value(status).unwrap();
        classify(&kube::Error::Api(status.boxed()), "create", &target())
    }

    #[test]
    fn fault_25_the_rules_that_cannot_be_granted_are_named() {
        let rules = [
            "{APIGroups:[\"kubevirt.io\"], Resources:[\"virtualmachines\"], Verbs:[\"get\"]}",
            "{APIGroups:[\"\"], Resources:[\"pods/resize\"], Verbs:[\"update\"]}",
        ];
        let message = format!(
            "roles \"db\" is forbidden: user \"system:serviceaccount:shop:operator\" (groups=[\"system:authenticated\"]) \
             is attempting to grant RBAC permissions not currently held:\n{}\n{}",
            rules[0], rules[1]
        );
        let failure = failure(json!({"code": 403, "message": message}));
        assert_eq!(failure.class, ErrorClass::Forbidden);
        assert_eq!(
            failure.message,
            format!(
                "cannot create Secret shop/db: it grants permissions that the operator does not have; add these rules to \
                 the operator's own role, for example by applying its manifests of this version: {}, {}",
                rules[0], rules[1]
            )
        );
    }

    #[test]
    fn every_status_code_has_a_class_and_a_reason() {
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
            (
                json!({"code": 500, "message": "conversion webhook for kubevirt.io/v1, Kind=X failed: Post \"https://x\": EOF"}),
                ErrorClass::Transient,
                reason::WEBHOOK_UNREACHABLE,
            ),
            (json!({"code": 503, "message": "service unavailable"}), ErrorClass::Transient, reason::API_UNAVAILABLE),
            (json!({"code": 504}), ErrorClass::Transient, reason::API_SERVER_ERROR),
            (json!({"code": 400, "message": "unknown field"}), ErrorClass::Bug, reason::BAD_REQUEST),
            (json!({"code": 405}), ErrorClass::Bug, reason::BAD_REQUEST),
        ] {
            let failure = failure(status.clone());
            assert_eq!((failure.class, failure.reason), (class, reason), "{status}");
        }
    }

    #[test]
    fn a_missing_permission_is_named_with_verb_resource_and_namespace() {
        let text = "secrets is forbidden: User \"x\" cannot create resource \"secrets\" in API group \"\"";
        let failure = failure(json!({"code": 403, "message": text}));
        assert!(
            failure.message.contains("may not create secrets of the core API group in namespace shop"),
            "{failure}"
        );
    }

    #[test]
    fn a_missing_namespace_as_the_target_itself_is_object_gone() {
        let status = json!({"code": 404, "details": {"name": "shop", "kind": "namespaces"}});
        let status: Status = serde_json::from_value(status).unwrap();
        let target = Target::of_kind::<Namespace>(ObjectKey::cluster("shop"));
        let failure = classify(&kube::Error::Api(status.boxed()), "patch", &target);
        assert_eq!((failure.class, failure.reason), (ErrorClass::Conflict, reason::OBJECT_GONE));
    }

    #[test]
    fn retry_after_seconds_of_the_server_become_retry_after() {
        let failure = failure(json!({"code": 429, "details": {"retryAfterSeconds": 7}}));
        assert_eq!(failure.retry_after, Some(Duration::from_secs(7)));
    }

    #[test]
    fn timeouts_and_refused_connections_are_transient() {
        let timeout = kube::Error::Service(DeadlineExceeded(Duration::from_secs(1)).into());
        assert_eq!(classify(&timeout, "patch", &target()).reason, reason::DEADLINE_EXCEEDED);
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let failure = classify(&kube::Error::Service(refused.into()), "patch", &target());
        assert_eq!((failure.class, failure.reason), (ErrorClass::Transient, reason::API_SERVER_UNREACHABLE));
        assert!(failure.message.contains("connection refused"), "{failure}");
    }

    #[test]
    fn the_message_does_not_quote_an_unreadable_response() {
        let error = serde_json::from_str::<u8>("\"secret canary\"").unwrap_err();
        let failure = classify(&kube::Error::SerdeError(error), "get", &target());
        assert_eq!(failure.class, ErrorClass::Bug);
        assert!(!failure.message.contains("canary"));
    }
}
