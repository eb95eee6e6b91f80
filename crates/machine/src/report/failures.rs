//! The reason and the remedy of a failed request. Rejections by KubeVirt have another reason than other rejections,
//! because they have another remedy: KubeVirt rejects the machine, other webhooks and policies enforce rules of the
//! cluster.

use vitivirt_api::{ErrorClass, Failure, machine::machine_reason as reason, reason as failure_reason};

/// The reason of the condition, and a message with the remedy. None if a retry may succeed without a change.
pub(super) fn classify_failure(failure: &Failure) -> Option<(&'static str, String)> {
    let message = &failure.message;
    if failure.is_not_reachable_yet() {
        return None;
    }
    Some(match (failure.class, failure.reason) {
        (_, failure_reason::PERMISSION_MISSING) => (
            reason::PERMISSION_MISSING,
            format!(
                "{message}; grant the permission to the operator's ServiceAccount; the operator retries automatically"
            ),
        ),
        (_, failure_reason::QUOTA_EXCEEDED) => {
            (reason::QUOTA_EXCEEDED, format!("{message}; raise the quota of the namespace or request fewer resources"))
        }
        (
            _,
            failure_reason::ADMISSION_REFUSED | failure_reason::INVALID_OBJECT | failure_reason::WEBHOOK_UNREACHABLE,
        ) => admission_error(failure),
        (_, failure_reason::API_NOT_INSTALLED) | (ErrorClass::Invalid | ErrorClass::Bug, _) => {
            (reason::KUBEVIRT_API_ERROR, message.clone())
        }
        (ErrorClass::Conflict | ErrorClass::Transient | ErrorClass::Forbidden, _) => return None,
    })
}

/// An error message as the beginning of a condition: in sentence case and without a leading "the".
pub(super) fn sentence_case(error: &str) -> String {
    let mut rest = error.strip_prefix("the ").unwrap_or(error).chars();
    let first = rest.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(rest).collect()
}

fn admission_error(failure: &Failure) -> (&'static str, String) {
    let message = &failure.message;
    if is_from_kubevirt(failure) {
        return (reason::KUBEVIRT_API_ERROR, format!("{message}{}", remedy(message)));
    }
    let remedy = if failure.reason == failure_reason::WEBHOOK_UNREACHABLE {
        "the request cannot succeed until the webhook responds; fix the webhook"
    } else {
        "change the rejected field, or ask the owner of the webhook or policy"
    };
    (reason::ADMISSION_REFUSED, format!("{message}; {remedy}"))
}

/// KubeVirt rejects objects with its webhooks and with the schemas of its CRDs. A policy for KubeVirt's kinds belongs
/// to the cluster.
fn is_from_kubevirt(failure: &Failure) -> bool {
    let webhook = failure.message.split_once("webhook \"").and_then(|(_, rest)| rest.split('"').next());
    match webhook {
        Some(name) => name.ends_with(".kubevirt.io"),
        None => failure.reason == failure_reason::INVALID_OBJECT && failure.message.contains(".kubevirt.io \""),
    }
}

/// What an administrator can do about a rejection by KubeVirt.
fn remedy(message: &str) -> &'static str {
    if message.contains("machine type") || message.contains("machine.type") {
        "; an administrator can allow it in the KubeVirt resource: \
         spec.configuration.architectureConfiguration.amd64.emulatedMachines"
    } else {
        ""
    }
}
