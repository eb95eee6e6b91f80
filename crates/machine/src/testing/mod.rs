//! Test data for this crate and for the tests of kubevirt-operator on a cluster.

mod specs;

pub use self::specs::machine_spec;
