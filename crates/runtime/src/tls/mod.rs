//! TLS for servers whose certificate, policy and client CA change while they run.
//!
//! A [`ReloadableTls`] holds the configuration of the next connections. A change needs no restart: open connections
//! keep their configuration, and new connections get the current one. An invalid certificate or CA is logged and
//! changes nothing, so that a damaged Secret does not stop a working server.

mod client_ca;
mod mounted;
mod policy;
mod self_signed;
mod served;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::NoServerSessionStorage,
    sign::{CertifiedKey, SingleCertAndKey},
};

pub use self::{
    client_ca::ClientCa,
    mounted::{MountedCertificate, MountedCertificateError},
    policy::{TlsPolicy, TlsVersion},
    served::served_certificate,
};

/// Webhooks and metrics are short responses to few clients: HTTP/2 would gain nothing, and its known attacks do not
/// apply.
const PROTOCOL: &[u8] = b"http/1.1";

/// A certificate with its chain, and its key, in PEM. It has no `Debug`, because it contains a private key.
#[derive(Clone, PartialEq, Eq)]
pub struct PemKeyPair {
    pub certificate: Vec<u8>,
    pub key: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("no valid certificate in PEM format")]
    NoCertificate,
    #[error("no valid private key in PEM format")]
    NoKey,
    #[error("no valid CA certificate in PEM format")]
    NoCa,
    #[error("cannot create a self-signed certificate: {0}")]
    SelfSigned(String),
    #[error(transparent)]
    Unusable(#[from] rustls::Error),
    #[error(transparent)]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

/// A handle to the TLS configuration of new connections. Clones share it.
#[derive(Clone)]
pub struct ReloadableTls(Arc<SharedTls>);

struct SharedTls {
    inputs: Mutex<TlsInputs>,
    configs: RwLock<TlsConfigs>,
}

/// The values that were set last, valid or not. Setting the same values again has no effect.
#[derive(Default)]
struct TlsInputs {
    pair: Option<PemKeyPair>,
    policy: TlsPolicy,
    ca: Option<ClientCa>,
    /// The last valid pair.
    key: Option<Arc<CertifiedKey>>,
}

struct TlsConfigs {
    no_client_auth: Arc<ServerConfig>,
    /// Requests a client certificate, and verifies it if the client sends one.
    optional_client_auth: Arc<ServerConfig>,
}

/// The TLS configuration of one listener.
#[derive(Clone)]
pub struct Acceptor {
    tls: ReloadableTls,
    client_auth: bool,
}

impl Acceptor {
    /// The configuration for a connection that begins now.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        let configs = self.tls.0.configs.read();
        if self.client_auth { configs.optional_client_auth.clone() } else { configs.no_client_auth.clone() }
    }
}

impl ReloadableTls {
    /// Serves with `fallback` until a certificate is set.
    pub fn new(fallback: &PemKeyPair) -> Result<Self, TlsError> {
        let inputs = TlsInputs { key: Some(Arc::new(certified_key(fallback)?)), ..TlsInputs::default() };
        let configs = inputs.build_configs()?;
        Ok(Self(Arc::new(SharedTls { inputs: Mutex::new(inputs), configs: RwLock::new(configs) })))
    }

    /// Sets the certificate and the policy of new connections. `None` keeps the last valid certificate: a deleted
    /// Secret is created again soon.
    pub fn set(&self, pair: Option<PemKeyPair>, policy: TlsPolicy) {
        let mut inputs = self.0.inputs.lock();
        let (new_pair, new_policy) = (pair.is_some() && pair != inputs.pair, policy != inputs.policy);
        if let Some(pair) = pair.filter(|_| new_pair) {
            match certified_key(&pair) {
                Ok(key) => {
                    inputs.key = Some(Arc::new(key));
                    tracing::info!("serving with a new certificate");
                }
                Err(error) => {
                    tracing::warn!(error = %error, "invalid new certificate, keeping the previous one");
                }
            }
            inputs.pair = Some(pair);
        }
        if new_policy {
            policy.warn_unsupported();
            inputs.policy = policy;
        }
        if new_pair || new_policy {
            self.rebuild(&inputs);
        }
    }

    /// Sets the CA of client certificates. With `None` the server requests no client certificate.
    pub fn set_client_ca(&self, ca: Option<ClientCa>) {
        let mut inputs = self.0.inputs.lock();
        if inputs.ca != ca {
            inputs.ca = ca;
            self.rebuild(&inputs);
        }
    }

    /// For a listener that requests no client certificate.
    pub fn acceptor(&self) -> Acceptor {
        Acceptor { tls: self.clone(), client_auth: false }
    }

    /// For a listener that accepts clients without a certificate, and clients with a valid one.
    pub fn acceptor_with_client_auth(&self) -> Acceptor {
        Acceptor { tls: self.clone(), client_auth: true }
    }

    /// Whether new connections get this certificate.
    #[cfg(test)]
    fn serves(&self, pair: &PemKeyPair) -> bool {
        let inputs = self.0.inputs.lock();
        let key = certified_key(pair).unwrap();
        inputs.key.as_ref().is_some_and(|serving| serving.cert == key.cert)
    }

    fn rebuild(&self, inputs: &TlsInputs) {
        match inputs.build_configs() {
            Ok(configs) => *self.0.configs.write() = configs,
            Err(error) => tracing::warn!(error = %error, "invalid TLS settings, keeping the previous ones"),
        }
    }
}

impl TlsInputs {
    fn build_configs(&self) -> Result<TlsConfigs, TlsError> {
        let no_client_auth = self.server_config(None)?;
        let optional_client_auth = match self.ca.as_ref() {
            None => no_client_auth.clone(),
            Some(ca) => match self.server_config(Some(ca)) {
                Ok(config) => config,
                Err(error) => {
                    tracing::warn!(error = %error, "invalid client CA, not requesting client certificates");
                    no_client_auth.clone()
                }
            },
        };
        Ok(TlsConfigs { no_client_auth, optional_client_auth })
    }

    fn server_config(&self, client_ca: Option<&ClientCa>) -> Result<Arc<ServerConfig>, TlsError> {
        let key = self.key.clone().ok_or(TlsError::NoCertificate)?;
        let provider = self.policy.provider();
        let builder =
            ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&self.policy.versions())?;
        let builder = match client_ca {
            Some(ca) => builder.with_client_cert_verifier(ca.verifier(provider)?),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        // A resumed session would keep the policy that was in force when it began.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

fn certified_key(pair: &PemKeyPair) -> Result<CertifiedKey, TlsError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pair.certificate).collect();
    let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or(TlsError::NoCertificate)?;
    let key = PrivateKeyDer::from_pem_slice(&pair.key).map_err(|_| TlsError::NoKey)?;
    Ok(CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider())?)
}
