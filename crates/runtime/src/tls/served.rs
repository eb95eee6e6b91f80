//! Reads the certificate that a server presents, without checking it and without a request.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;

/// The first certificate that the server at `address` presents, in DER. `None` if it presents none within `limit`.
pub async fn served_certificate(address: SocketAddr, limit: Duration) -> Option<Vec<u8>> {
    let recorder = Arc::new(CertificateRecorder::default());
    let provider = recorder.provider.clone();
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().ok()?;
    let builder = builder.dangerous().with_custom_certificate_verifier(recorder.clone());
    let connector = TlsConnector::from(Arc::new(builder.with_no_client_auth()));
    // A server that requires a client certificate fails the handshake after it has presented its own.
    let _ = timeout(limit, async {
        let stream = TcpStream::connect(address).await?;
        connector.connect(ServerName::from(address.ip()), stream).await
    })
    .await;
    recorder.certificate.lock().take()
}

/// Accepts every certificate and records it. Nothing is sent over these connections.
#[derive(Debug)]
struct CertificateRecorder {
    provider: Arc<CryptoProvider>,
    certificate: Mutex<Option<Vec<u8>>>,
}

impl Default for CertificateRecorder {
    fn default() -> Self {
        Self { provider: Arc::new(ring::default_provider()), certificate: Mutex::default() }
    }
}

impl ServerCertVerifier for CertificateRecorder {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        *self.certificate.lock() = Some(certificate.to_vec());
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
