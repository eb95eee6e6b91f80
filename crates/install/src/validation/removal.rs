//! When a KubeVirt resource may be deleted, and when another one may be created.

use vitivirt_api::{ObjectKey, kubevirt::KubeVirt};

use super::{Cause, Refusal};

const DEPLOYED: &str = "Deployed";
const REMOVE_WORKLOADS: &str = "RemoveWorkloads";

/// Whether this resource may only be deleted without workloads. An installation that was never deployed cannot run
/// workloads, so it is not guarded.
pub fn is_guarded(kubevirt: &KubeVirt) -> bool {
    let deployed = kubevirt.status.as_ref().is_some_and(|status| status.phase == DEPLOYED);
    deployed && protects_workloads(kubevirt)
}

/// Whether KubeVirt is not removed while there are workloads.
pub fn protects_workloads(kubevirt: &KubeVirt) -> bool {
    !matches!(kubevirt.spec.uninstall_strategy.as_str(), "" | REMOVE_WORKLOADS)
}

/// Remaining workloads of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remaining {
    /// The kind for a message, for example `Virtual Machines`.
    pub kind: &'static str,
    pub examples: Vec<ObjectKey>,
    /// Whether there are more than the examples.
    pub more: bool,
}

/// The refusal to delete a guarded resource, if workloads remain.
pub fn delete(kubevirt: &KubeVirt, remaining: &[Remaining]) -> Option<Refusal> {
    let left: Vec<String> = remaining.iter().filter(|left| !left.examples.is_empty()).map(describe).collect();
    let message = || {
        format!(
            "KubeVirt cannot be deleted: there are still {}, and spec.uninstallStrategy is {}; delete them first, or set \
             spec.uninstallStrategy to {REMOVE_WORKLOADS} to delete them together with KubeVirt",
            left.join(" and "),
            kubevirt.spec.uninstall_strategy,
        )
    };
    (!left.is_empty()).then(|| Refusal::new(Cause::Forbidden, "", message()))
}

/// The workloads of one kind, for a message.
pub fn describe(remaining: &Remaining) -> String {
    let examples: Vec<String> = remaining.examples.iter().map(ToString::to_string).collect();
    let more = if remaining.more { " and others" } else { "" };
    format!("{} present ({}{more})", remaining.kind, examples.join(", "))
}

/// Clients search the message for the words of upstream virt-operator, in its spelling.
pub(crate) fn already_exists(existing: &ObjectKey) -> Refusal {
    let message = format!(
        "Kubevirt is already created: KubeVirt {existing} already exists, and a cluster can have only one \
         installation; change that one, or delete it and wait until it is gone"
    );
    Refusal::new(Cause::Forbidden, "", message)
}
