//! Which served certificates clients accept.

use vitivirt_install::{certificates::VIRT_API, served::ServedState};

use super::*;
use crate::certificates::served::{TrustedCas, check, seconds_until_expiry, stored_leaf};

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

fn leaf(fixture: &CertificateFixture) -> Vec<u8> {
    stored_leaf(&fixture.stored.secrets[VIRT_API].certificate).unwrap()
}

fn cas(fixture: &CertificateFixture) -> TrustedCas {
    TrustedCas::from_bundle(&fixture.stored.bundles[CA])
}

#[test]
fn a_served_certificate_is_compared_with_the_stored_one_the_bundle_and_the_clock() {
    let mut fixture = CertificateFixture::installed();
    let (old, issued) = (leaf(&fixture), fixture.now);
    fixture.now += HOUR;
    // As if another client had deleted the Secret: the operator issues a new certificate.
    fixture.stored.secrets.remove(VIRT_API);
    fixture.issue_and_store();
    let (new, cas) = (leaf(&fixture), cas(&fixture));
    let foreign = CertificateFixture::installed();
    let (expired, now) = (issued + WEEK, fixture.now);
    for (served, at, expected) in [
        (Some(&new), now, ServedState::Good),
        (Some(&old), now, ServedState::NotReloaded),
        (Some(&old), expired, ServedState::Expired),
        (Some(&leaf(&foreign)), now, ServedState::Untrusted),
        (Some(&b"not a certificate".to_vec()), now, ServedState::Untrusted),
        (None, now, ServedState::Unreachable),
    ] {
        assert_eq!(check(served.map(Vec::as_slice), &new, &cas, at), expected);
    }
    assert!(cas.accept(&new, now) && !cas.accept(&new, expired) && !cas.accept(&leaf(&foreign), now));
    assert_eq!(check(Some(&new), &new, &TrustedCas::from_bundle(""), now), ServedState::Untrusted);
}

#[test]
fn a_ca_that_is_still_in_the_bundle_is_trusted_until_it_expires() {
    let mut fixture = CertificateFixture::installed();
    let old = leaf(&fixture);
    fixture.now += HOUR;
    fixture.stored.secrets.remove(CA);
    fixture.settle_after_propagation();
    let state = |at| check(Some(&old), &leaf(&fixture), &cas(&fixture), at);
    assert_eq!(state(fixture.now), ServedState::NotReloaded, "the bundle contains the old CA too");
}

#[test]
fn the_time_until_expiry_is_negative_afterwards() {
    let fixture = CertificateFixture::installed();
    let leaf = leaf(&fixture);
    assert_eq!(seconds_until_expiry(&leaf, fixture.now), Some(24 * 3600));
    assert_eq!(seconds_until_expiry(&leaf, fixture.now + 25 * HOUR), Some(-3600));
    assert_eq!(seconds_until_expiry(b"x", fixture.now), None);
}
