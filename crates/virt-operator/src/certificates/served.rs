//! Whether clients accept a certificate: the one that a pod serves, and the one in its Secret. Pure functions.

use std::time::SystemTime;

use vitivirt_install::{
    certificates::{Validity, bundle::TrustedCertificate},
    served::ServedState,
};

use super::{bundle::parse_bundle, x509};

/// The CAs that clients trust.
pub(crate) struct TrustedCas(Vec<TrustedCertificate>);

impl TrustedCas {
    pub(crate) fn from_bundle(text: &str) -> Self {
        Self(parse_bundle(text))
    }

    /// Whether clients accept a leaf certificate now.
    pub(crate) fn accept(&self, leaf: &[u8], now: SystemTime) -> bool {
        validity(leaf).is_some_and(|validity| now < validity.not_after) && self.have_signed(leaf, now)
    }

    fn have_signed(&self, leaf: &[u8], now: SystemTime) -> bool {
        let Some(leaf) = x509::parse(leaf) else { return false };
        self.0.iter().filter(|ca| now < ca.validity.not_after).filter_map(|ca| x509::parse(&ca.certificate)).any(|ca| {
            leaf.issuer().as_raw() == ca.subject().as_raw() && leaf.verify_signature(Some(ca.public_key())).is_ok()
        })
    }
}

/// Compares the certificate that a pod serves with the stored one, the CAs and the clock.
pub(crate) fn check(served: Option<&[u8]>, stored: &[u8], cas: &TrustedCas, now: SystemTime) -> ServedState {
    let Some(served) = served else { return ServedState::Unreachable };
    match validity(served) {
        Some(validity) if now >= validity.not_after => ServedState::Expired,
        _ if !cas.have_signed(served, now) => ServedState::Untrusted,
        _ if served == stored => ServedState::Good,
        _ => ServedState::NotReloaded,
    }
}

/// The certificate in a Secret, in DER.
pub(crate) fn stored_leaf(pem: &[u8]) -> Option<Vec<u8>> {
    x509::first_certificate(pem)
}

/// When a certificate expires. `None` if it is not a certificate.
pub(crate) fn expiry(certificate: &[u8]) -> Option<SystemTime> {
    Some(validity(certificate)?.not_after)
}

/// Seconds until a certificate expires, negative afterwards.
pub(crate) fn seconds_until_expiry(certificate: &[u8], now: SystemTime) -> Option<i64> {
    let not_after = expiry(certificate)?;
    match not_after.duration_since(now) {
        Ok(left) => i64::try_from(left.as_secs()).ok(),
        Err(past) => i64::try_from(past.duration().as_secs()).ok().map(|seconds| -seconds),
    }
}

fn validity(certificate: &[u8]) -> Option<Validity> {
    x509::validity(&x509::parse(certificate)?)
}
