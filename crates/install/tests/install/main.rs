//! Tests of the crate without a cluster: the generated objects, and whole installations against a cluster in memory.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test may stop where something is not as it should be"
)]

mod api_server;
mod endpoints;
mod manifests;
mod parity;
mod reconcile;
mod strategies;

use std::io::Read;

use vitivirt_install::certificates::{IssuedCertificates, KeyPair};

/// A certificate for every Secret and a bundle for every ConfigMap.
struct TestCertificates;

impl IssuedCertificates for TestCertificates {
    fn key_pair(&self, secret: &str) -> Option<KeyPair> {
        Some(KeyPair { certificate: secret.as_bytes().to_vec(), key: b"key".to_vec() })
    }

    fn bundle(&self, _: &str) -> Option<String> {
        Some("bundle".to_owned())
    }
}

fn decompress(bytes: &[u8]) -> String {
    let mut text = String::new();
    flate2::read::GzDecoder::new(bytes).read_to_string(&mut text).unwrap();
    text
}
