//! A readiness probe: one HTTP GET, over TLS without checking the certificate, as a kubelet does it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use http_body_util::Empty;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

const TIMEOUT: Duration = Duration::from_secs(2);

/// What a container's readiness probe asks; none if it has no HTTP probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    tls: bool,
    port: u16,
    path: String,
}

impl Probe {
    pub(crate) fn of(container: &Container) -> Option<Self> {
        let get = container.readiness_probe.as_ref()?.http_get.as_ref()?;
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
        })
    }

    pub(crate) async fn succeeds(&self, address: IpAddr) -> bool {
        matches!(tokio::time::timeout(TIMEOUT, self.ask(address)).await, Ok(Ok(status)) if (200..400).contains(&status))
    }

    async fn ask(&self, address: IpAddr) -> Result<u16> {
        let stream = TcpStream::connect(SocketAddr::new(address, self.port)).await?;
        if self.tls {
            let connector = tokio_rustls::TlsConnector::from(Arc::new(trusting_config()?));
            self.exchange(address, connector.connect(ServerName::from(address), stream).await?).await
        } else {
            self.exchange(address, stream).await
        }
    }

    async fn exchange(
        &self,
        address: IpAddr,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> Result<u16> {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(connection);
        let request = http::Request::get(&self.path)
            .header(http::header::HOST, address.to_string())
            .body(Empty::<bytes::Bytes>::new())
            .context("building a probe")?;
        let answer = sender.send_request(request).await;
        driver.abort();
        match answer {
            Ok(answer) => Ok(answer.status().as_u16()),
            Err(error) => bail!("{error}"),
        }
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

/// Only for probes inside the lab: a kubelet does not check the certificate of what it probes either.
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
