//! Files of Kubernetes objects: how the commands of both programs read them, tell what is wrong with them, and write
//! them.
//!
//! Whoever tries something out with a file makes mistakes in it, so an error says which file, which object, which field
//! and what to write instead; and a field that the cluster would drop in silence is at least told.

mod output;
mod read;
mod shape;

pub use output::{print, to_yaml, warn, write_yaml, written};
pub use read::{Document, parse, read};
pub use shape::{Shape, check};
