//! What a virt-operator has installed, in a form in which two installations can be compared: ours and the release's.
//!
//! Pure functions over JSON, used by the tests of `install` on objects that were never sent and by `cargo xtask parity`
//! on live ones. What is not compared is decided in one place, `normalise`.

mod compare;
mod normalise;

use std::collections::BTreeMap;

pub use compare::{Comparison, Difference, compare, differences};
pub use normalise::{LEFT_OUT, belongs, is_installed, key, normalise};
use serde_json::Value;

/// Normalised objects by [`key`].
pub type Snapshot = BTreeMap<String, Value>;

/// The objects among `all` that belong to an installation, normalised.
pub fn take(all: impl IntoIterator<Item = Value>) -> Snapshot {
    all.into_iter().filter(belongs).map(normalise).map(|object| (key(&object), object)).collect()
}
