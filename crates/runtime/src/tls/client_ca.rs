//! The verification of client certificates: a CA must have signed them, for one of the allowed names. A client without
//! a certificate is accepted.

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use super::TlsError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCa {
    /// CA certificates in PEM.
    pub bundle: String,
    /// The allowed common names of clients. Empty: any.
    pub names: Vec<String>,
}

impl ClientCa {
    pub(super) fn verifier(&self, provider: Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
        let mut roots = RootCertStore::empty();
        let certificates = CertificateDer::pem_slice_iter(self.bundle.as_bytes()).filter_map(Result::ok);
        if roots.add_parsable_certificates(certificates).0 == 0 {
            return Err(TlsError::NoCa);
        }
        let chain =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).allow_unauthenticated().build()?;
        Ok(Arc::new(NameVerifier { chain, names: self.names.clone() }))
    }
}

/// Checks the common name in addition to the certificate chain.
#[derive(Debug)]
struct NameVerifier {
    chain: Arc<dyn ClientCertVerifier>,
    names: Vec<String>,
}

impl ClientCertVerifier for NameVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.chain.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(certificate, intermediates, now)?;
        if self.names.is_empty() || common_name(certificate).is_some_and(|name| self.names.contains(&name)) {
            return Ok(verified);
        }
        Err(CertificateError::ApplicationVerificationFailure.into())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    // As in Go, the last one of several common names counts.
    certificate.subject().iter_common_name().last()?.as_str().ok().map(ToOwned::to_owned)
}
