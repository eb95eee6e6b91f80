//! The fields of the issued certificates, and their PEM form.

use x509_parser::{certificate::X509Certificate, extensions::ParsedExtension};

use super::{
    super::x509::{first_certificate, parse, validity},
    *,
};

#[test]
fn every_certificate_has_the_fields_that_upstream_gives_it() {
    let mut fixture =
        CertificateFixture { now: at(1_800_000_000) + Duration::from_millis(700), ..CertificateFixture::new() };
    let issued = at(1_800_000_000);
    fixture.issue_and_store();
    fixture.now += HOUR;
    // The leaves are issued later than their CA.
    let leaves = fixture.leaf_secrets();
    fixture.stored.secrets.retain(|name, _| !leaves.contains(name));
    fixture.issue_and_store();

    let mut serials = BTreeSet::new();
    let ca = first_certificate(&fixture.secret_mut(CA).certificate).unwrap();
    let ca = parse(&ca).unwrap();
    for desired in &fixture.desired {
        let secret = &desired.secret;
        let der = first_certificate(&fixture.stored.secrets.get(secret).unwrap().certificate).unwrap();
        let parsed = parse(&der).unwrap();
        let names: Vec<&str> = parsed.subject().iter_common_name().map(|name| name.as_str().unwrap()).collect();
        let validity = validity(&parsed).unwrap();
        let usage = parsed.key_usage().unwrap().unwrap();
        assert!(usage.critical && usage.value.digital_signature() && usage.value.key_encipherment(), "{secret}");
        assert_eq!(usage.value.flags.count_ones(), if desired.usage == Usage::Ca { 3 } else { 2 }, "{secret}");
        assert_eq!(usage.value.key_cert_sign(), desired.usage == Usage::Ca, "{secret}");
        assert_eq!(parsed.version().0, 2, "{secret}");
        assert_eq!(parsed.subject().iter_rdn().count(), 1, "{secret}");
        assert_eq!(parsed.public_key().parsed().unwrap().key_size(), 256, "{secret}");
        let late_clock = Duration::from_secs(300);
        assert_eq!(validity.not_before, issued - late_clock, "{secret}: valid on a node whose clock is late");
        // RFC 5280 requires a positive serial number of at most twenty bytes.
        let serial = parsed.raw_serial();
        assert!(serial.first().is_some_and(|byte| byte & 0x80 == 0) && serial.len() <= 20, "{secret}");
        assert!(serials.insert(serial.to_vec()), "{secret}");

        let usages = parsed.extended_key_usage().unwrap();
        let constraints = parsed.basic_constraints().unwrap();
        if desired.usage == Usage::Ca {
            assert_eq!(names, [format!("{}@1800000000", desired.common_name)]);
            assert_eq!(validity.not_after, issued + 168 * HOUR, "{secret}");
            assert!(usages.is_none() && parsed.subject_alternative_name().unwrap().is_none(), "{secret}");
            let constraints = constraints.unwrap();
            assert!(constraints.critical && constraints.value.ca, "{secret}");
            assert_eq!(constraints.value.path_len_constraint, None, "{secret}");
            assert!(parsed.verify_signature(None).is_ok(), "{secret}");
            continue;
        }
        assert_eq!(names, [desired.common_name.as_str()]);
        assert_eq!(validity.not_after, issued + 25 * HOUR, "{secret}");
        assert!(constraints.is_none(), "{secret}");
        let usages = usages.unwrap().value;
        assert_eq!(
            (usages.server_auth, usages.client_auth),
            match desired.usage {
                Usage::Client => (false, true),
                _ => (true, false),
            }
        );
        let alternatives = parsed.subject_alternative_name().unwrap();
        let alternatives: Vec<String> =
            alternatives.iter().flat_map(|names| &names.value.general_names).map(ToString::to_string).collect();
        let expected: Vec<String> = desired.dns_names.iter().map(|name| format!("DNSName({name})")).collect();
        assert_eq!(alternatives, expected, "{secret}");
        assert_eq!(parsed.issuer().as_raw(), ca.subject().as_raw(), "{secret}");
        assert_eq!(authority_identifier(&parsed), subject_identifier(&ca), "{secret}");
        assert!(parsed.verify_signature(Some(ca.public_key())).is_ok(), "{secret}");
    }
    assert_eq!(serials.len(), 16);
}

/// The identifier that distinguishes two CAs with the same name.
fn subject_identifier<'a>(parsed: &'a X509Certificate<'_>) -> &'a [u8] {
    let found = parsed.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(identifier) => Some(identifier.0),
        _ => None,
    });
    found.unwrap()
}

fn authority_identifier<'a>(parsed: &'a X509Certificate<'_>) -> &'a [u8] {
    let found = parsed.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::AuthorityKeyIdentifier(ca) => ca.key_identifier.as_ref(),
        _ => None,
    });
    found.unwrap().0
}

#[test]
fn pem_is_written_as_go_writes_it() {
    let fixture = CertificateFixture::installed();
    for (secret, stored) in &fixture.stored.secrets {
        let (certificate, key) = (text(stored.certificate.clone()), text(stored.key.clone()));
        for (text, tag) in [(certificate, "CERTIFICATE"), (key, "EC PRIVATE KEY")] {
            let lines: Vec<&str> = text.split('\n').collect();
            let (last, lines) = lines.split_last().unwrap();
            assert_eq!(*last, "", "{secret}");
            assert_eq!(*lines.first().unwrap(), format!("-----BEGIN {tag}-----"), "{secret}");
            assert_eq!(*lines.last().unwrap(), format!("-----END {tag}-----"), "{secret}");
            let body = lines.get(1..lines.len() - 1).unwrap();
            assert!(body.iter().rev().skip(1).all(|line| line.len() == 64), "{secret}");
        }
    }
}
