//! What is held and still good is kept; what is missing, unreadable, due, for something else, of another duration or
//! not signed by the current authority is issued.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use vitivirt_api::Failure;
use vitivirt_install::{
    INVALID_DURATION,
    certificates::{
        CA, Certificate, EXTERNAL_CA, KeyPair, MIN_LIFETIME, Usage, ValidityWindow,
        bundle::{self, Origin, Trusted},
    },
};

use super::{
    Held, Holdings, Issue, Key, NOT_ISSUED,
    bundle::{read, write},
    x509::{self, Pair},
};

/// Keys are taken one by one, as certificates are issued; their order is that of the certificates.
pub(crate) fn issue(
    wanted: &[Certificate],
    held: &dyn Holdings,
    now: SystemTime,
    keys: &mut dyn FnMut() -> Result<Key, Failure>,
) -> Result<Issue, Failure> {
    let mut issuing = Issuing { held, now, keys, issue: Issue::default() };
    let mut authorities = BTreeMap::new();
    for certificate in wanted {
        long_enough(certificate)?;
        if certificate.usage == Usage::Ca {
            authorities.insert(certificate.secret.as_str(), issuing.ca(certificate)?);
        }
    }
    for certificate in wanted.iter().filter(|certificate| certificate.usage != Usage::Ca) {
        let signer = certificate.signer.and_then(|signer| authorities.get(signer)).ok_or_else(|| {
            Failure::bug(NOT_ISSUED, format!("there is no authority that signs {}", certificate.secret))
        })?;
        issuing.leaf(certificate, signer)?;
    }
    Ok(issuing.issue)
}

fn long_enough(certificate: &Certificate) -> Result<(), Failure> {
    if certificate.lifetime.duration >= MIN_LIFETIME {
        return Ok(());
    }
    let kind = if certificate.usage == Usage::Ca { "ca" } else { "server" };
    let message = format!(
        "spec.certificateRotateStrategy.selfSigned.{kind}.duration must be at least {}s: \
         a certificate that ends earlier is never in use",
        MIN_LIFETIME.as_secs()
    );
    Err(Failure::invalid(INVALID_DURATION, message))
}

struct Issuing<'a> {
    held: &'a dyn Holdings,
    now: SystemTime,
    keys: &'a mut dyn FnMut() -> Result<Key, Failure>,
    issue: Issue,
}

struct Ca {
    pair: Pair,
    term: ValidityWindow,
}

impl Issuing<'_> {
    fn ca(&mut self, wanted: &Certificate) -> Result<Ca, Failure> {
        let held = self.held.secret(&wanted.secret);
        let good = held.as_ref().and_then(|held| {
            let pair = Pair::read(held).filter(Pair::can_sign)?;
            let term = ValidityWindow { lifetime: wanted.lifetime, validity: pair.validity };
            // Without the annotation, as the reference can leave it, the dates say the same.
            let fits =
                held.duration.as_ref().map_or(term.matches_lifetime(), |text| *text == wanted.lifetime.annotation());
            (fits && !term.is_due(None, self.now)).then_some(pair)
        });
        let pair = match good {
            Some(pair) => self.keep(wanted, pair, held.as_ref()),
            None => {
                let pair = Pair::ca(wanted, (self.keys)()?, self.now)?;
                self.renew(wanted, pair)
            }
        };
        let term = ValidityWindow { lifetime: wanted.lifetime, validity: pair.validity };
        self.issue.wake_at(term.deadline(None));
        self.bundle(wanted, &pair, held.as_ref());
        Ok(Ca { pair, term })
    }

    fn leaf(&mut self, wanted: &Certificate, signer: &Ca) -> Result<(), Failure> {
        let held = self.held.secret(&wanted.secret);
        let good = held.as_ref().and_then(|held| {
            let pair = Pair::read(held)?;
            let term = ValidityWindow { lifetime: wanted.lifetime, validity: pair.validity };
            let fits = held.duration.as_deref() == Some(&wanted.lifetime.annotation());
            let sound = fits && pair.is_for(wanted) && pair.is_signed_by(&signer.pair);
            (sound && !term.is_due(Some(&signer.term), self.now)).then_some(pair)
        });
        let pair = match good {
            Some(pair) => self.keep(wanted, pair, held.as_ref()),
            None => {
                let pair = Pair::leaf(wanted, (self.keys)()?, &signer.pair, self.now)?;
                self.renew(wanted, pair)
            }
        };
        let term = ValidityWindow { lifetime: wanted.lifetime, validity: pair.validity };
        self.issue.wake_at(term.deadline(Some(&signer.term)));
        Ok(())
    }

    /// To the byte, whoever wrote it.
    fn keep(&mut self, wanted: &Certificate, pair: Pair, held: Option<&Held>) -> Pair {
        let same = |held: &Held| KeyPair { certificate: held.certificate.clone(), key: held.key.clone() };
        self.issue.pairs.insert(wanted.secret.clone(), held.map_or_else(|| pair.to_pem(), same));
        pair
    }

    fn renew(&mut self, wanted: &Certificate, pair: Pair) -> Pair {
        self.issue.pairs.insert(wanted.secret.clone(), pair.to_pem());
        self.issue.renewed.insert(wanted.secret.clone());
        pair
    }

    /// The bundle has the name of the authority's Secret. An authority that is being replaced is trusted on, even where
    /// the bundle has lost it: what it signed is in use.
    fn bundle(&mut self, wanted: &Certificate, current: &Pair, held: Option<&Held>) {
        let before = self.held.bundle(&wanted.secret).map(|text| read(&text)).unwrap_or_default();
        let trusted = |certificate, validity| Trusted { certificate, validity, origin: Origin::Own };
        let previous = held.and_then(|held| {
            let certificate = x509::first_certificate(&held.certificate)?;
            let parsed = x509::parse(&certificate).filter(x509::is_authority)?;
            let validity = x509::validity(&parsed)?;
            Some(trusted(certificate, validity))
        });
        let external = (wanted.secret == CA).then(|| self.held.bundle(EXTERNAL_CA).unwrap_or_default());
        let brought = read(external.as_deref().unwrap_or_default())
            .into_iter()
            .map(|trusted| Trusted { origin: Origin::External, ..trusted });

        let others = before.iter().cloned().chain(previous).chain(brought).collect();
        let current = trusted(current.certificate.clone(), current.validity);
        let bundle = bundle::merge(current, others, overlap(wanted), self.now);
        if let Some(external) = external {
            // It is blanked when what it brought is in the bundle of the cluster, not when that is about to be
            // written: otherwise a crash between the two writes would lose it.
            let taken = |trusted: &Trusted| trusted.origin == Origin::Own || before.contains(trusted);
            let all_taken = bundle.certificates.iter().all(taken);
            self.issue.bundles.insert(EXTERNAL_CA.to_owned(), if all_taken { String::new() } else { external });
        }
        self.issue.bundles.insert(wanted.secret.clone(), write(&bundle.certificates));
        if let Some(next) = bundle.next {
            self.issue.wake_at(next);
        }
    }
}

/// How long both an authority and its successor are trusted.
fn overlap(wanted: &Certificate) -> Duration {
    wanted.lifetime.renew_before
}
