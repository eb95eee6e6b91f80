//! Decisions about Machines as pure functions: tables for the known cases, properties for the rest.

mod cases;
mod properties;
mod specs;
mod world;
