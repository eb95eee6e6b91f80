//! A certificate for servers whose clients do not verify it, or that have no other one yet.

use rcgen::{CertificateParams, DnType, KeyPair};

use super::{PemKeyPair, TlsError};

impl PemKeyPair {
    /// A new key, and a certificate for this DNS name that it signs itself.
    pub fn self_signed(name: &str) -> Result<Self, TlsError> {
        generate(name).map_err(|error| TlsError::SelfSigned(error.to_string()))
    }
}

fn generate(name: &str) -> Result<PemKeyPair, rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut parameters = CertificateParams::new([name.to_owned()])?;
    parameters.distinguished_name.push(DnType::CommonName, name);
    let certificate = parameters.self_signed(&key)?;
    Ok(PemKeyPair { certificate: certificate.pem().into_bytes(), key: key.serialize_pem().into_bytes() })
}
