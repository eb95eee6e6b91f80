//! TLS versions and cipher suites.
//!
//! The server supports TLS 1.2 and 1.3, and for 1.2 only suites with forward secrecy and authenticated encryption. A
//! policy may name older versions and other suites, but the server does not offer them. As in Go, the list of suites
//! applies to TLS 1.2 only: the suites of TLS 1.3 are fixed.

use std::sync::Arc;

use rustls::{
    SupportedCipherSuite, SupportedProtocolVersion,
    crypto::{CryptoProvider, ring},
    version::{TLS12, TLS13},
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsVersion {
    #[default]
    Tls12,
    Tls13,
}

/// The TLS settings of accepted connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsPolicy {
    pub min_version: TlsVersion,
    /// Suites of TLS 1.2 by their registered names, such as `TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256`. Empty: all.
    pub suites: Vec<String>,
}

impl TlsPolicy {
    /// The suites of this policy that the server does not support.
    pub fn unsupported_suites(&self) -> Vec<&str> {
        let supported = |name: &str| ring::ALL_CIPHER_SUITES.iter().any(|suite| registered_name(suite) == name);
        self.suites.iter().map(String::as_str).filter(|name| !supported(name)).collect()
    }

    pub(super) fn provider(&self) -> Arc<CryptoProvider> {
        let mut provider = ring::default_provider();
        provider.cipher_suites.retain(|suite| suite.tls13().is_some() || self.allows(suite));
        Arc::new(provider)
    }

    pub(super) fn versions(&self) -> Vec<&'static SupportedProtocolVersion> {
        let has_tls12 = ring::ALL_CIPHER_SUITES.iter().any(|suite| suite.tls13().is_none() && self.allows(suite));
        if self.min_version == TlsVersion::Tls12 && has_tls12 { vec![&TLS12, &TLS13] } else { vec![&TLS13] }
    }

    pub(super) fn warn_unsupported(&self) {
        let suites = self.unsupported_suites();
        if suites.is_empty() {
            return;
        }
        let versions = if self.versions().len() == 1 { "1.3" } else { "1.2,1.3" };
        tracing::warn!(suites = suites.join(","), versions, "ignoring unsupported cipher suites");
    }

    fn allows(&self, suite: &SupportedCipherSuite) -> bool {
        self.suites.is_empty() || self.suites.iter().any(|name| name == &registered_name(suite))
    }
}

fn registered_name(suite: &SupportedCipherSuite) -> String {
    let name = suite.suite().as_str().unwrap_or_default();
    name.strip_prefix("TLS13_").map_or_else(|| name.to_owned(), |rest| format!("TLS_{rest}"))
}
