//! Versions and cipher suites, as far as there is a choice.
//!
//! Only TLS 1.2 and 1.3 are spoken, and of 1.2 only the suites with forward secrecy and authenticated encryption. Older
//! versions and other suites can be named, and are not offered. The suites of 1.3 cannot be chosen: names of suites are
//! about 1.2, as they are in Go.

use std::sync::Arc;

use rustls::{
    SupportedCipherSuite, SupportedProtocolVersion,
    crypto::{CryptoProvider, ring},
    version::{TLS12, TLS13},
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    #[default]
    Tls12,
    Tls13,
}

/// On what terms connections are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    pub minimum: Version,
    /// Suites of TLS 1.2 in their registered names, such as `TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256`. Empty: all.
    pub suites: Vec<String>,
}

impl Terms {
    /// The suites that are named and not offered.
    pub fn not_offered(&self) -> Vec<&str> {
        let offered = |name: &str| ring::ALL_CIPHER_SUITES.iter().any(|suite| registered_name(suite) == name);
        self.suites.iter().map(String::as_str).filter(|name| !offered(name)).collect()
    }

    pub(super) fn provider(&self) -> Arc<CryptoProvider> {
        let mut provider = ring::default_provider();
        provider.cipher_suites.retain(|suite| suite.tls13().is_some() || self.allows(suite));
        Arc::new(provider)
    }

    pub(super) fn versions(&self) -> Vec<&'static SupportedProtocolVersion> {
        let older = ring::ALL_CIPHER_SUITES.iter().any(|suite| suite.tls13().is_none() && self.allows(suite));
        if self.minimum == Version::Tls12 && older { vec![&TLS12, &TLS13] } else { vec![&TLS13] }
    }

    pub(super) fn tell_limits(&self) {
        let not_offered = self.not_offered();
        if not_offered.is_empty() {
            return;
        }
        let left = if self.versions().len() == 1 { "only TLS 1.3 is spoken" } else { "the others are" };
        tracing::warn!(suites = not_offered.join(","), "these cipher suites are not offered here; {left}");
    }

    fn allows(&self, suite: &SupportedCipherSuite) -> bool {
        self.suites.is_empty() || self.suites.iter().any(|name| name == &registered_name(suite))
    }
}

fn registered_name(suite: &SupportedCipherSuite) -> String {
    let name = suite.suite().as_str().unwrap_or_default();
    name.strip_prefix("TLS13_").map_or_else(|| name.to_owned(), |rest| format!("TLS_{rest}"))
}
