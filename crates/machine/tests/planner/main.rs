//! Decisions about Machines as pure functions: tables for the known cases, properties for the rest.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test may fail at once")]

mod cases;
mod changing;
mod documentation;
mod failure_reporting;
mod invalid;
mod properties;
mod specs;
mod world;
