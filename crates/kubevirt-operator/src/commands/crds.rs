//! `kubevirt-operator crds`: what must be in a cluster before a Machine can be.

use anyhow::Result;

use crate::manifests::{json, yaml};

pub(crate) fn print() -> Result<String> {
    yaml(&api::machine::crds().iter().map(json).collect::<Result<Vec<_>>>()?)
}
