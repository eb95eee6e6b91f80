//! The TLS configurations for clients and for the API server. They set the crypto provider explicitly, because the
//! default of the process belongs to the program.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};

pub(crate) fn server(certificate: &str, key: &str) -> anyhow::Result<Arc<ServerConfig>> {
    let chain = certificates(certificate).context("the fault proxy's certificate")?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).context("the fault proxy's key")?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .context("TLS versions")?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .context("the fault proxy's certificate and key")?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

pub(super) fn client(ca: &str) -> anyhow::Result<Arc<ClientConfig>> {
    let roots = roots(ca).context("the API server's CA")?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .context("TLS versions")?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// The certificates of a PEM text, as trusted CAs.
pub(crate) fn roots(ca: &str) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(ca)? {
        roots.add(certificate).context("the certificate cannot be a CA")?;
    }
    Ok(roots)
}

pub(super) fn server_name(name: &str) -> anyhow::Result<ServerName<'static>> {
    ServerName::try_from(name.to_owned()).with_context(|| format!("invalid server name {name:?}"))
}

fn certificates(pem: &str) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>()?;
    ensure!(!certificates.is_empty(), "no certificate in the PEM text");
    Ok(certificates)
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}
