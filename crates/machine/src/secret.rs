//! Secret data.

/// Bytes of user data. They have no `Debug`, so that they cannot reach a log.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretBytes(pub Vec<u8>);
