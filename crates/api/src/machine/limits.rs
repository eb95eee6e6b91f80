//! Limits of single fields. The CRD is generated from them, and the operator checks stored objects against them.

/// A size: a number without leading zeros, with at most nine decimals (the resolution of Kubernetes), and a decimal or
/// binary suffix.
pub const SIZE: &str = r"^(0|[1-9][0-9]*)(\.[0-9]{1,9})?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?$";
pub const SIZE_LENGTH: usize = 24;
pub const SIZE_DECIMALS: usize = 9;
/// Kubernetes stores bytes as a signed 64-bit number; this is the largest round size below its limit.
pub const LARGEST_SIZE: &str = "7Ei";
pub const LARGEST_SIZE_BYTES: i128 = 7 << 60;

/// Inline user data and network data. The caches of the operator hold them for every Machine.
pub const DATA_BYTES: usize = 65_536;

/// The name of a Linux network interface, restricted to common characters.
/// The kernel has no interface with the name `.` or `..`.
pub const BRIDGE: &str = "^[.]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$";
pub const BRIDGE_LENGTH: usize = 15;

/// Valid VLAN IDs; the others are reserved.
pub const FIRST_VLAN: u16 = 1;
pub const LAST_VLAN: u16 = 4094;
