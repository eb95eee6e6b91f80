//! Secret data.

/// Bytes of user data. They have no `Debug`, so that they cannot reach a log.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretBytes(pub Vec<u8>);

/// The name of the cloud-init Secret of a Machine.
pub fn secret_name(machine: &str) -> String {
    format!("{machine}-cloudinit")
}
