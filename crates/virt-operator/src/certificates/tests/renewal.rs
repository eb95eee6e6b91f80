//! Each cause of a renewal renews the affected certificates and no others.

use vitivirt_api::ErrorClass;
use vitivirt_install::certificates::{SYNCHRONIZATION_CLIENT, VIRT_API, VIRT_CONTROLLER, VIRT_HANDLER_CLIENT};

use super::*;

#[test]
fn a_missing_certificate_is_issued() {
    let mut fixture = CertificateFixture::installed();
    fixture.stored.secrets.remove(VIRT_API);
    assert_eq!(fixture.issue().renewed, names([VIRT_API]));
}

#[test]
fn an_unreadable_certificate_or_key_is_replaced() {
    let corruptions: [fn(&mut StoredSecret); 7] = [
        |secret| secret.certificate.clear(),
        |secret| secret.key.clear(),
        |secret| secret.certificate = b"garbage".into(),
        |secret| secret.key = b"garbage".into(),
        |secret| secret.certificate = b"-----BEGIN CERTIFICATE-----\nMAAA\n-----END CERTIFICATE-----\n".into(),
        |secret| secret.key = b"-----BEGIN EC PRIVATE KEY-----\nMAAA\n-----END EC PRIVATE KEY-----\n".into(),
        |secret| secret.certificate.truncate(secret.certificate.len() / 2),
    ];
    for (number, corrupt) in corruptions.into_iter().enumerate() {
        let mut fixture = CertificateFixture::installed();
        corrupt(fixture.secret_mut(VIRT_API));
        corrupt(fixture.secret_mut(EXPORT_CA));
        assert_eq!(fixture.issue().renewed, names([VIRT_API, EXPORT_CA]), "{number}");
    }
}

#[test]
fn a_certificate_with_the_key_of_another_is_replaced() {
    let mut fixture = CertificateFixture::installed();
    fixture.secret_mut(VIRT_API).key = fixture.secret_mut(VIRT_CONTROLLER).key.clone();
    fixture.secret_mut(EXPORT_CA).key = fixture.secret_mut(BACKUP_CA).key.clone();
    assert_eq!(fixture.issue().renewed, names([VIRT_API, EXPORT_CA]));
}

#[test]
fn a_certificate_for_another_name_usage_or_duration_is_replaced() {
    let mut fixture = CertificateFixture::installed();
    let (api, controller, client) = (
        fixture.secret_mut(VIRT_API).clone(),
        fixture.secret_mut(VIRT_CONTROLLER).clone(),
        fixture.secret_mut(VIRT_HANDLER_CLIENT).clone(),
    );
    *fixture.secret_mut(VIRT_CONTROLLER) = api;
    *fixture.secret_mut(VIRT_API) = client;
    *fixture.secret_mut(VIRT_HANDLER_CLIENT) = controller;
    assert_eq!(fixture.issue().renewed, names([VIRT_API, VIRT_CONTROLLER, VIRT_HANDLER_CLIENT]));
    for certificate in fixture.desired.iter_mut().filter(|certificate| certificate.secret == SYNCHRONIZATION_CLIENT) {
        certificate.dns_names.push("another".to_owned());
    }
    fixture.issue_and_store();
    fixture.secret_mut(VIRT_API).duration = None;
    assert_eq!(fixture.issue().renewed, names([VIRT_API]));
}

#[test]
fn a_ca_that_cannot_sign_is_replaced() {
    let mut fixture = CertificateFixture::installed();
    // Only the usage is wrong: the certificate is not due for hours.
    *fixture.secret_mut(EXPORT_CA) = StoredSecret {
        duration: fixture.secret_mut(EXPORT_CA).duration.clone(),
        ..fixture.secret_mut(VIRT_API).clone()
    };
    assert_eq!(fixture.issue().renewed, names([EXPORT_CA]));
}

#[test]
fn leaves_are_replaced_if_the_subject_of_their_ca_has_changed() {
    let mut fixture = CertificateFixture::installed();
    let key = key_of(fixture.secret_mut(CA));
    let ca = fixture.desired.first().unwrap();
    fixture.now += Duration::from_secs(1);
    let renamed = CertifiedKey::new_ca(ca, key, fixture.now).unwrap();
    fixture.secret_mut(CA).certificate = renamed.to_pem().certificate;
    assert_eq!(fixture.settle_after_propagation(), fixture.leaf_secrets());
}

#[test]
fn certificates_are_renewed_when_they_are_due() {
    let mut fixture = CertificateFixture::installed();
    let issued = fixture.now;
    let due = issued + 24 * HOUR - Duration::from_secs(4 * 3600 + 48 * 60);
    assert_eq!(fixture.issue().next, Some(due));
    fixture.now = due - Duration::from_secs(1);
    assert_eq!(fixture.issue().renewed, names([]));
    fixture.now = due;
    assert_eq!(fixture.issue_and_store().renewed, fixture.leaf_secrets());
    assert_eq!(fixture.issue().renewed, names([]));

    // The CA is renewed before the leaves that it signed expire with it.
    let ca = issued + 168 * HOUR - Duration::from_secs(33 * 3600 + 36 * 60);
    while fixture.issue().next.unwrap() < ca {
        fixture.now = fixture.issue().next.unwrap();
        fixture.settle();
    }
    fixture.now = ca - Duration::from_secs(1);
    assert_eq!(fixture.settle(), names([]));
    fixture.now = ca;
    assert_eq!(fixture.settle(), names([CA]));
    assert_eq!(fixture.issue().next, Some(ca + PROPAGATION), "the new CA is trusted before it signs");
    fixture.now = ca + PROPAGATION - Duration::from_secs(1);
    assert_eq!(fixture.settle(), names([]));
    fixture.now = ca + PROPAGATION;
    assert_eq!(fixture.settle(), fixture.leaf_secrets());

    // The export and backup CAs are renewed as late as a leaf.
    let others = issued + 168 * HOUR - Duration::from_secs(4 * 3600 + 48 * 60);
    while fixture.issue().next.unwrap() < others {
        fixture.now = fixture.issue().next.unwrap();
        let renewed = fixture.settle();
        assert!(!renewed.contains(EXPORT_CA) && !renewed.contains(BACKUP_CA));
    }
    fixture.now = others;
    let renewed = fixture.issue_and_store().renewed;
    assert!(renewed.contains(EXPORT_CA) && renewed.contains(BACKUP_CA));
}

#[test]
fn expired_certificates_are_replaced() {
    let mut fixture = CertificateFixture::installed();
    fixture.now += 1000 * HOUR;
    let all: BTreeSet<String> = fixture.desired.iter().map(|certificate| certificate.secret.clone()).collect();
    assert_eq!(fixture.settle(), all);
    let bundle = fixture.issue().bundle(CA).unwrap();
    assert_eq!(bundle.matches("BEGIN").count(), 1, "the old CA has expired too");
}

#[test]
fn certificates_that_a_wrong_clock_issued_are_replaced() {
    let mut fixture = CertificateFixture::new();
    let right = fixture.now;
    fixture.now += 10_000 * HOUR;
    fixture.settle();
    fixture.now = right;
    assert_eq!(fixture.settle_after_propagation().len(), 16);
}

#[test]
fn changing_the_leaf_duration_renews_the_leaves() {
    let mut fixture = CertificateFixture::installed();
    fixture.desired =
        desired_certificates(Some(&SelfSigned { server: lifetime("12h", None), ..SelfSigned::default() }));
    assert_eq!(fixture.issue_and_store().renewed, fixture.leaf_secrets());
    assert_eq!(fixture.issue().renewed, names([]));
}

#[test]
fn changing_the_ca_duration_renews_the_cas_and_the_leaves() {
    let mut fixture = CertificateFixture::installed();
    fixture.desired = desired_certificates(Some(&SelfSigned { ca: lifetime("100h", None), ..SelfSigned::default() }));
    assert_eq!(fixture.settle(), names([CA, EXPORT_CA, BACKUP_CA]));
    assert_eq!(fixture.settle_after_propagation(), fixture.leaf_secrets());
}

#[test]
fn changing_renew_before_renews_only_certificates_that_are_due() {
    let mut fixture = CertificateFixture::installed();
    let settings = SelfSigned { ca: lifetime("168h", Some("1h")), ..SelfSigned::default() };
    fixture.desired = desired_certificates(Some(&settings));
    assert_eq!(fixture.issue().renewed, names([]));
    fixture.now += 2 * HOUR;
    fixture.desired = desired_certificates(Some(&SelfSigned { ca: lifetime("168h", Some("167h")), ..settings }));
    assert_eq!(fixture.issue().renewed, names([]), "a certificate is used for at least a tenth of its duration");
    fixture.now += 15 * HOUR;
    assert!(fixture.issue().renewed.contains(CA));
}

#[test]
fn leaves_that_another_ca_signed_are_replaced() {
    let mut fixture = CertificateFixture::installed();
    let other = CertificateFixture::installed();
    fixture.stored.secrets.insert(CA.to_owned(), other.stored.secrets.get(CA).unwrap().clone());
    fixture.stored.secrets.insert(BACKUP_CA.to_owned(), other.stored.secrets.get(BACKUP_CA).unwrap().clone());
    // The bundle does not contain the CA that signed them, so no client trusts them.
    fixture.stored.bundles.remove(CA);
    assert_eq!(fixture.issue().renewed, fixture.leaf_secrets(), "the other CA itself is usable");
}

/// The write of a new CA may fail for hours. What cannot wait is signed by the stored one.
#[test]
fn a_ca_that_cannot_be_replaced_still_signs_what_is_about_to_expire() {
    let mut fixture = CertificateFixture::installed();
    let due = fixture.now + 168 * HOUR - Duration::from_secs(33 * 3600 + 36 * 60);
    while fixture.issue().next.unwrap() < due {
        fixture.now = fixture.issue().next.unwrap();
        fixture.settle();
    }
    fixture.now = due;
    let issued = fixture.issue();
    assert_eq!(issued.renewed, names([CA]), "the certificates last until the CA is stored");
    // Only the leaves are stored.
    fixture.now = due + 23 * HOUR;
    let issued = fixture.issue();
    assert!(issued.renewed.contains(CA) && issued.renewed.contains(VIRT_API), "{:?}", issued.renewed);
    fixture.secret_mut(VIRT_API).certificate = issued.key_pair(VIRT_API).unwrap().certificate;
    fixture.secret_mut(VIRT_API).key = issued.key_pair(VIRT_API).unwrap().key;
    assert!(!fixture.issue().renewed.contains(VIRT_API), "once");
}

/// A webhook or APIService whose bundle cannot be written does not trust the new CA.
#[test]
fn certificates_of_the_previous_ca_are_kept_until_every_bundle_has_the_new_one() {
    let mut fixture = CertificateFixture::installed();
    let old = fixture.stored.bundles.get(CA).unwrap().clone().into_bytes();
    fixture.stored.trusted_bundles = vec![old];
    fixture.stored.secrets.remove(CA);
    assert_eq!(fixture.settle(), names([CA]));
    fixture.now += PROPAGATION;
    assert_eq!(fixture.settle(), names([]), "one bundle has only the old CA");
    // A certificate that is about to expire is renewed all the same.
    let last = fixture.now + 24 * HOUR - PROPAGATION - Duration::from_secs(72 * 60);
    let mut waiting = fixture.stored.clone();
    let mut late = CertificateFixture { stored: waiting.clone(), now: last, ..CertificateFixture::new() };
    assert_eq!(late.settle(), fixture.leaf_secrets());
    waiting.trusted_bundles = vec![fixture.stored.bundles.get(CA).unwrap().clone().into_bytes()];
    fixture.stored = waiting;
    assert_eq!(fixture.settle(), names([]), "not for long enough");
    assert_eq!(fixture.settle_after_propagation(), fixture.leaf_secrets());
}

#[test]
fn a_failing_key_source_fails_the_call_only_if_a_key_is_needed() {
    let fixture = CertificateFixture::new();
    let mut keys = || Err(vitivirt_api::Failure::transient("NoRandomness", "none left"));
    let failure = issue_certificates(&fixture.desired, &fixture.stored, fixture.now, &mut keys).err().unwrap();
    assert_eq!(failure.reason, "NoRandomness");
    let fixture = CertificateFixture::installed();
    assert!(issue_certificates(&fixture.desired, &fixture.stored, fixture.now, &mut keys).is_ok(), "no key is needed");
}

#[test]
fn a_duration_below_the_minimum_is_invalid() {
    for (settings, field) in [
        (SelfSigned { ca: lifetime("9s", None), ..SelfSigned::default() }, "ca.duration"),
        (SelfSigned { server: lifetime("0", None), ..SelfSigned::default() }, "server.duration"),
    ] {
        let fixture =
            CertificateFixture { desired: desired_certificates(Some(&settings)), ..CertificateFixture::new() };
        let failure =
            issue_certificates(&fixture.desired, &fixture.stored, fixture.now, &mut Key::generate).err().unwrap();
        assert_eq!((failure.class, failure.reason), (ErrorClass::Invalid, "InvalidCertificateDuration"));
        assert!(failure.message.contains(field), "{failure}");
    }
}
