//! Usable certificates are kept byte for byte.

use serde_json::{Value, json};
use vitivirt_install::{Cluster, Environment, Installation, Kind};

use super::*;

fn assert_everything_is_kept(fixture: &CertificateFixture) {
    let issued = fixture.issue();
    assert_eq!(issued.renewed, names([]));
    for (secret, stored) in &fixture.stored.secrets {
        let pair = issued.key_pair(secret).unwrap();
        assert!(pair.certificate == stored.certificate && pair.key == stored.key, "{secret}");
    }
    for (config_map, bundle) in &fixture.stored.bundles {
        assert_eq!(issued.bundle(config_map).as_ref(), Some(bundle), "{config_map}");
    }
}

#[test]
fn the_cas_are_issued_before_the_certificates_and_then_everything_is_kept() {
    let mut fixture = CertificateFixture::new();
    assert_eq!(fixture.issue_and_store().renewed, names([CA, EXPORT_CA, BACKUP_CA]));
    let second = fixture.issue_and_store();
    assert_eq!(second.renewed, fixture.leaf_secrets());
    assert_eq!(fixture.stored.secrets.len(), 16);
    assert_eq!(second.bundle(EXTERNAL_CA).as_deref(), Some(""));
    assert_everything_is_kept(&fixture);
    fixture.now += HOUR;
    assert_everything_is_kept(&fixture);
    assert_eq!(fixture.issue().next, second.next);
}

#[test]
fn a_small_clock_skew_renews_nothing() {
    let mut fixture = CertificateFixture::installed();
    fixture.now -= Duration::from_secs(60);
    assert_everything_is_kept(&fixture);
}

#[test]
fn a_ca_without_the_duration_annotation_is_kept_if_its_dates_match() {
    let mut fixture = CertificateFixture::installed();
    for ca in [CA, EXPORT_CA, BACKUP_CA] {
        fixture.secret_mut(ca).duration = None;
    }
    assert_everything_is_kept(&fixture);
}

#[test]
fn a_stored_key_may_be_in_pkcs8() {
    let mut fixture = CertificateFixture::installed();
    let key = key_of(fixture.secret_mut(CA));
    fixture.secret_mut(CA).key = key.pair().serialize_pem().into_bytes();
    assert!(text(fixture.secret_mut(CA).key.clone()).starts_with("-----BEGIN PRIVATE KEY-----"));
    assert_everything_is_kept(&fixture);
}

/// The issuer compares the annotation that the installation writes.
#[test]
fn secrets_as_the_installation_writes_them_are_kept() {
    let kubevirt = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
        "spec": {"certificateRotateStrategy": {"selfSigned": {
            "ca": {"duration": "50h30m", "renewBefore": "90m"}, "server": {"duration": "1.5h"},
        }}},
    });
    let environment = Environment { operator_image: "r/virt-operator:v1".to_owned(), ..Environment::default() };
    let installation =
        Installation::new(&serde_json::from_value(kubevirt).unwrap(), &environment, &Cluster::default()).unwrap();

    let mut fixture = CertificateFixture { desired: installation.certificates.clone(), ..CertificateFixture::new() };
    fixture.settle();
    let issued = fixture.issue();
    fixture.stored.secrets.clear();
    for object in installation.objects.iter().filter(|object| object.kind == Kind::Secret) {
        let body = object.body(&issued).unwrap().into_json();
        let duration = body.pointer("/metadata/annotations/kubevirt.io~1duration").and_then(Value::as_str);
        let pair = issued.key_pair(object.key.name()).unwrap();
        let secret =
            StoredSecret { certificate: pair.certificate, key: pair.key, duration: duration.map(str::to_owned) };
        fixture.stored.secrets.insert(object.key.name().to_owned(), secret);
    }
    assert_eq!(fixture.stored.secrets.len(), 13);
    assert_eq!(fixture.issue().renewed, names([]));
}
