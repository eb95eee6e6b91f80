//! What a Machine should become: its VirtualMachine, disks, networks and cloud-init Secret, and which change of it
//! applies live, at a restart, or never.
//!
//! These will be pure functions from what was observed to a `Plan`. A client, async, a clock and randomness must never
//! enter this crate: time and random values come as arguments, and everything it wants to happen leaves it as data.
//! The doing is in `runtime`, the observing in the program `kubevirt-operator`.
