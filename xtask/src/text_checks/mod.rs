//! Checks of the project's text, run by `cargo test -p xtask`: words that docs/writing.md forbids, broken links in
//! the docs, and shell commands that no test runs.

mod commands;
mod files;
mod links;
mod phrases;
mod rust_source;
