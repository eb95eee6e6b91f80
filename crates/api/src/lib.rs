//! Types that both operators share: the custom resources (`machine`, `kubevirt`), and the plan, outcome, report and
//! failure of a reconcile.
//!
//! Everything here is data. The crate has no client, no async runtime and no clock, and decides nothing about a
//! cluster: `vitivirt-machine` and `vitivirt-install` compute plans and reports, and `vitivirt-runtime` sends them.

mod condition;
mod failure;
mod key;
pub mod kubevirt;
pub mod machine;
mod plan;
mod quantity;
pub mod resources;
pub mod text;

pub use condition::{ConditionStatus, set_condition};
pub use failure::{ErrorClass, Failure, STARTING, reason};
pub use key::ObjectKey;
pub use kube_core::ApiResource;
pub use plan::{
    Body, EventKind, EventRecord, EventSubject, LazyWrite, Operation, Outcome, Plan, Report, StatusWrite, Step, Stop,
    Target, Wait, Write, remove_finalizer,
};
pub use quantity::Quantity;

/// The image that contains both programs.
pub const IMAGE: &str = concat!("ghcr.io/vitistack/kubevirt-operator:", env!("CARGO_PKG_VERSION"));

/// The KubeVirt release that virt-operator installs and that kubevirt-operator is tested with.
pub const KUBEVIRT_RELEASE: &str = "v1.8.4";
