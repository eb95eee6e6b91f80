//! Commands that print an answer and exit.

mod cluster;
pub(crate) mod crds;
mod files;
pub(crate) mod plan;
pub(crate) mod render;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use vitivirt_api::machine::{MachineStatus, condition_type};

/// The condition `Ready` of a Machine's status.
fn ready_condition(status: &MachineStatus) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.type_ == condition_type::READY)
}
