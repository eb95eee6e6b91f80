//! The TLS configuration of real connections: new certificates, policies, and client certificates.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use bytes::Bytes;
use http::StatusCode;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer};
use rustls::{
    CipherSuite, ClientConfig, ProtocolVersion, RootCertStore, SupportedProtocolVersion,
    crypto::{CryptoProvider, ring},
    pki_types::ServerName,
};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::server::{self, Limits, text_response};

const HOST: &str = "server.test";

struct Signer {
    issuer: Issuer<'static, rcgen::KeyPair>,
    pem: String,
}

impl Signer {
    fn new(name: &str) -> Self {
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, name);
        let key = rcgen::KeyPair::generate().unwrap();
        let pem = parameters.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(parameters, key), pem }
    }

    fn sign(&self, name: &str) -> PemKeyPair {
        let mut parameters = CertificateParams::new([HOST.to_owned()]).unwrap();
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        PemKeyPair { certificate: certificate.pem().into_bytes(), key: key.serialize_pem().into_bytes() }
    }
}

fn leaf(pair: &PemKeyPair) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(&pair.certificate).unwrap()
}

struct TlsTest {
    signer: Signer,
    tls: ReloadableTls,
    fallback: PemKeyPair,
}

impl TlsTest {
    fn new() -> Self {
        let signer = Signer::new("servers");
        let fallback = signer.sign("fallback");
        Self { tls: ReloadableTls::new(&fallback).unwrap(), signer, fallback }
    }

    async fn listen(acceptor: Acceptor) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let long = Duration::from_secs(10);
        let limits = Limits {
            connections: 8,
            first_request_timeout: long,
            idle_timeout: long,
            request_timeout: long,
            max_age: long,
        };
        let handler = |_| async { text_response(StatusCode::OK, "hello".to_owned()) };
        tokio::spawn(server::serve(listener, Some(acceptor), limits, handler, CancellationToken::new()));
        address
    }

    fn client(
        &self,
        identity: Option<&PemKeyPair>,
        provider: CryptoProvider,
        versions: &[&'static SupportedProtocolVersion],
    ) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.signer.pem.as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots);
        match identity {
            None => builder.with_no_client_auth(),
            Some(pair) => {
                let key = PrivateKeyDer::from_pem_slice(&pair.key).unwrap();
                builder.with_client_auth_cert(vec![leaf(pair)], key).unwrap()
            }
        }
    }

    async fn connect(&self, address: SocketAddr) -> Connected {
        self.connect_as(address, None).await.unwrap()
    }

    async fn connect_as(&self, address: SocketAddr, identity: Option<&PemKeyPair>) -> Result<Connected, ()> {
        let config = self.client(identity, ring::default_provider(), rustls::ALL_VERSIONS);
        Connected::new(address, config).await
    }
}

struct Connected {
    sender: SendRequest<Empty<Bytes>>,
    certificate: CertificateDer<'static>,
    version: ProtocolVersion,
    suite: CipherSuite,
}

impl Connected {
    async fn new(address: SocketAddr, config: ClientConfig) -> Result<Self, ()> {
        let stream = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from(HOST).unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(drop)?;
        let session = stream.get_ref().1;
        let certificate = session.peer_certificates().unwrap()[0].clone().into_owned();
        let version = session.protocol_version().unwrap();
        let suite = session.negotiated_cipher_suite().unwrap().suite();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Ok(Self { sender, certificate, version, suite })
    }

    /// Whether the server responds. In TLS 1.3 only the first read of a client shows that the server rejected it.
    async fn works(&mut self) -> bool {
        let request = http::Request::get("/").header("host", HOST).body(Empty::new()).unwrap();
        match self.sender.send_request(request).await {
            Ok(response) => response.into_body().collect().await.is_ok_and(|body| body.to_bytes() == "hello"),
            Err(_) => false,
        }
    }
}

#[tokio::test]
async fn the_next_connection_gets_a_new_certificate_and_open_connections_continue() {
    let test = TlsTest::new();
    let address = TlsTest::listen(test.tls.acceptor()).await;
    let mut first = test.connect(address).await;
    assert_eq!(first.certificate, leaf(&test.fallback));
    assert!(first.works().await);

    let pair = test.signer.sign("issued");
    test.tls.set(Some(pair.clone()), TlsPolicy::default());
    let mut second = test.connect(address).await;
    assert_eq!(second.certificate, leaf(&pair));
    assert!(second.works().await && first.works().await);

    let next = test.signer.sign("renewed");
    test.tls.set(Some(next.clone()), TlsPolicy::default());
    assert_eq!(test.connect(address).await.certificate, leaf(&next));
    assert!(second.works().await && first.works().await);
}

#[tokio::test]
async fn an_invalid_or_missing_certificate_keeps_the_previous_one() {
    let test = TlsTest::new();
    let address = TlsTest::listen(test.tls.acceptor()).await;
    let good = test.signer.sign("good");
    test.tls.set(Some(good.clone()), TlsPolicy::default());
    let other = test.signer.sign("other");
    let bad = [
        PemKeyPair { certificate: Vec::new(), key: good.key.clone() },
        PemKeyPair { certificate: good.certificate.clone(), key: b"no key".to_vec() },
        PemKeyPair { certificate: other.certificate.clone(), key: good.key.clone() },
    ];
    for pair in bad {
        test.tls.set(Some(pair), TlsPolicy::default());
        assert_eq!(test.connect(address).await.certificate, leaf(&good));
    }
    test.tls.set(None, TlsPolicy::default());
    assert_eq!(test.connect(address).await.certificate, leaf(&good));
    test.tls.set(Some(other.clone()), TlsPolicy::default());
    assert_eq!(test.connect(address).await.certificate, leaf(&other));
}

#[tokio::test]
async fn the_policy_applies_to_new_connections() {
    let test = TlsTest::new();
    let address = TlsTest::listen(test.tls.acceptor()).await;
    let older = async |suites: &[CipherSuite]| {
        let mut provider = ring::default_provider();
        provider.cipher_suites.retain(|suite| suites.is_empty() || suites.contains(&suite.suite()));
        let config = test.client(None, provider, &[&rustls::version::TLS12]);
        Connected::new(address, config).await
    };
    let aes128 = CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256;
    let aes256 = CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384;
    assert_eq!(test.connect(address).await.version, ProtocolVersion::TLSv1_3);
    assert_eq!(older(&[aes256]).await.ok().map(|connected| connected.suite), Some(aes256));

    let policy = |min_version, suites: &[&str]| TlsPolicy {
        min_version,
        suites: suites.iter().map(ToString::to_string).collect(),
    };
    test.tls.set(None, policy(TlsVersion::Tls12, &["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"]));
    assert_eq!(older(&[]).await.ok().map(|connected| connected.suite), Some(aes128));
    assert!(older(&[aes256]).await.is_err());
    assert!(test.connect(address).await.works().await);

    test.tls.set(None, policy(TlsVersion::Tls12, &["TLS_RSA_WITH_AES_128_CBC_SHA"]));
    assert!(older(&[]).await.is_err(), "none of the named suites is supported");
    assert!(test.connect(address).await.works().await);

    test.tls.set(None, policy(TlsVersion::Tls13, &[]));
    assert!(older(&[]).await.is_err());
    assert!(test.connect(address).await.works().await);
    test.tls.set(None, TlsPolicy::default());
    assert!(older(&[]).await.is_ok());
}

#[test]
fn suites_that_ring_does_not_implement_are_unsupported() {
    let named =
        ["TLS_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"];
    let policy = TlsPolicy { min_version: TlsVersion::Tls12, suites: named.map(str::to_owned).to_vec() };
    assert_eq!(policy.unsupported_suites(), ["TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA"]);
    assert!(TlsPolicy::default().unsupported_suites().is_empty());
}

#[tokio::test]
async fn a_client_certificate_must_be_signed_by_the_ca_for_an_allowed_name() {
    let test = TlsTest::new();
    let (with_auth, without_auth) =
        (TlsTest::listen(test.tls.acceptor_with_client_auth()).await, TlsTest::listen(test.tls.acceptor()).await);
    let clients = Signer::new("clients");
    let (known, other) = (clients.sign("front-proxy-client"), clients.sign("another"));
    let foreign = Signer::new("clients").sign("front-proxy-client");
    let accepted = async |address, identity: Option<&PemKeyPair>| match test.connect_as(address, identity).await {
        Ok(mut connected) => connected.works().await,
        Err(()) => false,
    };
    assert!(accepted(with_auth, Some(&foreign)).await, "without a CA no certificate is requested");

    let names = vec!["front-proxy-client".to_owned()];
    test.tls.set_client_ca(Some(ClientCa { bundle: clients.pem.clone(), names }));
    assert!(accepted(with_auth, None).await);
    assert!(accepted(with_auth, Some(&known)).await);
    assert!(!accepted(with_auth, Some(&other)).await);
    assert!(!accepted(with_auth, Some(&foreign)).await);
    assert!(accepted(without_auth, Some(&foreign)).await, "this listener verifies no certificate");

    test.tls.set_client_ca(Some(ClientCa { bundle: clients.pem.clone(), names: Vec::new() }));
    assert!(accepted(with_auth, Some(&other)).await);
    assert!(!accepted(with_auth, Some(&foreign)).await);

    test.tls.set_client_ca(Some(ClientCa { bundle: "nothing".to_owned(), names: Vec::new() }));
    assert!(accepted(with_auth, None).await, "an invalid CA rejects no client");
}

#[tokio::test]
async fn the_served_certificate_is_read_from_servers_with_and_without_client_authentication() {
    let test = TlsTest::new();
    let limit = Duration::from_secs(5);
    test.tls.set_client_ca(Some(ClientCa { bundle: test.signer.pem.clone(), names: Vec::new() }));
    for acceptor in [test.tls.acceptor(), test.tls.acceptor_with_client_auth()] {
        let address = TlsTest::listen(acceptor).await;
        test.tls.set(Some(test.fallback.clone()), TlsPolicy::default());
        assert_eq!(served_certificate(address, limit).await.as_deref(), Some(&*leaf(&test.fallback)));
        let renewed = test.signer.sign("renewed");
        test.tls.set(Some(renewed.clone()), TlsPolicy::default());
        assert_eq!(served_certificate(address, limit).await.as_deref(), Some(&*leaf(&renewed)));
    }
}

#[tokio::test]
async fn a_server_that_presents_no_certificate_in_time_has_none() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = silent.local_addr().unwrap();
    assert_eq!(served_certificate(address, Duration::from_millis(50)).await, None);
    drop(silent);
    assert_eq!(served_certificate(address, Duration::from_secs(5)).await, None);
}
