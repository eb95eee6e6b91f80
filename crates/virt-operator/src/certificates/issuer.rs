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
    CertificateSet, Key, NOT_ISSUED, StoredCertificates, StoredSecret, TrustedCa,
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
        match signer {
            Some(signer) => issuer.keep_or_issue_leaf(certificate, signer)?,
            // The next reconcile follows when the CA is stored.
            None => issuer.keep_stored(certificate),
        }
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

/// A stored CA that signs leaf certificates.
struct SigningCa {
    certificate: CertifiedKey,
    term: ValidityWindow,
    /// Whether its successor is about to be stored. It signs only what cannot wait.
    is_retiring: bool,
    /// Since when it may sign: every bundle contains it. `None` if one does not.
    trusted_since: Option<SystemTime>,
}

impl CertificateIssuer<'_> {
    /// The CA that signs now: the one that is stored, if it is valid. A new one signs when it is stored.
    fn keep_or_issue_ca(&mut self, desired: &Certificate) -> Result<Option<SigningCa>, Failure> {
        let stored = self.stored.secrets.get(&desired.secret);
        let usable = stored.filter(|stored| {
            stored_ca(stored).is_some_and(|ca| {
                let term = ValidityWindow { lifetime: desired.lifetime, validity: ca.validity };
                // Upstream virt-operator may leave the annotation out. The validity dates of a CA show its duration too.
                let duration = stored.duration.as_ref();
                let fits = duration.map_or(term.matches_lifetime(), |text| *text == desired.lifetime.annotation());
                fits && !term.is_due(None, self.now)
            })
        });
        // Until a successor is stored, a valid CA signs what is due.
        let stored_ca = stored.and_then(stored_ca).filter(|ca| ca.validity.is_acceptable(self.now));
        self.update_bundle(desired, stored);
        let is_retiring = usable.is_none();
        if let (Some(_), Some(ca)) = (usable, stored_ca.as_ref()) {
            self.keep_stored(desired);
            let term = ValidityWindow { lifetime: desired.lifetime, validity: ca.validity };
            self.issued.renew_no_later_than(term.deadline(None));
        } else {
            let ca = CertifiedKey::new_ca(desired, (self.keys)()?, self.now)?;
            let term = ValidityWindow { lifetime: desired.lifetime, validity: ca.validity };
            self.issued.renew_no_later_than(term.deadline(None));
            self.renew(desired, &ca);
        }
        let Some(ca) = stored_ca else { return Ok(None) };
        let trusted_since = self.trusted_since(desired, &ca).map(|since| since + desired.lifetime.propagation());
        let term = ValidityWindow { lifetime: desired.lifetime, validity: ca.validity };
        Ok(Some(SigningCa { certificate: ca, term, is_retiring, trusted_since }))
    }

    /// Since when every bundle contains a CA, as far as is known. Only the CA of the cluster signs certificates.
    fn trusted_since(&mut self, desired: &Certificate, ca: &CertifiedKey) -> Option<SystemTime> {
        if desired.secret != CA || !self.is_in_every_bundle(desired, ca) {
            return None;
        }
        let known = self.stored.trusted_ca.as_ref().filter(|known| known.certificate == ca.certificate);
        let since = known.map_or(self.now, |known| known.since);
        self.issued.trusted_ca = Some(TrustedCa { certificate: ca.certificate.clone(), since });
        Some(since)
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
        match leaf {
            Some(leaf) if is_current(&leaf) => {
                self.keep_stored(desired);
                let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
                self.issued.renew_no_later_than(term.deadline(Some(&signer.term)));
            }
            Some(leaf) if self.awaits_successor(desired, &leaf, signer) => self.keep_stored(desired),
            Some(leaf) if self.awaits_trust(desired, &leaf, signer) => {
                let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
                let again = signer.trusted_since.unwrap_or(self.now + signer.term.lifetime.propagation());
                self.issued.renew_no_later_than(again.min(term.last_renewal()));
                self.keep_stored(desired);
            }
            _ => {
                let leaf = CertifiedKey::new_leaf(desired, (self.keys)()?, &signer.certificate, self.now)?;
                let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
                self.issued.renew_no_later_than(term.deadline(Some(&signer.term)));
                self.renew(desired, &leaf);
            }
        }
        Ok(())
    }

    /// Whether a certificate lasts until the successor of its CA is stored. The next reconcile follows then.
    fn awaits_successor(&self, desired: &Certificate, leaf: &CertifiedKey, signer: &SigningCa) -> bool {
        let term = ValidityWindow { lifetime: desired.lifetime, validity: leaf.validity };
        signer.is_retiring && leaf.is_for(desired) && term.last_renewal() > self.now
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
    fn keep_stored(&mut self, desired: &Certificate) {
        if let Some(stored) = self.stored.secrets.get(&desired.secret) {
            let pair = KeyPair { certificate: stored.certificate.clone(), key: stored.key.clone() };
            self.issued.pairs.insert(desired.secret.clone(), pair);
        }
    }

    fn renew(&mut self, desired: &Certificate, renewed: &CertifiedKey) {
        self.issued.pairs.insert(desired.secret.clone(), renewed.to_pem());
        self.issued.renewed.insert(desired.secret.clone());
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
        let stored_bundle: Vec<TrustedCertificate> = match self.stored.bundles.get(&desired.secret) {
            Some(text) => parse_bundle(text),
            // The bundle is lost. Webhooks and APIServices have copies, with the CAs of users.
            None if desired.secret == CA => {
                let copies = self.stored.trusted_bundles.iter();
                copies.flat_map(|bundle| parse_bundle(&String::from_utf8_lossy(bundle))).collect()
            }
            None => Vec::new(),
        };
        let external =
            (desired.secret == CA).then(|| self.stored.bundles.get(EXTERNAL_CA).cloned().unwrap_or_default());
        let imported = parse_bundle(external.as_deref().unwrap_or_default())
            .into_iter()
            .map(|trusted| TrustedCertificate { origin: Origin::External, ..trusted });

        let bundle = bundle::merge(current, &stored_bundle, imported.collect(), overlap(desired), self.now);
        self.issued.left_out += bundle.left_out;
        if let Some(external) = external {
            // The external bundle is emptied when the stored bundle already contains its CAs, not when they are about
            // to be written. Otherwise a crash between the two writes would lose them. It also stays if not all fit.
            let is_stored =
                |trusted: &TrustedCertificate| trusted.origin == Origin::Own || stored_bundle.contains(trusted);
            let all_stored = bundle.left_out == 0 && bundle.certificates.iter().all(is_stored);
            let external = if all_stored { String::new() } else { external };
            self.issued.bundles.insert(EXTERNAL_CA.to_owned(), external);
        }
        self.issued.bundles.insert(desired.secret.clone(), format_bundle(&bundle.certificates));
        if let Some(next) = bundle.next_removal {
            self.issued.renew_no_later_than(next);
        }
    }
}

/// `None` if a Secret contains no CA that can sign.
fn stored_ca(stored: &StoredSecret) -> Option<CertifiedKey> {
    CertifiedKey::from_secret(stored).filter(CertifiedKey::can_sign)
}

/// How long a CA and its successor are both trusted, counted from when the successor becomes valid.
fn overlap(desired: &Certificate) -> Duration {
    desired.lifetime.renew_before + desired.lifetime.backdating()
}
