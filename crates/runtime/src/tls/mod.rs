//! The certificate that a program serves with, and the terms on which it does. Both change while it runs.
//!
//! A `Cell` holds what the next connection will be served with. Whoever learns of a certificate, of other terms or of
//! another authority for clients sets it, and nothing has to be restarted: a connection that is open keeps what it began
//! with, the next one gets what is set. What cannot be used is logged and changes nothing, so that a damaged Secret does
//! not stop a server that works.

mod clients;
mod terms;
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
    clients::ClientCa,
    terms::{Terms, Version},
};

/// Webhooks and metrics are short answers to few clients: nothing is gained by HTTP/2, and nothing is lost to its abuse.
const PROTOCOL: &[u8] = b"http/1.1";

/// A certificate with its chain, and its key, in PEM. It has no `Debug`, because it holds a key.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyPair {
    pub certificate: Vec<u8>,
    pub key: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("no certificate in PEM was found")]
    NoCertificate,
    #[error("no private key in PEM was found")]
    NoKey,
    #[error("no certificate of the authority in PEM could be read")]
    NoAuthority,
    #[error(transparent)]
    Unusable(#[from] rustls::Error),
    #[error(transparent)]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

/// A handle to what connections are served with; clones share it.
#[derive(Clone)]
pub struct Cell(Arc<Shared>);

struct Shared {
    /// What was set last, used or not: setting the same again costs nothing.
    told: Mutex<Told>,
    current: RwLock<Current>,
}

#[derive(Default)]
struct Told {
    pair: Option<KeyPair>,
    terms: Terms,
    ca: Option<ClientCa>,
    /// What is served: the last pair that could be used.
    key: Option<Arc<CertifiedKey>>,
}

struct Current {
    /// For whoever connects.
    open: Arc<ServerConfig>,
    /// Asks for a certificate of the client, and checks it if one is given.
    asking: Arc<ServerConfig>,
}

/// What one listener takes from a cell.
#[derive(Clone)]
pub struct Acceptor {
    cell: Cell,
    asks: bool,
}

impl Acceptor {
    /// For a connection that begins now.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        let current = self.cell.0.current.read();
        if self.asks { current.asking.clone() } else { current.open.clone() }
    }
}

impl Cell {
    /// `fallback` is served until a certificate is set.
    pub fn new(fallback: &KeyPair) -> Result<Self, TlsError> {
        let told = Told { key: Some(Arc::new(certified(fallback)?)), ..Told::default() };
        let current = told.build()?;
        Ok(Self(Arc::new(Shared { told: Mutex::new(told), current: RwLock::new(current) })))
    }

    /// Of the next connections. Without a pair the last good one stays: whoever removed its Secret will make another.
    pub fn set(&self, pair: Option<KeyPair>, terms: Terms) {
        let mut told = self.0.told.lock();
        let (new_pair, new_terms) = (pair.is_some() && pair != told.pair, terms != told.terms);
        if let Some(pair) = pair.filter(|_| new_pair) {
            match certified(&pair) {
                Ok(key) => {
                    told.key = Some(Arc::new(key));
                    tracing::info!("serving with a new certificate");
                }
                Err(error) => {
                    tracing::warn!(error = %error, "the new certificate cannot be used; the one before stays");
                }
            }
            told.pair = Some(pair);
        }
        if new_terms {
            terms.tell_limits();
            told.terms = terms;
        }
        if new_pair || new_terms {
            self.rebuild(&told);
        }
    }

    /// Who signs the certificates of clients. Without one, clients are not asked for any.
    pub fn set_authority(&self, ca: Option<ClientCa>) {
        let mut told = self.0.told.lock();
        if told.ca != ca {
            told.ca = ca;
            self.rebuild(&told);
        }
    }

    /// For a listener that does not care who connects.
    pub fn open(&self) -> Acceptor {
        Acceptor { cell: self.clone(), asks: false }
    }

    /// For a listener that lets in who gives no certificate, and who gives a good one.
    pub fn asking(&self) -> Acceptor {
        Acceptor { cell: self.clone(), asks: true }
    }

    fn rebuild(&self, told: &Told) {
        match told.build() {
            Ok(current) => *self.0.current.write() = current,
            Err(error) => tracing::warn!(error = %error, "connections go on as before: what is set cannot be used"),
        }
    }
}

impl Told {
    fn build(&self) -> Result<Current, TlsError> {
        let open = self.config(None)?;
        let asking = match self.ca.as_ref() {
            None => open.clone(),
            Some(ca) => match self.config(Some(ca)) {
                Ok(asking) => asking,
                Err(error) => {
                    tracing::warn!(error = %error, "clients are not asked for certificates: their authority is unusable");
                    open.clone()
                }
            },
        };
        Ok(Current { open, asking })
    }

    fn config(&self, clients: Option<&ClientCa>) -> Result<Arc<ServerConfig>, TlsError> {
        let key = self.key.clone().ok_or(TlsError::NoCertificate)?;
        let provider = self.terms.provider();
        let builder =
            ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&self.terms.versions())?;
        let builder = match clients {
            Some(ca) => builder.with_client_cert_verifier(ca.verifier(provider)?),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        // A session that is resumed would outlive the terms on which it began.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

fn certified(pair: &KeyPair) -> Result<CertifiedKey, TlsError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pair.certificate).collect();
    let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or(TlsError::NoCertificate)?;
    let key = PrivateKeyDer::from_pem_slice(&pair.key).map_err(|_| TlsError::NoKey)?;
    Ok(CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider())?)
}
