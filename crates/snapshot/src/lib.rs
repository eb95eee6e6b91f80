//! Snapshots of KubeVirt installations, and their comparison: ours with that of the reference operator.
//!
//! Pure functions on JSON. The tests of `install` use them for generated objects, `cargo xtask parity` for live
//! objects. The module `normalise` defines what is not compared.

mod compare;
mod normalise;

use std::collections::BTreeMap;

pub use compare::{Comparison, Difference, compare};
pub use normalise::{EXCLUDED_RESOURCES, is_installed, key, normalise};
use serde_json::Value;

use normalise::belongs_to_installation;

/// Normalised objects by [`key`].
pub type Snapshot = BTreeMap<String, Value>;

/// The normalised objects that belong to an installation, selected from all objects of a cluster.
pub fn take(objects: impl IntoIterator<Item = Value>) -> Snapshot {
    objects.into_iter().filter(belongs_to_installation).map(normalise).map(|object| (key(&object), object)).collect()
}
