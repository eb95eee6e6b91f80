//! When KubeVirt may be removed, and when another may be made.

use vitivirt_api::{ObjectKey, kubevirt::KubeVirt};

use super::{Cause, Refusal};

const DEPLOYED: &str = "Deployed";
const REMOVE_WORKLOADS: &str = "RemoveWorkloads";

/// Whether workloads have to be looked for before this resource may be deleted. Only an installation that works is
/// guarded: one that never did has nothing that could run a workload.
pub fn is_guarded(kubevirt: &KubeVirt) -> bool {
    let deployed = kubevirt.status.as_ref().is_some_and(|status| status.phase == DEPLOYED);
    deployed && !matches!(kubevirt.spec.uninstall_strategy.as_str(), "" | REMOVE_WORKLOADS)
}

/// Workloads of one kind that are still there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remaining {
    /// In words: `Virtual Machines`.
    pub kind: &'static str,
    pub examples: Vec<ObjectKey>,
    /// There are more than the examples.
    pub more: bool,
}

/// The refusal to delete a guarded resource, if anything is left.
pub fn delete(kubevirt: &KubeVirt, remaining: &[Remaining]) -> Option<Refusal> {
    let left: Vec<String> = remaining.iter().filter(|left| !left.examples.is_empty()).map(describe).collect();
    let message = || {
        format!(
            "KubeVirt is not removed, because there are still {}, and spec.uninstallStrategy is {}: delete them first, \
             or set spec.uninstallStrategy to {REMOVE_WORKLOADS} to have them deleted with KubeVirt",
            left.join(" and "),
            kubevirt.spec.uninstall_strategy,
        )
    };
    (!left.is_empty()).then(|| Refusal::new(Cause::Forbidden, "", message()))
}

fn describe(remaining: &Remaining) -> String {
    let examples: Vec<String> = remaining.examples.iter().map(ToString::to_string).collect();
    let more = if remaining.more { " and others" } else { "" };
    format!("{} present ({}{more})", remaining.kind, examples.join(", "))
}

pub(super) fn one_is_enough(existing: &ObjectKey) -> Refusal {
    let message = format!(
        "KubeVirt is already created: there is {existing}, and a cluster has one installation; change that one, \
         or delete it and wait wait_for it is gone"
    );
    Refusal::new(Cause::Forbidden, "", message)
}
