//! Who refuses what the operator asks for, and what can be done about it. The reason is told apart because the cures are:
//! KubeVirt's own word is about the machine, anybody else's about the rules of this cluster.

use vitivirt_api::machine::machine_reason as reason;
use vitivirt_api::{ErrorClass, Failure, reason as cause};

/// Why a request failed, as the condition names it, and what to do; none for what the next try may heal.
pub(super) fn explain(failure: &Failure) -> Option<(&'static str, String)> {
    let words = &failure.message;
    Some(match (failure.class, failure.reason) {
        (_, cause::PERMISSION_MISSING) => (
            reason::PERMISSION_MISSING,
            format!(
                "{words}; grant that to the operator's service account (config/rbac does), and it goes on by itself"
            ),
        ),
        (_, cause::QUOTA_EXCEEDED) => {
            (reason::QUOTA_EXCEEDED, format!("{words}; raise the namespace's quota or ask for less"))
        }
        (_, cause::ADMISSION_REFUSED | cause::INVALID_OBJECT | cause::WEBHOOK_UNREACHABLE) => refused(failure),
        (_, cause::API_NOT_INSTALLED) | (ErrorClass::Invalid | ErrorClass::Bug, _) => {
            (reason::KUBEVIRT_API_ERROR, words.clone())
        }
        (ErrorClass::Conflict | ErrorClass::Transient | ErrorClass::Forbidden, _) => return None,
    })
}

fn refused(failure: &Failure) -> (&'static str, String) {
    let words = &failure.message;
    match (is_kubevirts(failure), failure.reason) {
        (true, _) => (reason::KUBEVIRT_API_ERROR, format!("{words}{}", hint(words))),
        (false, cause::WEBHOOK_UNREACHABLE) => {
            (reason::ADMISSION_REFUSED, format!("{words}; nothing passes this webhook until it answers: repair it"))
        }
        (false, _) => {
            (reason::ADMISSION_REFUSED, format!("{words}; change what is refused, or ask whoever made the rule"))
        }
    }
}

/// KubeVirt refuses by its webhooks and by the schema of its kinds. A policy about its kinds is somebody else's.
fn is_kubevirts(failure: &Failure) -> bool {
    let webhook = failure.message.split_once("webhook \"").and_then(|(_, rest)| rest.split('"').next());
    match webhook {
        Some(name) => name.ends_with(".kubevirt.io"),
        None => failure.reason == cause::INVALID_OBJECT && failure.message.contains(".kubevirt.io \""),
    }
}

/// What an administrator can do about a refusal of KubeVirt's.
fn hint(message: &str) -> &'static str {
    if message.contains("machine type") || message.contains("machine.type") {
        "; an administrator can allow it in the KubeVirt resource: \
         spec.configuration.architectureConfiguration.amd64.emulatedMachines"
    } else {
        ""
    }
}
