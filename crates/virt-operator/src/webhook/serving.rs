//! What the endpoints of this operator are served with: the certificate of the Secret `kubevirt-operator-certs`, on the
//! terms of `spec.configuration.tlsConfiguration`.
//!
//! Every replica serves, whoever leads, so every replica has to be told: `Serving::set` belongs where the caches of the
//! Secret and of the KubeVirt resource change. Until then a certificate that this process signed itself is served, for
//! the kubelet's probes; webhooks are not called before the Secret exists.

use anyhow::Context;
use rcgen::{CertificateParams, DnType, KeyPair};
use vitivirt_api::kubevirt::Tls;
use vitivirt_install::certificates;
use vitivirt_runtime::tls::{Acceptor, ClientCa, ReloadableTls, TlsPolicy, TlsVersion};

const FALLBACK_NAME: &str = "fallback.certificate.kubevirt.io";

#[derive(Clone)]
pub(crate) struct Serving(ReloadableTls);

impl Serving {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let fallback = fallback().context("a certificate to begin with could not be made")?;
        Ok(Self(ReloadableTls::new(&fallback).context("the certificate to begin with cannot be used")?))
    }

    /// What the next connections are served with. Cheap if nothing has changed.
    pub(crate) fn set(&self, pair: Option<&certificates::KeyPair>, tls: Option<&Tls>) {
        let pair = pair.map(|pair| vitivirt_runtime::tls::PemKeyPair {
            certificate: pair.certificate.clone(),
            key: pair.key.clone(),
        });
        self.0.set(pair, terms(tls));
    }

    pub(super) fn set_authority(&self, authority: Option<ClientCa>) {
        self.0.set_client_ca(authority);
    }

    /// For the kubelet and for Prometheus.
    pub(crate) fn metrics(&self) -> Acceptor {
        self.0.acceptor()
    }

    /// For the API server, which may show who it is.
    pub(super) fn webhooks(&self) -> Acceptor {
        self.0.acceptor_with_client_auth()
    }
}

/// TLS 1.0 and 1.1 cannot be spoken here: what allows them is served with 1.2 and 1.3.
pub(super) fn terms(tls: Option<&Tls>) -> TlsPolicy {
    let Some(tls) = tls else { return TlsPolicy::default() };
    TlsPolicy {
        min_version: if tls.min_tls_version == "VersionTLS13" { TlsVersion::Tls13 } else { TlsVersion::Tls12 },
        suites: tls.ciphers.clone().unwrap_or_default(),
    }
}

fn fallback() -> Result<vitivirt_runtime::tls::PemKeyPair, rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut parameters = CertificateParams::new([FALLBACK_NAME.to_owned()])?;
    parameters.distinguished_name.push(DnType::CommonName, FALLBACK_NAME);
    let certificate = parameters.self_signed(&key)?;
    Ok(vitivirt_runtime::tls::PemKeyPair {
        certificate: certificate.pem().into_bytes(),
        key: key.serialize_pem().into_bytes(),
    })
}

/// What was asked for and is not done by these endpoints themselves, though it is by KubeVirt's components.
pub(super) fn shortcomings(tls: &Tls) -> Vec<String> {
    let old = matches!(tls.min_tls_version.as_str(), "VersionTLS10" | "VersionTLS11");
    let version = old.then(|| {
        format!("virt-operator's own endpoints speak TLS 1.2 and 1.3 only, although {} is allowed", tls.min_tls_version)
    });
    let terms = terms(Some(tls));
    let suites = terms.unsupported_suites();
    let suites =
        (!suites.is_empty()).then(|| format!("virt-operator's own endpoints do not offer {}", suites.join(", ")));
    version.into_iter().chain(suites).collect()
}
