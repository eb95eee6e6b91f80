//! The decisions about Machines: pure functions from the observed state to the writes and the status.
//!
//! No client, no async, no clock and no randomness: a decision can be repeated in a test, tried with thousands of
//! random specs, and shown before it is applied. `kubevirt-operator` fills the observed state from its caches, and
//! `vitivirt-runtime` sends the writes.
//!
//! Read the modules in this order: `resolve` (parses the spec), `render` (the objects of a Machine), `observed` (the
//! input), `assessment` (what blocks the Machine; it uses `problem` and `ownership`), `boot` (warnings: whether a guest
//! can start), `changes` (when an edit takes effect; it uses `vmi_spec`), `plan` and `delete` (the writes, limited by `repairs`)
//! and `report` (status and events). `network_finalizer` decides about NetworkConfigurations. `view` is what people see of
//! a Machine.

mod assessment;
pub mod changes;
mod delete;
pub mod network_finalizer;
pub mod observed;
mod ownership;
mod plan;
mod problem;
pub mod render;
mod repairs;
mod report;
pub mod resolve;
mod secret;
#[cfg(feature = "testing")]
pub mod testing;
pub mod view;
pub mod vmi_spec;
mod warnings;

pub use assessment::{Assessed, Assessment};
pub use observed::{Observed, RecentWritesByObject};
pub use plan::{owns, plan};
pub use problem::{Part, Problem, ProblemKind};
pub use repairs::{desired_digest, repaired_objects};
pub use report::{Settled, WaitingState, report, settle};
pub use secret::SecretBytes;
pub use warnings::warnings;
