//! The fixture of these tests: the desired certificates, the stored ones and the current time.

mod bundles;
mod contents;
mod handshake;
mod next_renewal;
mod renewal;
mod reuse;
mod served;
mod upstream;

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use vitivirt_api::kubevirt::{CertificateLifetime, SelfSigned};
use vitivirt_install::{
    DeploymentConfig,
    certificates::{
        BACKUP_CA, CA, Certificate, EXPORT_CA, EXTERNAL_CA, IssuedCertificates, Lifetimes, Usage, certificates,
    },
};

use super::{
    CertificateSet, Key, StoredCertificates, StoredSecret, issue_certificates,
    x509::{self, CertifiedKey},
};

const HOUR: Duration = Duration::from_secs(3600);
/// With the default lifetimes.
const PROPAGATION: Duration = Duration::from_secs(60);

struct CertificateFixture {
    desired: Vec<Certificate>,
    stored: StoredCertificates,
    now: SystemTime,
}

impl CertificateFixture {
    /// Nothing is stored yet. Every possible certificate is desired, with the default lifetimes: a week for a CA and a
    /// day for a leaf.
    fn new() -> Self {
        Self { desired: desired_certificates(None), stored: StoredCertificates::default(), now: at(1_800_000_000) }
    }

    /// Every certificate was issued and is stored.
    fn installed() -> Self {
        let mut fixture = Self::new();
        fixture.settle();
        fixture
    }

    /// Issues and stores until nothing changes, as reconciles that follow each other do. Returns what was renewed.
    fn settle(&mut self) -> BTreeSet<String> {
        let mut renewed = BTreeSet::new();
        loop {
            let before = self.stored.bundles.clone();
            let issued = self.issue_and_store();
            if issued.renewed.is_empty() && before == self.stored.bundles {
                return renewed;
            }
            renewed.extend(issued.renewed);
        }
    }

    /// As `settle`, at the time from which a new CA signs.
    fn settle_after_propagation(&mut self) -> BTreeSet<String> {
        let mut renewed = self.settle();
        self.now += PROPAGATION;
        renewed.extend(self.settle());
        renewed
    }

    fn issue(&self) -> CertificateSet {
        issue_certificates(&self.desired, &self.stored, self.now, &mut Key::generate).unwrap()
    }

    /// Issues the certificates and stores all of them, as the cluster does after the operator has written them.
    fn issue_and_store(&mut self) -> CertificateSet {
        let issued = self.issue();
        for certificate in &self.desired {
            let Some(pair) = issued.key_pair(&certificate.secret) else { continue };
            let duration = Some(certificate.lifetime.annotation());
            let secret = StoredSecret { certificate: pair.certificate, key: pair.key, duration };
            self.stored.secrets.insert(certificate.secret.clone(), secret);
        }
        self.stored.trusted_ca.clone_from(&issued.trusted_ca);
        for name in [CA, EXPORT_CA, BACKUP_CA, EXTERNAL_CA] {
            self.stored.bundles.extend(issued.bundle(name).map(|bundle| (name.to_owned(), bundle)));
        }
        issued
    }

    fn secret_mut(&mut self, secret: &str) -> &mut StoredSecret {
        self.stored.secrets.get_mut(secret).unwrap()
    }

    fn leaf_secrets(&self) -> BTreeSet<String> {
        let leaves = self.desired.iter().filter(|certificate| certificate.usage != Usage::Ca);
        leaves.map(|certificate| certificate.secret.clone()).collect()
    }
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn desired_certificates(settings: Option<&SelfSigned>) -> Vec<Certificate> {
    let config = DeploymentConfig {
        namespace: "kubevirt".to_owned(),
        additional_properties: [("VirtTemplateDeploymentEnabled".to_owned(), String::new())].into(),
        ..DeploymentConfig::default()
    };
    certificates(&config, &Lifetimes::new(settings).unwrap())
}

fn lifetime(duration: &str, renew_before: Option<&str>) -> Option<CertificateLifetime> {
    Some(CertificateLifetime {
        duration: Some(duration.to_owned()),
        renew_before: renew_before.map(str::to_owned),
        ..CertificateLifetime::default()
    })
}

fn names<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

/// The certificate of a CA that this operator did not issue.
fn foreign_ca(name: &str, from: SystemTime, duration: Duration) -> String {
    let mut ca = CertificateFixture::new().desired.remove(0);
    ca.common_name = name.to_owned();
    ca.lifetime.duration = duration;
    let pair = CertifiedKey::new_ca(&ca, Key::generate().unwrap(), from).unwrap();
    text(pair.to_pem().certificate)
}

fn key_of(stored: &StoredSecret) -> Key {
    let certificate = x509::first_certificate(&stored.certificate).unwrap();
    Key::from_pem(&stored.key, &x509::parse(&certificate).unwrap().public_key().subject_public_key.data).unwrap()
}
