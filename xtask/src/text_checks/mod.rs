//! Checks of the project's text, run by `cargo test -p xtask`: words that docs/writing.md forbids, broken links in
//! the docs, shell commands that no test runs, modules that depend on each other, and type names with two meanings.

mod commands;
mod files;
mod links;
mod module_cycles;
mod phrases;
mod rust_source;
mod type_names;
