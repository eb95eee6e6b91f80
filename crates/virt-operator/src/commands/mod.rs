//! Commands that run once and exit. `check`, `plan`, `uninstall` and the dump of the install strategy need a cluster.

pub(crate) mod check;
pub(crate) mod cluster;
pub(crate) mod crds;
pub(crate) mod dump;
pub(crate) mod images;
pub(crate) mod manifests;
pub(crate) mod plan;
pub(crate) mod render;
pub(crate) mod uninstall;
