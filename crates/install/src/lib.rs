//! What a KubeVirt installation should be: every object of the release for a given KubeVirt resource, in the order in
//! which they are applied, and the data of the release that they are made from.
//!
//! These will be pure functions from what was observed to a `Plan`. A client, async, a clock and randomness must never
//! enter this crate: time, keys and random values come as arguments, and everything it wants to happen leaves it as
//! data. The doing is in `runtime`, the observing in the program `virt-operator`.
