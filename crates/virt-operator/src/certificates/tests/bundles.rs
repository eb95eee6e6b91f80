//! Which CAs a bundle contains over time, and how it handles CAs and text that users add.

use super::*;

fn bundle(fixture: &CertificateFixture, name: &str) -> String {
    fixture.issue().bundle(name).unwrap()
}

fn certificate(fixture: &CertificateFixture, ca: &str) -> String {
    text(fixture.stored.secrets.get(ca).unwrap().certificate.clone())
}

/// A certificate with the marker that the bundle gives to CAs from `kubevirt-external-ca`.
fn marked_external(certificate: &str) -> String {
    format!("# from kubevirt-external-ca\n{certificate}")
}

#[test]
fn each_ca_has_its_own_bundle() {
    let fixture = CertificateFixture::installed();
    for ca in [CA, EXPORT_CA, BACKUP_CA] {
        assert_eq!(bundle(&fixture, ca), certificate(&fixture, ca));
    }
}

#[test]
fn a_replaced_ca_is_trusted_for_the_overlap() {
    let mut fixture = CertificateFixture::installed();
    let (old, old_export) = (certificate(&fixture, CA), certificate(&fixture, EXPORT_CA));
    fixture.desired = desired_certificates(Some(&SelfSigned { ca: lifetime("100h", None), ..SelfSigned::default() }));
    let replaced = fixture.now + HOUR;
    fixture.now = replaced;
    fixture.settle_after_propagation();
    let (new, new_export) = (certificate(&fixture, CA), certificate(&fixture, EXPORT_CA));
    assert_ne!(new, old);
    assert_eq!(bundle(&fixture, CA), format!("{new}{old}"));
    assert_eq!(bundle(&fixture, EXPORT_CA), format!("{new_export}{old_export}"));

    // The overlap is as long as the time between renewal and expiry: a fifth of 100 h for the CA of the cluster, and
    // the value of leaf certificates for the export and backup CAs.
    let export_overlap_ends = replaced + Duration::from_secs(4 * 3600 + 48 * 60);
    assert_eq!(fixture.issue().next, Some(export_overlap_ends));
    fixture.now = export_overlap_ends;
    assert_eq!(bundle(&fixture, EXPORT_CA), new_export);
    assert_eq!(bundle(&fixture, CA), format!("{new}{old}"));
    fixture.issue_and_store();
    fixture.now = replaced + 20 * HOUR - Duration::from_secs(1);
    assert_eq!(bundle(&fixture, CA), format!("{new}{old}"));
    fixture.now = replaced + 20 * HOUR;
    assert_eq!(bundle(&fixture, CA), new);
}

#[test]
fn a_ca_that_is_being_replaced_is_trusted_even_if_its_bundle_is_lost() {
    let mut fixture = CertificateFixture::installed();
    let old = certificate(&fixture, CA);
    fixture.stored.bundles.clear();
    fixture.desired = desired_certificates(Some(&SelfSigned { ca: lifetime("100h", None), ..SelfSigned::default() }));
    assert_eq!(fixture.issue_and_store().bundle(CA).unwrap(), old, "the new CA is not stored yet");
    assert_eq!(fixture.issue_and_store().bundle(CA).unwrap(), format!("{}{old}", certificate(&fixture, CA)));
}

/// Webhooks and APIServices have copies of a lost bundle.
#[test]
fn a_lost_bundle_is_restored_with_the_cas_of_users() {
    let mut fixture = CertificateFixture::installed();
    let (current, external) = (certificate(&fixture, CA), foreign_ca("kubevirt.io", fixture.now - HOUR, 1000 * HOUR));
    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), external.clone());
    fixture.settle();
    let bundle = fixture.stored.bundles.remove(CA).unwrap();
    assert_eq!(bundle, format!("{current}{}", marked_external(&external)));
    fixture.stored.trusted_bundles = vec![bundle.clone().into_bytes()];
    assert_eq!(fixture.issue().bundle(CA), Some(bundle));
}

#[test]
fn a_malformed_bundle_is_replaced() {
    let mut fixture = CertificateFixture::installed();
    let current = certificate(&fixture, CA);
    let block = "-----BEGIN CERTIFICATE-----";
    for malformed in [
        String::new(),
        "garbage".to_owned(),
        current.replace('M', "!"),
        format!("{block}\nMAAA\n-----END CERTIFICATE-----\n"),
        format!("{block}\n{current}"),
        format!("{current}{block}\nunfinished"),
        current.replace("CERTIFICATE", "PUBLIC KEY"),
        format!("{current}{current}\n\n{current}"),
        format!("some text\r\n{}", current.replace('\n', "\r\n")),
    ] {
        fixture.stored.bundles.insert(CA.to_owned(), malformed.clone());
        assert_eq!(bundle(&fixture, CA), current, "{malformed}");
    }
}

#[test]
fn a_ca_that_another_client_adds_to_the_bundle_stays_no_longer_than_the_overlap() {
    let mut fixture = CertificateFixture::installed();
    let current = certificate(&fixture, CA);
    let added = foreign_ca("added", fixture.now - HOUR, 1000 * HOUR);
    let external = marked_external(&foreign_ca("imported", fixture.now, 1000 * HOUR));
    fixture.stored.bundles.insert(CA.to_owned(), format!("{current}{external}{added}"));
    assert_eq!(bundle(&fixture, CA), format!("{current}{added}{external}"));
    fixture.now += 33 * HOUR + Duration::from_secs(36 * 60);
    assert_eq!(bundle(&fixture, CA), format!("{current}{external}"));
}

#[test]
fn an_external_ca_is_imported_and_stays_until_it_expires() {
    let mut fixture = CertificateFixture::installed();
    // The CA is old enough that no other CA stays for the overlap.
    fixture.now += 100 * HOUR;
    fixture.settle();
    let current = certificate(&fixture, CA);
    let ends = 20 * HOUR;
    let external = foreign_ca("kubevirt.io", fixture.now - HOUR, ends);
    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), external.clone());

    let first = fixture.issue_and_store();
    assert_eq!(first.renewed, names([]));
    assert_eq!(first.bundle(CA).unwrap(), format!("{current}{}", marked_external(&external)));
    assert_eq!(first.bundle(EXTERNAL_CA).unwrap(), external, "the stored bundle does not contain it yet");
    let second = fixture.issue_and_store();
    assert_eq!(second.bundle(EXTERNAL_CA).unwrap(), "");
    assert_eq!(second.bundle(EXPORT_CA), Some(certificate(&fixture, EXPORT_CA)));

    let issued = fixture.now;
    fixture.now += 19 * HOUR - Duration::from_secs(1);
    assert_eq!(fixture.issue_and_store().bundle(CA).unwrap(), format!("{current}{}", marked_external(&external)));
    assert_eq!(fixture.issue().next, Some(issued + 19 * HOUR));
    fixture.now = issued + 19 * HOUR;
    assert_eq!(fixture.issue_and_store().bundle(CA).unwrap(), current, "the external CA has expired");
}

#[test]
fn an_external_ca_stays_when_the_ca_is_replaced() {
    let mut fixture = CertificateFixture::installed();
    let external = foreign_ca("kubevirt.io", fixture.now - HOUR, 10_000 * HOUR);
    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), external.clone());
    let mut cas = BTreeSet::new();
    while cas.len() < 4 {
        let issued = fixture.issue_and_store();
        assert!(issued.bundle(CA).unwrap().ends_with(&marked_external(&external)));
        cas.insert(certificate(&fixture, CA));
        fixture.now = issued.next.unwrap();
    }
}

#[test]
fn an_external_ca_may_already_be_in_the_bundle() {
    let mut fixture = CertificateFixture::installed();
    let current = certificate(&fixture, CA);
    let external = foreign_ca("kubevirt.io", fixture.now - HOUR, 1000 * HOUR);
    fixture.stored.bundles.insert(CA.to_owned(), format!("{current}{external}"));
    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), format!("{external}{current}{external}"));
    let first = fixture.issue_and_store();
    assert_eq!(first.bundle(CA).unwrap(), format!("{current}{}", marked_external(&external)));
    assert_eq!(fixture.issue_and_store().bundle(EXTERNAL_CA).unwrap(), "");
}

#[test]
fn invalid_and_expired_external_cas_are_left_out() {
    let mut fixture = CertificateFixture::installed();
    let current = certificate(&fixture, CA);
    let good = foreign_ca("good", fixture.now - HOUR, 1000 * HOUR);
    let expired = foreign_ca("expired", fixture.now - 10 * HOUR, 10 * HOUR);
    let later = foreign_ca("later", fixture.now + HOUR, 1000 * HOUR);
    let text =
        format!("text {}{expired}{later}-----BEGIN CERTIFICATE-----\nMAAA\n-----END CERTIFICATE-----\n{good}", '\n');
    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), text);
    let bundle = format!("{current}{}{}", marked_external(&later), marked_external(&good));
    assert_eq!(fixture.issue_and_store().bundle(CA).unwrap(), bundle);
    assert_eq!(fixture.issue_and_store().bundle(EXTERNAL_CA).unwrap(), "");

    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), format!("{expired}nothing"));
    let issued = fixture.issue_and_store();
    assert_eq!((issued.bundle(CA).unwrap(), issued.bundle(EXTERNAL_CA).unwrap()), (bundle, String::new()));
}

#[test]
fn external_cas_that_do_not_fit_into_the_bundle_stay_where_the_user_added_them() {
    let mut fixture = CertificateFixture::installed();
    let many: Vec<String> = (0..60).map(|number| foreign_ca(&number.to_string(), fixture.now, 1000 * HOUR)).collect();
    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), many.concat());
    fixture.settle();
    let issued = fixture.issue();
    let bundle = issued.bundle(CA).unwrap();
    let fitting = many.iter().filter(|ca| bundle.contains(ca.as_str())).count();
    // Room for four CAs of the operator is left.
    assert_eq!((fitting, issued.left_out()), (46, 14));
    assert_eq!(issued.bundle(EXTERNAL_CA).unwrap(), many.concat());
    // The user removes CAs that are not needed, from both ConfigMaps.
    let needed: Vec<&String> = many.iter().filter(|ca| !bundle.contains(ca.as_str())).collect();
    fixture.stored.bundles.insert(CA.to_owned(), certificate(&fixture, CA));
    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), needed.iter().map(|ca| ca.as_str()).collect());
    fixture.settle();
    let issued = fixture.issue();
    let bundle = issued.bundle(CA).unwrap();
    assert!(needed.iter().all(|ca| bundle.contains(ca.as_str())));
    assert_eq!((issued.left_out(), issued.bundle(EXTERNAL_CA).unwrap()), (0, String::new()));
}

/// The CAs of the operator come first in a bundle.
#[test]
fn a_rotation_does_not_displace_external_cas() {
    let mut fixture = CertificateFixture::installed();
    let many: Vec<String> = (0..60).map(|number| foreign_ca(&number.to_string(), fixture.now, 10_000 * HOUR)).collect();
    fixture.stored.bundles.insert(EXTERNAL_CA.to_owned(), many.concat());
    fixture.settle();
    let trusted: Vec<&String> = {
        let bundle = fixture.issue().bundle(CA).unwrap();
        many.iter().filter(|ca| bundle.contains(ca.as_str())).collect()
    };
    let mut cas = BTreeSet::new();
    while cas.len() < 3 {
        let issued = fixture.issue_and_store();
        let bundle = issued.bundle(CA).unwrap();
        assert!(trusted.iter().all(|ca| bundle.contains(ca.as_str())), "a CA of a user is lost");
        cas.insert(certificate(&fixture, CA));
        fixture.now = issued.next.unwrap();
    }
}
