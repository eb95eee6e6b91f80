//! Checks of the project's text, run by `cargo test -p xtask`: words that docs/writing.md forbids, and broken links in
//! the docs.

mod files;
mod links;
mod phrases;
mod rust_source;
