//! Commands that look, print and end; all but `plan` and the dump without a cluster.

pub(crate) mod cluster;
pub(crate) mod crds;
pub(crate) mod dump;
pub(crate) mod manifests;
pub(crate) mod plan;
pub(crate) mod render;
