//! What single fields may hold, where the operator checks again what the CRD says. Both are made from these.

/// How a size is written: a number that is not padded, with at most nine decimals (Kubernetes counts no finer), and a
/// decimal or binary suffix.
pub const SIZE: &str = r"^(0|[1-9][0-9]*)(\.[0-9]{1,9})?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?$";
pub const SIZE_LENGTH: usize = 24;
pub const SIZE_DECIMALS: usize = 9;
/// Kubernetes counts bytes in 64 bits with a sign; this is the largest round number of them.
pub const LARGEST_SIZE: &str = "7Ei";
pub const LARGEST_SIZE_BYTES: u128 = 7 << 60;

/// The name of a network interface of Linux, as far as anybody needs one.
pub const BRIDGE: &str = "^[A-Za-z0-9_.-]+$";
pub const BRIDGE_LENGTH: usize = 15;

/// The tags that a VLAN can have; the others are reserved.
pub const FIRST_VLAN: u16 = 1;
pub const LAST_VLAN: u16 = 4094;
