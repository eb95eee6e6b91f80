//! The certificates of an installation. Stored certificates that are still usable are kept; the others are issued.
//!
//! Everything here is a function of the stored certificates, the current time and a source of keys.
//! `vitivirt_install::certificates` decides which certificates exist, when each of them is renewed and which CAs a
//! bundle contains; this module handles X.509 and PEM. Only the nonce of a signature does not come from an argument,
//! and nothing depends on its value.

mod bundle;
mod issuer;
mod key;
pub(crate) mod served;
#[cfg(test)]
mod tests;
mod x509;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::SystemTime,
};

use vitivirt_install::certificates::{IssuedCertificates, KeyPair};

pub(crate) use issuer::issue_certificates;
pub(crate) use key::Key;

/// The failure reason for a certificate that could not be issued.
const NOT_ISSUED: &str = "CertificateNotIssued";

/// The content of one certificate Secret. It has no `Debug`, because it contains a private key.
#[derive(Clone)]
pub(crate) struct StoredSecret {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
    /// The annotation `kubevirt.io/duration`.
    pub(crate) duration: Option<String>,
}

/// The certificates and bundles that are in the cluster now.
#[derive(Clone, Default)]
pub(crate) struct StoredCertificates {
    /// By the name of the Secret.
    pub(crate) secrets: BTreeMap<String, StoredSecret>,
    /// By the name of the ConfigMap.
    pub(crate) bundles: BTreeMap<String, String>,
    /// The bundles in webhooks and APIServices, in PEM.
    pub(crate) trusted_bundles: Vec<Vec<u8>>,
    /// What an earlier call found.
    pub(crate) trusted_ca: Option<TrustedCa>,
}

/// A CA that every bundle contains, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrustedCa {
    /// In DER.
    certificate: Vec<u8>,
    since: SystemTime,
}

/// The certificates and bundles of an installation, both the kept and the newly issued ones. A certificate is missing
/// until its CA is stored.
#[derive(Default)]
pub(crate) struct CertificateSet {
    pairs: BTreeMap<String, KeyPair>,
    bundles: BTreeMap<String, String>,
    /// The Secrets whose certificate was newly issued.
    pub(crate) renewed: BTreeSet<String>,
    /// When the next certificate must be renewed or the next CA leaves a bundle. It is always in the future.
    pub(crate) next: Option<SystemTime>,
    pub(crate) trusted_ca: Option<TrustedCa>,
    /// The number of CAs of users that do not fit into the bundle of the CA.
    left_out: usize,
}

impl CertificateSet {
    /// Moves `next` forward to `time` if `time` is earlier.
    fn renew_no_later_than(&mut self, time: SystemTime) {
        self.next = Some(self.next.map_or(time, |next| next.min(time)));
    }
}

impl IssuedCertificates for CertificateSet {
    fn key_pair(&self, secret: &str) -> Option<KeyPair> {
        self.pairs.get(secret).cloned()
    }

    fn bundle(&self, config_map: &str) -> Option<String> {
        self.bundles.get(config_map).cloned()
    }

    fn left_out(&self) -> usize {
        self.left_out
    }
}
