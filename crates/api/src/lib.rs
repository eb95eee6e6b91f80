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
mod repairs;
pub mod resources;
pub mod text;
pub mod view;

pub use condition::{ConditionStatus, set_condition};
pub use failure::{ErrorClass, Failure, STARTING, reason};
pub use key::ObjectKey;
pub use kube_core::ApiResource;
pub use plan::{
    Body, EventKind, EventRecord, EventSubject, LazyWrite, Operation, Outcome, Plan, Report, StatusWrite, Step, Stop,
    Target, Wait, Write, remove_finalizer,
};
pub use quantity::Quantity;
pub use repairs::{RecentWrites, repeated_drift_message};

macro_rules! image_name {
    () => {
        "vitistack/kubevirt-operator"
    };
}

/// The image that contains both programs.
pub const IMAGE: &str = concat!("ghcr.io/", image_name!(), ":", env!("CARGO_PKG_VERSION"));

/// The name of that image in every registry, without the tag.
pub const IMAGE_NAME: &str = image_name!();

/// Where users find the documentation. Messages link to its pages.
const DOCS: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/");

/// The URL of a page of the documentation, with an optional anchor: `docs_url("first-machine.md")`.
pub fn docs_url(page: &str) -> String {
    format!("{DOCS}{page}")
}

/// The section of the troubleshooting page about the reason of a condition.
pub fn troubleshooting_url(reason: &str) -> String {
    docs_url(&format!("troubleshooting.md#{}", reason.to_ascii_lowercase()))
}

/// The KubeVirt release that virt-operator installs and that kubevirt-operator is tested with.
pub const KUBEVIRT_RELEASE: &str = "v1.8.4";

/// Where KubeVirt publishes its images.
pub const KUBEVIRT_REGISTRY: &str = "quay.io/kubevirt";
