//! TLS of this operator's endpoints: the certificate in the Secret `kubevirt-operator-certs`, with the settings in
//! `spec.configuration.tlsConfiguration`.
//!
//! Every replica serves these endpoints, also those that do not lead. Therefore every replica calls `ServerTls::set`
//! when its cache of the Secret or of the KubeVirt resource changes. Before the first call the endpoints have a
//! self-signed certificate, which is enough for the kubelet's probes. The API server does not call the webhooks before
//! the Secret exists.

use anyhow::Context;
use vitivirt_api::kubevirt::Tls;
use vitivirt_install::certificates;
use vitivirt_runtime::tls::{Acceptor, ClientCa, PemKeyPair, ReloadableTls, TlsPolicy, TlsVersion};

const FALLBACK_NAME: &str = "fallback.certificate.kubevirt.io";

#[derive(Clone)]
pub(crate) struct ServerTls(ReloadableTls);

impl ServerTls {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let fallback = PemKeyPair::self_signed(FALLBACK_NAME)?;
        Ok(Self(ReloadableTls::new(&fallback).context("self-signed fallback certificate cannot be used")?))
    }

    /// Sets the certificate and the TLS settings of new connections. The call is cheap if nothing has changed.
    pub(crate) fn set(&self, pair: Option<&certificates::KeyPair>, tls: Option<&Tls>) {
        let pair = pair.map(|pair| PemKeyPair { certificate: pair.certificate.clone(), key: pair.key.clone() });
        self.0.set(pair, tls_policy(tls));
    }

    /// Sets the CA that verifies client certificates.
    pub(super) fn set_client_ca(&self, client_ca: ClientCa) {
        self.0.set_client_ca(Some(client_ca));
    }

    /// The acceptor for the kubelet and Prometheus.
    pub(crate) fn metrics(&self) -> Acceptor {
        self.0.acceptor()
    }

    /// The acceptor for the API server. It asks for a client certificate and does not require one.
    pub(super) fn webhooks(&self) -> Acceptor {
        self.0.acceptor_with_client_auth()
    }
}

/// The server does not support TLS 1.0 and 1.1. If they are allowed, it serves TLS 1.2 and 1.3.
pub(super) fn tls_policy(tls: Option<&Tls>) -> TlsPolicy {
    let Some(tls) = tls else { return TlsPolicy::default() };
    TlsPolicy {
        min_version: if tls.min_tls_version == "VersionTLS13" { TlsVersion::Tls13 } else { TlsVersion::Tls12 },
        suites: tls.ciphers.clone().unwrap_or_default(),
    }
}

/// Warnings about TLS settings that KubeVirt's components support and this operator's endpoints do not.
pub(super) fn unsupported_tls_settings(tls: &Tls) -> Vec<String> {
    let old = matches!(tls.min_tls_version.as_str(), "VersionTLS10" | "VersionTLS11");
    let version = old.then(|| {
        let version = &tls.min_tls_version;
        format!("virt-operator's endpoints support only TLS 1.2 and 1.3, although minTLSVersion is {version}")
    });
    let policy = tls_policy(Some(tls));
    let suites = policy.unsupported_suites();
    let suites =
        (!suites.is_empty()).then(|| format!("virt-operator's endpoints do not support {}", suites.join(", ")));
    version.into_iter().chain(suites).collect()
}
