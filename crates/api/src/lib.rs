//! The vocabulary of both operators: what a pass wants to write, what came of it, why something failed.
//!
//! Everything here is data. There is no client in this crate's dependencies, no async and no clock, so a crate that
//! builds on it alone can decide but not do. The doing is in `runtime`, which takes these values and nothing else.
//! The custom resource types join this crate with the operators that read them.

mod condition;
mod failure;
mod key;
pub mod kubevirt;
pub mod machine;
mod plan;
pub mod text;

pub use condition::{ConditionStatus, set_condition};
pub use failure::{ErrorClass, Failure, reason};
pub use key::ObjectKey;
pub use kube_core::ApiResource;
pub use plan::{
    Body, EventKind, EventRecord, EventSubject, LazyWrite, Operation, Outcome, Plan, Report, StatusWrite, Step, Stop,
    Target, Wait, Write, remove_finalizer,
};

/// The registry and owner of the images of both programs.
pub const IMAGE_REPOSITORY: &str = "ghcr.io/vitistack";

/// The KubeVirt release that virt-operator installs and that kubevirt-operator is tested with.
pub const KUBEVIRT_RELEASE: &str = "v1.8.4";
