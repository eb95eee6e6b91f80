//! Commands that print an answer and exit.

mod cluster;
pub(crate) mod crds;
mod files;
pub(crate) mod plan;
pub(crate) mod render;

use serde_json::Value;
use vitivirt_api::machine::condition_type;

/// The condition `Ready` of a Machine's status.
fn ready_condition(status: &Value) -> Option<&Value> {
    let conditions = status.get("conditions")?.as_array()?;
    conditions.iter().find(|have| have.get("type").is_some_and(|kind| kind == condition_type::READY))
}
