//! The certificates of an installation: what is held and still good is kept, the rest is issued.
//!
//! One function of what is held, of the time and of a source of keys. Which certificates there are, when one is due
//! and what a bundle keeps is decided in `vitivirt_install::certificates`; here are X.509 and PEM. The one thing that does not
//! come through arguments is the nonce of a signature, which nothing depends on.

mod bundle;
mod issue;
mod key;
mod x509;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
    time::SystemTime,
};

use vitivirt_install::certificates::{IssuedCertificates, KeyPair};

pub(crate) use issue::issue;
pub(crate) use key::Key;

/// Reason of a failure: a certificate could not be issued.
const NOT_ISSUED: &str = "CertificateNotIssued";

/// What a Secret holds. It has no `Debug`, because it holds a key.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
    /// The annotation `kubevirt.io/duration`.
    pub(crate) duration: Option<String>,
}

/// What the cluster holds, by the name of its Secret or ConfigMap.
pub(crate) trait Holdings {
    fn secret(&self, name: &str) -> Option<Held>;
    fn bundle(&self, config_map: &str) -> Option<String>;
}

#[derive(Clone, Default)]
pub(crate) struct Holding {
    pub(crate) secrets: BTreeMap<String, Held>,
    pub(crate) bundles: BTreeMap<String, String>,
}

impl Holdings for Holding {
    fn secret(&self, name: &str) -> Option<Held> {
        self.secrets.get(name).cloned()
    }

    fn bundle(&self, config_map: &str) -> Option<String> {
        self.bundles.get(config_map).cloned()
    }
}

/// Every certificate and bundle of an installation, kept ones and new ones.
#[derive(Default)]
pub(crate) struct Issue {
    pairs: BTreeMap<String, KeyPair>,
    bundles: BTreeMap<String, String>,
    /// The Secrets whose content is new.
    pub(crate) renewed: BTreeSet<String>,
    /// When the next certificate is due, or the next authority leaves a bundle. It is always to come.
    pub(crate) next: Option<SystemTime>,
}

impl Issue {
    /// Of its content: two of the same digest make the same objects.
    pub(crate) fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (name, pair) in &self.pairs {
            (name, &pair.certificate, &pair.key).hash(&mut hasher);
        }
        self.bundles.hash(&mut hasher);
        hasher.finish()
    }

    fn wake_at(&mut self, time: SystemTime) {
        self.next = Some(self.next.map_or(time, |next| next.min(time)));
    }
}

impl IssuedCertificates for Issue {
    fn key_pair(&self, secret: &str) -> Option<KeyPair> {
        self.pairs.get(secret).cloned()
    }

    fn bundle(&self, config_map: &str) -> Option<String> {
        self.bundles.get(config_map).cloned()
    }
}
