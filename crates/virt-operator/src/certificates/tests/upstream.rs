//! Certificates that upstream virt-operator's code issued, in the form in which its Secrets contain them. No cluster
//! uses the keys.

use vitivirt_install::certificates::{VIRT_API, VIRT_HANDLER_CLIENT};

use super::*;

const UPSTREAM_CA: &str = include_str!("upstream-ca.pem");
const UPSTREAM_SERVER: &str = include_str!("upstream-server.pem");
const UPSTREAM_CLIENT: &str = include_str!("upstream-client.pem");
/// When they were issued. The CA's common name contains this time.
const ISSUED_AT: u64 = 1_794_748_560;

fn stored_secret(text: &str, duration: &str) -> StoredSecret {
    let (certificate, key) = text.split_at(text.find("-----BEGIN EC PRIVATE KEY-----").unwrap());
    StoredSecret { certificate: certificate.into(), key: key.into(), duration: Some(duration.to_owned()) }
}

fn installed_by_upstream() -> CertificateFixture {
    let mut fixture = CertificateFixture { now: at(ISSUED_AT) + HOUR, ..CertificateFixture::new() };
    let mut store = |name: &str, secret| fixture.stored.secrets.insert(name.to_owned(), secret);
    store(CA, stored_secret(UPSTREAM_CA, "&Duration{Duration:168h0m0s,}"));
    store(VIRT_API, stored_secret(UPSTREAM_SERVER, "&Duration{Duration:24h0m0s,}"));
    store(VIRT_HANDLER_CLIENT, stored_secret(UPSTREAM_CLIENT, "&Duration{Duration:24h0m0s,}"));
    fixture
}

#[test]
fn upstream_certificates_are_kept_and_the_upstream_ca_signs_new_ones() {
    let mut fixture = installed_by_upstream();
    let issued = fixture.issue_and_store();
    for kept in [CA, VIRT_API, VIRT_HANDLER_CLIENT] {
        assert!(!issued.renewed.contains(kept), "{kept}");
    }
    assert_eq!(issued.renewed.len(), 16 - 3);
    let stored = stored_secret(UPSTREAM_CA, "");
    assert!(issued.key_pair(CA).unwrap().key == stored.key);
    assert_eq!(issued.bundle(CA).unwrap().into_bytes(), stored.certificate);
    assert_eq!(fixture.issue().renewed, names([]));
    handshake::assert_all_verify(&fixture);
}

/// Upstream virt-operator does not backdate its CA, and the clock of its node may be ahead.
#[test]
fn an_upstream_ca_from_a_clock_that_is_ahead_is_kept() {
    let mut fixture = installed_by_upstream();
    fixture.now = at(ISSUED_AT) - Duration::from_secs(60);
    assert!(!fixture.issue().renewed.contains(CA));
}

#[test]
fn a_key_is_written_as_upstream_writes_it() {
    let stored = stored_secret(UPSTREAM_CA, "");
    let pair = CertifiedKey::from_secret(&stored).unwrap().to_pem();
    assert!(pair.key == stored.key);
    assert!(pair.certificate == stored.certificate);
}
