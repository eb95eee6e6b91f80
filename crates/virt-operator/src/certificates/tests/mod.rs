//! One world for all: what is wanted, what the cluster holds and what time it is.

mod bundles;
mod handshake;
mod kept;
mod reference;
mod renewed;
mod shape;
mod time;

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

use super::{Held, Holding, Issue, Key, issue, x509};

const HOUR: Duration = Duration::from_secs(3600);

struct World {
    wanted: Vec<Certificate>,
    holding: Holding,
    now: SystemTime,
}

impl World {
    /// Nothing is installed yet, and all there can be is wanted, with the usual lifetimes: a week and a day.
    fn new() -> Self {
        Self { wanted: wanted(None), holding: Holding::default(), now: at(1_800_000_000) }
    }

    /// Everything has been issued and is held.
    fn installed() -> Self {
        let mut world = Self::new();
        world.settle();
        world
    }

    fn issue(&self) -> Issue {
        issue(&self.wanted, &self.holding, self.now, &mut Key::generate).unwrap()
    }

    /// Issues, and holds what was issued as the cluster does after all of it is written.
    fn settle(&mut self) -> Issue {
        let issue = self.issue();
        for certificate in &self.wanted {
            let pair = issue.key_pair(&certificate.secret).unwrap();
            let duration = Some(certificate.lifetime.annotation());
            let held = Held { certificate: pair.certificate, key: pair.key, duration };
            self.holding.secrets.insert(certificate.secret.clone(), held);
        }
        for name in [CA, EXPORT_CA, BACKUP_CA, EXTERNAL_CA] {
            self.holding.bundles.extend(issue.bundle(name).map(|bundle| (name.to_owned(), bundle)));
        }
        issue
    }

    fn held(&mut self, secret: &str) -> &mut Held {
        self.holding.secrets.get_mut(secret).unwrap()
    }

    fn leaves(&self) -> BTreeSet<String> {
        let leaves = self.wanted.iter().filter(|certificate| certificate.usage != Usage::Ca);
        leaves.map(|certificate| certificate.secret.clone()).collect()
    }
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn wanted(settings: Option<&SelfSigned>) -> Vec<Certificate> {
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

/// An authority of somebody else.
fn foreign(name: &str, from: SystemTime, duration: Duration) -> String {
    let mut ca = World::new().wanted.remove(0);
    ca.common_name = name.to_owned();
    ca.lifetime.duration = duration;
    let pair = x509::Pair::ca(&ca, Key::generate().unwrap(), from).unwrap();
    text(pair.to_pem().certificate)
}

fn key_of(held: &Held) -> Key {
    let certificate = x509::first_certificate(&held.certificate).unwrap();
    Key::read(&held.key, &x509::parse(&certificate).unwrap().public_key().subject_public_key.data).unwrap()
}
