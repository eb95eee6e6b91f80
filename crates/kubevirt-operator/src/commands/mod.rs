//! Commands that print and end.

pub(crate) mod crds;
mod files;
mod live;
pub(crate) mod plan;
pub(crate) mod render;
