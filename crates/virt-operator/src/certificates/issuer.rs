//! Decides for each certificate whether the stored one is kept, and issues a new one otherwise.
//!
//! A certificate is issued if the stored one is missing, unreadable, due for renewal, issued for other names, another
//! usage or another duration, or not signed by the current CA.
//!
//! A new CA is stored before it is trusted, and trusted before it signs: bundles contain only stored CAs, and a
//! certificate of the previous CA is replaced only when every bundle has contained the new one for a while. So at no
//! time does a server present a certificate that a client does not trust yet.

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

/// The current CA.
struct SigningCa {
    certificate: CertifiedKey,
    term: ValidityWindow,
    /// Whether it is in its Secret. A CA that is being replaced signs nothing.
    is_stored: bool,
    /// Since when it may sign: every bundle contains it. `None` if one does not.
    trusted_since: Option<SystemTime>,
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
        let is_stored = usable.is_some();
        let ca = match usable {
            Some(ca) => self.keep(desired, ca, stored),
            None => {
                let ca = CertifiedKey::new_ca(desired, (self.keys)()?, self.now)?;
                self.renew(desired, ca)
            }
        };
        let term = ValidityWindow { lifetime: desired.lifetime, validity: ca.validity };
        self.issued.renew_no_later_than(term.deadline(None));
        self.update_bundle(desired, stored);
        let trusted_since =
            self.is_in_every_bundle(desired, &ca).then(|| term.issued_at() + desired.lifetime.propagation());
        Ok(SigningCa { certificate: ca, term, is_stored, trusted_since })
    }

    /// Whether every client trusts a CA, as far as bundles say it. Only the bundle `CA` is in webhooks and APIServices.
    fn is_in_every_bundle(&self, desired: &Certificate, ca: &CertifiedKey) -> bool {
        let contains = |bundle: &str| parse_bundle(bundle).iter().any(|other| other.certificate == ca.certificate);
        let trusted = self.stored.trusted_bundles.iter().filter(|_| desired.secret == CA);
        self.stored.bundles.get(&desired.secret).is_some_and(|bundle| contains(bundle))
            && trusted.into_iter().all(|bundle| contains(&String::from_utf8_lossy(bundle)))
    }

    fn keep_or_issue_leaf(&mut self, desired: &Certificate, signer: &SigningCa) -> Result<(), Failure> {
        let stored = self.stored.secrets.get(&desired.secret);
        let leaf = stored.and_then(CertifiedKey::from_secret);
        let is_current = |leaf: &CertifiedKey| {
            let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
            let fits = stored.and_then(|stored| stored.duration.as_ref()) == Some(&desired.lifetime.annotation());
            let matches = fits && leaf.is_for(desired) && leaf.is_signed_by(&signer.certificate.certificate);
            matches && !term.is_due(Some(&signer.term), self.now)
        };
        let leaf = match leaf {
            // The next reconcile follows when the CA is stored.
            leaf if !signer.is_stored => {
                if let Some(leaf) = leaf {
                    self.keep(desired, leaf, stored);
                }
                return Ok(());
            }
            Some(leaf) if is_current(&leaf) => self.keep(desired, leaf, stored),
            Some(leaf) if self.awaits_trust(desired, &leaf, signer) => {
                let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
                let again = signer.trusted_since.unwrap_or(self.now + signer.term.lifetime.propagation());
                self.issued.renew_no_later_than(again.min(term.last_renewal()));
                self.keep(desired, leaf, stored);
                return Ok(());
            }
            _ => {
                let leaf = CertifiedKey::new_leaf(desired, (self.keys)()?, &signer.certificate, self.now)?;
                self.renew(desired, leaf)
            }
        };
        let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
        self.issued.renew_no_later_than(term.deadline(Some(&signer.term)));
        Ok(())
    }

    /// Whether clients still accept a certificate of the previous CA, and may not accept one of the new CA yet.
    fn awaits_trust(&self, desired: &Certificate, leaf: &CertifiedKey, signer: &SigningCa) -> bool {
        let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
        let is_trusted = || {
            let bundle = self.stored.bundles.get(desired.signer.unwrap_or_default()).map(|text| parse_bundle(text));
            bundle.iter().flatten().any(|ca| ca.validity.not_after > self.now && leaf.is_signed_by(&ca.certificate))
        };
        signer.trusted_since.is_none_or(|since| since > self.now)
            && term.last_renewal() > self.now
            && leaf.is_for(desired)
            && !leaf.is_signed_by(&signer.certificate.certificate)
            && is_trusted()
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

    /// Computes the bundle of the CA that is stored. It has the same name as the CA's Secret.
    ///
    /// A CA that is about to be replaced gets into the bundle too, because components still use the certificates that it
    /// signed. Its successor gets there when it is stored: if its write fails, the next reconcile issues another one.
    fn update_bundle(&mut self, desired: &Certificate, stored: Option<&StoredSecret>) {
        let current = stored.and_then(|stored| {
            let certificate = x509::first_certificate(&stored.certificate)?;
            let parsed = x509::parse(&certificate).filter(x509::is_usable_ca)?;
            let validity = x509::validity(&parsed)?;
            Some(TrustedCertificate { certificate, validity, origin: Origin::Own })
        });
        let Some(current) = current else { return };
        let stored_bundle = self.stored.bundles.get(&desired.secret).map(|text| parse_bundle(text)).unwrap_or_default();
        let external =
            (desired.secret == CA).then(|| self.stored.bundles.get(EXTERNAL_CA).cloned().unwrap_or_default());
        let imported = parse_bundle(external.as_deref().unwrap_or_default())
            .into_iter()
            .map(|trusted| TrustedCertificate { origin: Origin::External, ..trusted });

        let others = stored_bundle.iter().cloned().chain(imported).collect();
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

/// How long a CA and its successor are both trusted, counted from when the successor becomes valid.
fn overlap(desired: &Certificate) -> Duration {
    desired.lifetime.renew_before + desired.lifetime.backdating()
}
