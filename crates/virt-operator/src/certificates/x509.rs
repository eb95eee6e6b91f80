//! Certificates with their keys: read from what a Secret holds, or signed.

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
    Held, NOT_ISSUED,
    key::{self, Key},
};

/// A certificate with its key. It has no `Debug`.
pub(super) struct Pair {
    /// In DER.
    pub(super) certificate: Vec<u8>,
    pub(super) validity: Validity,
    key: Key,
}

impl Pair {
    /// `None` where the certificate, or the key that belongs to it, cannot be read.
    pub(super) fn read(held: &Held) -> Option<Self> {
        let certificate = first_certificate(&held.certificate)?;
        let parsed = parse(&certificate)?;
        let spki = parsed.public_key();
        let curve = spki.algorithm.parameters.as_ref().and_then(|curve| curve.as_oid().ok());
        (spki.algorithm.algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY && curve == Some(OID_EC_P256)).then_some(())?;
        let key = Key::read(&held.key, &spki.subject_public_key.data)?;
        let validity = validity(&parsed)?;
        Some(Self { certificate, validity, key })
    }

    /// A new authority, which has signed itself.
    pub(super) fn ca(wanted: &Certificate, key: Key, now: SystemTime) -> Result<Self, Failure> {
        let mut params = params(wanted, now, now);
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        params.distinguished_name.push(DnType::CommonName, format!("{}@{seconds}", wanted.common_name));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages.push(KeyUsagePurpose::KeyCertSign);
        let signed = params.self_signed(key.pair()).map_err(|error| key::failure(&error))?;
        Self::new(signed.der().to_vec(), key)
    }

    /// A new leaf. It is valid from when its authority is, so that it verifies whenever its authority does.
    pub(super) fn leaf(wanted: &Certificate, key: Key, ca: &Self, now: SystemTime) -> Result<Self, Failure> {
        let mut params = params(wanted, ca.validity.not_before, now);
        params.distinguished_name.push(DnType::CommonName, wanted.common_name.clone());
        for name in &wanted.dns_names {
            let name = name.as_str().try_into().map_err(|error| key::failure(&error))?;
            params.subject_alt_names.push(SanType::DnsName(name));
        }
        params.extended_key_usages.push(match wanted.usage {
            Usage::Client => ExtendedKeyUsagePurpose::ClientAuth,
            Usage::Server | Usage::Ca => ExtendedKeyUsagePurpose::ServerAuth,
        });
        params.use_authority_key_identifier_extension = true;
        let issuer = ca.issuer().map_err(|error| key::failure(&error))?;
        let signed = params.signed_by(key.pair(), &issuer).map_err(|error| key::failure(&error))?;
        Self::new(signed.der().to_vec(), key)
    }

    fn new(certificate: Vec<u8>, key: Key) -> Result<Self, Failure> {
        let unreadable = || Failure::bug(NOT_ISSUED, "a certificate was made that cannot be read");
        let validity = parse(&certificate).as_ref().and_then(validity).ok_or_else(unreadable)?;
        Ok(Self { certificate, validity, key })
    }

    fn issuer(&self) -> Result<Issuer<'_, &rcgen::KeyPair>, rcgen::Error> {
        Issuer::from_ca_cert_der(&self.certificate.as_slice().into(), self.key.pair())
    }

    /// Whether others accept what this one signs.
    pub(super) fn can_sign(&self) -> bool {
        parse(&self.certificate).is_some_and(|parsed| is_authority(&parsed)) && self.issuer().is_ok()
    }

    pub(super) fn is_signed_by(&self, ca: &Self) -> bool {
        let (Some(parsed), Some(signer)) = (parse(&self.certificate), parse(&ca.certificate)) else {
            return false;
        };
        parsed.issuer().as_raw() == signer.subject().as_raw()
            && parsed.verify_signature(Some(signer.public_key())).is_ok()
    }

    /// Whether it is a certificate for these names and this use.
    pub(super) fn is_for(&self, wanted: &Certificate) -> bool {
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
        common_names.next() == Some(wanted.common_name.as_str())
            && wanted.dns_names.iter().all(|name| names.contains(&name.as_str()))
            && usages.is_some_and(|usages| match wanted.usage {
                Usage::Client => usages.value.client_auth,
                Usage::Server => usages.value.server_auth,
                Usage::Ca => false,
            })
    }

    pub(super) fn to_pem(&self) -> KeyPair {
        KeyPair {
            certificate: key::encode("CERTIFICATE", self.certificate.clone()).into_bytes(),
            key: self.key.to_pem(),
        }
    }
}

/// What all have in common. A time of X.509 is in whole seconds.
fn params(wanted: &Certificate, from: SystemTime, now: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.not_before = OffsetDateTime::from(from);
    params.not_after = OffsetDateTime::from(now) + wanted.lifetime.duration;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params
}

/// The first certificate of a Secret is its own, others are those of who signed it.
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

/// One that says so, and whose name can be repeated as that of an issuer: one attribute at a time, each kind once.
pub(super) fn is_authority(parsed: &X509Certificate<'_>) -> bool {
    let signs = parsed.key_usage().is_ok_and(|usage| usage.is_none_or(|usage| usage.value.key_cert_sign()));
    let mut kinds = Vec::new();
    let repeatable = parsed.subject().iter_rdn().all(|names| {
        let mut names = names.iter();
        let kind = names.next().map(|name| name.attr_type().clone());
        let alone = kind.is_some() && names.next().is_none() && !kinds.contains(&kind);
        kinds.push(kind);
        alone
    });
    parsed.is_ca() && signs && repeatable
}
