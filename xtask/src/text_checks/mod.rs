//! Checks of the project's text, run by `cargo test -p xtask`: words that docs/writing.md forbids, and links in the docs
//! that lead nowhere.

mod files;
mod links;
mod phrases;
mod rust_source;
