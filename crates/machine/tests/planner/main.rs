//! Tests of plan and report: tables for the known cases, properties for all others.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test may fail at once")]

mod adoption;
mod cases;
mod changing;
mod data;
mod deletion;
mod documentation;
mod failure_reporting;
mod invalid;
mod moved_disks;
mod parts;
mod properties;
mod rendering;
mod repairs;
mod settling;
mod simulated_cluster;
mod view;
mod warnings;
