//! Commands that print a result and exit. `check` and `plan` need a cluster. They share the projections and decisions of the
//! running operator.

pub(crate) mod check;
mod cluster;
pub(crate) mod crds;
pub(crate) mod describe;
mod files;
mod neighbours;
pub(crate) mod plan;
pub(crate) mod render;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use vitivirt_api::machine::{MachineStatus, condition_type};

/// The condition `Ready` of a Machine's status.
fn ready_condition(status: &MachineStatus) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.type_ == condition_type::READY)
}
