//! What a Machine should become: pure functions from what is observed to what should be written and told.
//!
//! No client, no async, no clock, no randomness may enter here: a decision can then be replayed in a test, tried by the
//! thousand, and shown before it is carried out. The order of reading is `resolve` (what is meant), `render` (the objects
//! that it becomes), `analysis` (what stands in the way), `changes` (when an edit takes effect), `plan` and `delete` (what
//! to write now) and `report` (what to say about it).

mod assessment;
pub mod changes;
mod delete;
pub mod macs;
pub mod network_finalizer;
pub mod observed;
mod plan;
mod problem;
mod quantity;
pub mod render;
mod report;
pub mod resolve;
pub mod vmi_spec;

pub use assessment::{networks_at_fault, refusals};
pub use observed::Observed;
pub use plan::{
    discards_user_data, import_source_resource, network_attachment_resource, owns, plan,
    virtual_machine_instance_resource, virtual_machine_resource,
};
pub use problem::{Problem, ProblemKind};
pub use quantity::Quantity;
pub use report::report;
