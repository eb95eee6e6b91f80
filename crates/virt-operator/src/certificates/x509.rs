//! Certificates with their private keys: parsed from a Secret, or newly signed.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyUsagePurpose, SanType,
};
use time::OffsetDateTime;
use vitivirt_api::Failure;
use vitivirt_install::certificates::{Certificate, KeyPair, Usage, Validity};
use x509_parser::{
    certificate::X509Certificate,
    extensions::GeneralName,
    oid_registry::{OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY},
    prelude::FromDer,
};

use super::{
    NOT_ISSUED, StoredSecret,
    key::{Key, encode_pem, issue_error},
};

/// A certificate with its private key. It has no `Debug`, because the key must not be logged.
pub(super) struct CertifiedKey {
    /// In DER.
    pub(super) certificate: Vec<u8>,
    pub(super) validity: Validity,
    key: Key,
}

impl CertifiedKey {
    /// `None` if the certificate or its private key cannot be parsed, or if they do not belong together.
    pub(super) fn from_secret(stored: &StoredSecret) -> Option<Self> {
        let certificate = first_certificate(&stored.certificate)?;
        let parsed = parse(&certificate)?;
        let spki = parsed.public_key();
        let curve = spki.algorithm.parameters.as_ref().and_then(|curve| curve.as_oid().ok());
        (spki.algorithm.algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY && curve == Some(OID_EC_P256)).then_some(())?;
        let key = Key::from_pem(&stored.key, &spki.subject_public_key.data)?;
        let validity = validity(&parsed)?;
        Some(Self { certificate, validity, key })
    }

    /// Creates a self-signed CA. It is already valid on a node whose clock is late.
    pub(super) fn new_ca(desired: &Certificate, key: Key, now: SystemTime) -> Result<Self, Failure> {
        let mut params = params(desired, now - desired.lifetime.backdating(), now);
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        params.distinguished_name.push(DnType::CommonName, format!("{}@{seconds}", desired.common_name));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages.push(KeyUsagePurpose::KeyCertSign);
        let signed = params.self_signed(key.pair()).map_err(|error| issue_error(&error))?;
        Self::new(signed.der().to_vec(), key)
    }

    /// Creates a leaf certificate. Its validity starts with that of its CA, so that it verifies at every time at which
    /// the CA does.
    pub(super) fn new_leaf(desired: &Certificate, key: Key, ca: &Self, now: SystemTime) -> Result<Self, Failure> {
        let mut params = params(desired, ca.validity.not_before, now);
        params.distinguished_name.push(DnType::CommonName, desired.common_name.clone());
        for name in &desired.dns_names {
            let name = name.as_str().try_into().map_err(|error| issue_error(&error))?;
            params.subject_alt_names.push(SanType::DnsName(name));
        }
        params.extended_key_usages.push(match desired.usage {
            Usage::Client => ExtendedKeyUsagePurpose::ClientAuth,
            Usage::Server | Usage::Ca => ExtendedKeyUsagePurpose::ServerAuth,
        });
        params.use_authority_key_identifier_extension = true;
        let issuer = ca.issuer().map_err(|error| issue_error(&error))?;
        let signed = params.signed_by(key.pair(), &issuer).map_err(|error| issue_error(&error))?;
        Self::new(signed.der().to_vec(), key)
    }

    fn new(certificate: Vec<u8>, key: Key) -> Result<Self, Failure> {
        let unreadable = || Failure::bug(NOT_ISSUED, "the issued certificate cannot be parsed");
        let validity = parse(&certificate).as_ref().and_then(validity).ok_or_else(unreadable)?;
        Ok(Self { certificate, validity, key })
    }

    fn issuer(&self) -> Result<Issuer<'_, &rcgen::KeyPair>, rcgen::Error> {
        Issuer::from_ca_cert_der(&self.certificate.as_slice().into(), self.key.pair())
    }

    /// Whether TLS clients accept the certificates that this CA signs.
    pub(super) fn can_sign(&self) -> bool {
        parse(&self.certificate).is_some_and(|parsed| is_usable_ca(&parsed)) && self.issuer().is_ok()
    }

    /// `ca` is a certificate in DER.
    pub(super) fn is_signed_by(&self, ca: &[u8]) -> bool {
        let (Some(parsed), Some(signer)) = (parse(&self.certificate), parse(ca)) else { return false };
        parsed.issuer().as_raw() == signer.subject().as_raw()
            && parsed.verify_signature(Some(signer.public_key())).is_ok()
    }

    /// Whether the certificate has the desired names and usage.
    pub(super) fn is_for(&self, desired: &Certificate) -> bool {
        let Some(parsed) = parse(&self.certificate) else { return false };
        let mut common_names = parsed.subject().iter_common_name().filter_map(|name| name.as_str().ok());
        let usages = parsed.extended_key_usage().ok().flatten();
        let alternatives = parsed.subject_alternative_name().ok().flatten();
        let names = alternatives.iter().flat_map(|names| &names.value.general_names);
        let names: Vec<&str> = names
            .filter_map(|name| match name {
                GeneralName::DNSName(name) => Some(*name),
                _ => None,
            })
            .collect();
        common_names.next() == Some(desired.common_name.as_str())
            && desired.dns_names.iter().all(|name| names.contains(&name.as_str()))
            && usages.is_some_and(|usages| match desired.usage {
                Usage::Client => usages.value.client_auth,
                Usage::Server => usages.value.server_auth,
                Usage::Ca => false,
            })
    }

    pub(super) fn to_pem(&self) -> KeyPair {
        KeyPair {
            certificate: encode_pem("CERTIFICATE", self.certificate.clone()).into_bytes(),
            key: self.key.to_pem(),
        }
    }
}

/// The parameters that all certificates share. X.509 stores times in whole seconds.
fn params(desired: &Certificate, from: SystemTime, now: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.not_before = OffsetDateTime::from(from);
    params.not_after = OffsetDateTime::from(now) + desired.lifetime.duration;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params
}

/// The first certificate in a Secret is the Secret's own; the certificates after it are those of its signers.
pub(super) fn first_certificate(pem: &[u8]) -> Option<Vec<u8>> {
    let blocks = pem::parse_many(pem).ok()?;
    Some(blocks.into_iter().find(|block| block.tag() == "CERTIFICATE")?.into_contents())
}

pub(super) fn parse(der: &[u8]) -> Option<X509Certificate<'_>> {
    X509Certificate::from_der(der).ok().filter(|(rest, _)| rest.is_empty()).map(|(_, parsed)| parsed)
}

pub(super) fn validity(parsed: &X509Certificate<'_>) -> Option<Validity> {
    let time = |time: x509_parser::time::ASN1Time| {
        let seconds = u64::try_from(time.timestamp()).unwrap_or_default();
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
    };
    Some(Validity { not_before: time(parsed.validity().not_before)?, not_after: time(parsed.validity().not_after)? })
}

/// Whether a certificate is a CA whose subject can be copied into the issuer field of a leaf. rcgen represents a
/// subject only if each of its parts has one attribute and no attribute type occurs twice.
pub(super) fn is_usable_ca(parsed: &X509Certificate<'_>) -> bool {
    let signs = parsed.key_usage().is_ok_and(|usage| usage.is_none_or(|usage| usage.value.key_cert_sign()));
    let mut kinds = Vec::new();
    let copyable = parsed.subject().iter_rdn().all(|names| {
        let mut names = names.iter();
        let kind = names.next().map(|name| name.attr_type().clone());
        let alone = kind.is_some() && names.next().is_none() && !kinds.contains(&kind);
        kinds.push(kind);
        alone
    });
    parsed.is_ca() && signs && copyable
}
