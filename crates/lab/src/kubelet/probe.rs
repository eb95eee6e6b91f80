//! Readiness probes: one HTTP GET, over TLS without checking the certificate as the kubelet does, and the readiness of
//! a container after several of them.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use k8s_openapi::{api::core::v1::Container, apimachinery::pkg::util::intstr::IntOrString};
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::{net::TcpStream, time::Instant};

use crate::http_get;

const TIMEOUT: Duration = Duration::from_secs(2);

/// A container's HTTP readiness probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    tls: bool,
    port: u16,
    path: String,
    pub(crate) failure_threshold: u32,
}

/// Kubernetes' default.
const FAILURE_THRESHOLD: u32 = 3;

impl Probe {
    pub(crate) fn from_container(container: &Container) -> Option<Self> {
        let probe = container.readiness_probe.as_ref()?;
        let get = probe.http_get.as_ref()?;
        let port = match &get.port {
            IntOrString::Int(port) => *port,
            IntOrString::String(name) => {
                container.ports.iter().flatten().find(|port| port.name.as_ref() == Some(name))?.container_port
            }
        };
        Some(Probe {
            tls: get.scheme.as_deref() == Some("HTTPS"),
            port: u16::try_from(port).ok()?,
            path: get.path.clone().unwrap_or_else(|| "/".to_owned()),
            failure_threshold: probe
                .failure_threshold
                .and_then(|threshold| u32::try_from(threshold).ok())
                .unwrap_or(FAILURE_THRESHOLD),
        })
    }

    pub(crate) async fn succeeds(&self, address: IpAddr) -> bool {
        matches!(tokio::time::timeout(TIMEOUT, self.request(address)).await, Ok(Ok(status)) if (200..400).contains(&status))
    }

    async fn request(&self, address: IpAddr) -> Result<u16> {
        let stream = TcpStream::connect(SocketAddr::new(address, self.port)).await?;
        let response = if self.tls {
            get_over_tls(stream, address, &self.path, None).await?
        } else {
            http_get::get(stream, address, &self.path).await?
        };
        Ok(response.status())
    }
}

pub(crate) async fn get_over_tls(
    stream: TcpStream,
    host: IpAddr,
    path: &str,
    token: Option<&str>,
) -> Result<http_get::GetResponse> {
    let connector = tokio_rustls::TlsConnector::from(Arc::new(trusting_config()?));
    let stream = connector.connect(ServerName::from(host), stream).await.context("TLS handshake")?;
    http_get::get_with_token(stream, host, path, token).await
}

/// Whether a probed container is ready: from the first success until several consecutive failures.
#[derive(Debug)]
pub(crate) struct Readiness {
    ready: bool,
    failures: u32,
    due: Instant,
    /// Until this time or the first success, the container counts as ready in spite of failures.
    presumed_until: Option<Instant>,
}

const WHEN_READY: Duration = Duration::from_secs(3);
const WHEN_FAILING: Duration = Duration::from_secs(1);
const WHEN_NOT_READY: Duration = Duration::from_millis(150);

impl Default for Readiness {
    fn default() -> Self {
        Readiness { ready: false, failures: 0, due: Instant::now(), presumed_until: None }
    }
}

/// A process that does not listen after this time is not ready.
const PRESUMED: Duration = Duration::from_secs(15);

impl Readiness {
    /// The readiness of a container that was reported ready before its process started.
    pub(crate) fn presumed() -> Self {
        Readiness { presumed_until: Some(Instant::now() + PRESUMED), ..Readiness::default() }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready || self.presumed_until.is_some_and(|until| Instant::now() < until)
    }

    /// Probes have their own interval: checking a pod for another reason must not count failures faster.
    pub(crate) fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }

    pub(crate) fn until_due(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }

    pub(crate) fn record(&mut self, succeeded: bool, failure_threshold: u32) {
        if succeeded {
            self.presumed_until = None;
        }
        self.failures = if succeeded { 0 } else { self.failures.saturating_add(1) };
        self.ready = succeeded || (self.ready && self.failures < failure_threshold);
        let pause = match (self.ready, succeeded) {
            (true, true) => WHEN_READY,
            (true, false) => WHEN_FAILING,
            (false, _) => WHEN_NOT_READY,
        };
        self.due = Instant::now() + pause;
    }
}

fn trusting_config() -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .context("choosing TLS versions")?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(TrustAnything(provider)))
        .with_no_client_auth())
}

/// Only for probes inside the lab. The kubelet does not check the certificate of a probed container either.
#[derive(Debug)]
struct TrustAnything(Arc<CryptoProvider>);

impl ServerCertVerifier for TrustAnything {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_does_not_make_a_ready_container_unready() {
        let mut readiness = Readiness::default();
        let seen: Vec<bool> = [false, true, false, false, true, false, false, false, false, true]
            .into_iter()
            .map(|succeeded| {
                readiness.record(succeeded, FAILURE_THRESHOLD);
                readiness.is_ready()
            })
            .collect();
        assert_eq!(seen, [false, true, true, true, true, true, true, false, false, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_presumed_container_is_ready_until_it_is_late() {
        let mut readiness = Readiness::presumed();
        for _ in 0..=FAILURE_THRESHOLD {
            readiness.record(false, FAILURE_THRESHOLD);
        }
        assert!(readiness.is_ready());
        tokio::time::advance(PRESUMED).await;
        assert!(!readiness.is_ready());
        let mut readiness = Readiness::presumed();
        readiness.record(true, 1);
        readiness.record(false, 1);
        assert!(!readiness.is_ready(), "after a success, failures count");
    }

    #[test]
    fn a_probe_sets_the_failure_threshold() {
        let container = |threshold: Option<i32>| -> Container {
            serde_json::from_value(serde_json::json!({
                "name": "x",
                "readinessProbe": {"httpGet": {"port": 8443}, "failureThreshold": threshold},
            }))
            .unwrap()
        };
        assert_eq!(Probe::from_container(&container(None)).unwrap().failure_threshold, 3);
        assert_eq!(Probe::from_container(&container(Some(1))).unwrap().failure_threshold, 1);
    }
}
