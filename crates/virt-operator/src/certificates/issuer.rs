//! Decides for each certificate whether the stored one is kept, and issues a new one otherwise.
//!
//! A certificate is issued if the stored one is missing, unreadable, due for renewal, issued for other names, another
//! usage or another duration, or not signed by the current CA.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use vitivirt_api::Failure;
use vitivirt_install::{
    INVALID_DURATION,
    certificates::{
        CA, Certificate, EXTERNAL_CA, KeyPair, MIN_LIFETIME, Usage, ValidityWindow,
        bundle::{self, Origin, TrustedCertificate},
    },
};

use super::{
    CertificateSet, Key, NOT_ISSUED, StoredCertificates, StoredSecret,
    bundle::{format_bundle, parse_bundle},
    x509::{self, CertifiedKey},
};

/// Takes one key from `keys` for each certificate that is issued, in the order in which they are issued.
pub(crate) fn issue_certificates(
    desired: &[Certificate],
    stored: &StoredCertificates,
    now: SystemTime,
    keys: &mut dyn FnMut() -> Result<Key, Failure>,
) -> Result<CertificateSet, Failure> {
    let mut issuer = CertificateIssuer { stored, now, keys, issued: CertificateSet::default() };
    let mut cas = BTreeMap::new();
    for certificate in desired {
        check_duration(certificate)?;
        if certificate.usage == Usage::Ca {
            cas.insert(certificate.secret.as_str(), issuer.keep_or_issue_ca(certificate)?);
        }
    }
    for certificate in desired.iter().filter(|certificate| certificate.usage != Usage::Ca) {
        let signer = certificate
            .signer
            .and_then(|signer| cas.get(signer))
            .ok_or_else(|| Failure::bug(NOT_ISSUED, format!("no CA signs Secret {}", certificate.secret)))?;
        issuer.keep_or_issue_leaf(certificate, signer)?;
    }
    Ok(issuer.issued)
}

fn check_duration(certificate: &Certificate) -> Result<(), Failure> {
    if certificate.lifetime.duration >= MIN_LIFETIME {
        return Ok(());
    }
    let kind = if certificate.usage == Usage::Ca { "ca" } else { "server" };
    let message = format!(
        "spec.certificateRotateStrategy.selfSigned.{kind}.duration: must be at least {}s: \
         a certificate with a shorter duration expires before it is in use",
        MIN_LIFETIME.as_secs()
    );
    Err(Failure::invalid(INVALID_DURATION, message))
}

struct CertificateIssuer<'a> {
    stored: &'a StoredCertificates,
    now: SystemTime,
    keys: &'a mut dyn FnMut() -> Result<Key, Failure>,
    issued: CertificateSet,
}

/// A CA that signs leaf certificates.
struct SigningCa {
    certificate: CertifiedKey,
    term: ValidityWindow,
}

impl CertificateIssuer<'_> {
    fn keep_or_issue_ca(&mut self, desired: &Certificate) -> Result<SigningCa, Failure> {
        let stored = self.stored.secrets.get(&desired.secret);
        let usable = stored.and_then(|stored| {
            let ca = CertifiedKey::from_secret(stored).filter(CertifiedKey::can_sign)?;
            let term = ValidityWindow { lifetime: desired.lifetime, validity: ca.validity };
            // Upstream virt-operator may leave the annotation out. The validity dates of a CA show its duration too.
            let fits =
                stored.duration.as_ref().map_or(term.matches_lifetime(), |text| *text == desired.lifetime.annotation());
            (fits && !term.is_due(None, self.now)).then_some(ca)
        });
        let ca = match usable {
            Some(ca) => self.keep(desired, ca, stored),
            None => {
                let ca = CertifiedKey::new_ca(desired, (self.keys)()?, self.now)?;
                self.renew(desired, ca)
            }
        };
        let term = ValidityWindow { lifetime: desired.lifetime, validity: ca.validity };
        self.issued.renew_no_later_than(term.deadline(None));
        self.update_bundle(desired, &ca, stored);
        Ok(SigningCa { certificate: ca, term })
    }

    fn keep_or_issue_leaf(&mut self, desired: &Certificate, signer: &SigningCa) -> Result<(), Failure> {
        let stored = self.stored.secrets.get(&desired.secret);
        let usable = stored.and_then(|stored| {
            let leaf = CertifiedKey::from_secret(stored)?;
            let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
            let fits = stored.duration.as_deref() == Some(&desired.lifetime.annotation());
            let matches = fits && leaf.is_for(desired) && leaf.is_signed_by(&signer.certificate);
            (matches && !term.is_due(Some(&signer.term), self.now)).then_some(leaf)
        });
        let leaf = match usable {
            Some(leaf) => self.keep(desired, leaf, stored),
            None => {
                let leaf = CertifiedKey::new_leaf(desired, (self.keys)()?, &signer.certificate, self.now)?;
                self.renew(desired, leaf)
            }
        };
        let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
        self.issued.renew_no_later_than(term.deadline(Some(&signer.term)));
        Ok(())
    }

    /// Keeps the exact bytes of the Secret, regardless of which client wrote them.
    fn keep(&mut self, desired: &Certificate, kept: CertifiedKey, stored: Option<&StoredSecret>) -> CertifiedKey {
        let unchanged =
            |stored: &StoredSecret| KeyPair { certificate: stored.certificate.clone(), key: stored.key.clone() };
        self.issued.pairs.insert(desired.secret.clone(), stored.map_or_else(|| kept.to_pem(), unchanged));
        kept
    }

    fn renew(&mut self, desired: &Certificate, renewed: CertifiedKey) -> CertifiedKey {
        self.issued.pairs.insert(desired.secret.clone(), renewed.to_pem());
        self.issued.renewed.insert(desired.secret.clone());
        renewed
    }

    /// Computes the bundle of a CA. It has the same name as the CA's Secret.
    ///
    /// A CA that is being replaced stays trusted even if the stored bundle does not contain it, because components
    /// still use the certificates that it signed.
    fn update_bundle(&mut self, desired: &Certificate, current: &CertifiedKey, stored: Option<&StoredSecret>) {
        let stored_bundle = self.stored.bundles.get(&desired.secret).map(|text| parse_bundle(text)).unwrap_or_default();
        let trusted = |certificate, validity| TrustedCertificate { certificate, validity, origin: Origin::Own };
        let previous = stored.and_then(|stored| {
            let certificate = x509::first_certificate(&stored.certificate)?;
            let parsed = x509::parse(&certificate).filter(x509::is_usable_ca)?;
            let validity = x509::validity(&parsed)?;
            Some(trusted(certificate, validity))
        });
        let external =
            (desired.secret == CA).then(|| self.stored.bundles.get(EXTERNAL_CA).cloned().unwrap_or_default());
        let imported = parse_bundle(external.as_deref().unwrap_or_default())
            .into_iter()
            .map(|trusted| TrustedCertificate { origin: Origin::External, ..trusted });

        let others = stored_bundle.iter().cloned().chain(previous).chain(imported).collect();
        let current = trusted(current.certificate.clone(), current.validity);
        let bundle = bundle::merge(current, others, overlap(desired), self.now);
        if let Some(external) = external {
            // The external bundle is emptied when the stored bundle already contains its CAs, not when they are about
            // to be written. Otherwise a crash between the two writes would lose them.
            let is_stored =
                |trusted: &TrustedCertificate| trusted.origin == Origin::Own || stored_bundle.contains(trusted);
            let all_stored = bundle.certificates.iter().all(is_stored);
            let external = if all_stored { String::new() } else { external };
            self.issued.bundles.insert(EXTERNAL_CA.to_owned(), external);
        }
        self.issued.bundles.insert(desired.secret.clone(), format_bundle(&bundle.certificates));
        if let Some(next) = bundle.next_removal {
            self.issued.renew_no_later_than(next);
        }
    }
}

/// How long a CA and its successor are both trusted.
fn overlap(desired: &Certificate) -> Duration {
    desired.lifetime.renew_before
}
