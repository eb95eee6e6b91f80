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
use crate::server::{self, Limits, text};

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

    fn sign(&self, name: &str) -> KeyPair {
        let mut parameters = CertificateParams::new([HOST.to_owned()]).unwrap();
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        KeyPair { certificate: certificate.pem().into_bytes(), key: key.serialize_pem().into_bytes() }
    }
}

fn leaf(pair: &KeyPair) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(&pair.certificate).unwrap()
}

struct World {
    signer: Signer,
    cell: Cell,
    fallback: KeyPair,
}

impl World {
    fn new() -> Self {
        let signer = Signer::new("servers");
        let fallback = signer.sign("fallback");
        Self { cell: Cell::new(&fallback).unwrap(), signer, fallback }
    }

    async fn listen(acceptor: Acceptor) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let second = Duration::from_secs(10);
        let limits = Limits { connections: 8, silence: second, idle: second, request: second, age: second };
        let answer = |_| async { text(StatusCode::OK, "hello".to_owned()) };
        tokio::spawn(server::serve(listener, Some(acceptor), limits, answer, CancellationToken::new()));
        address
    }

    fn client(
        &self,
        identity: Option<&KeyPair>,
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

    async fn connect_as(&self, address: SocketAddr, identity: Option<&KeyPair>) -> Result<Connected, ()> {
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

    /// Whether an answer comes. In TLS 1.3 a client learns only from the first read that it was refused.
    async fn works(&mut self) -> bool {
        let request = http::Request::get("/").header("host", HOST).body(Empty::new()).unwrap();
        match self.sender.send_request(request).await {
            Ok(response) => response.into_body().collect().await.is_ok_and(|body| body.to_bytes() == "hello"),
            Err(_) => false,
        }
    }
}

#[tokio::test]
async fn a_new_certificate_is_seen_by_the_next_connection_and_open_ones_go_on() {
    let world = World::new();
    let address = World::listen(world.cell.open()).await;
    let mut first = world.connect(address).await;
    assert_eq!(first.certificate, leaf(&world.fallback));
    assert!(first.works().await);

    let pair = world.signer.sign("issued");
    world.cell.set(Some(pair.clone()), Terms::default());
    let mut second = world.connect(address).await;
    assert_eq!(second.certificate, leaf(&pair));
    assert!(second.works().await && first.works().await);

    let next = world.signer.sign("renewed");
    world.cell.set(Some(next.clone()), Terms::default());
    assert_eq!(world.connect(address).await.certificate, leaf(&next));
    assert!(second.works().await && first.works().await);
}

#[tokio::test]
async fn what_cannot_be_used_changes_nothing() {
    let world = World::new();
    let address = World::listen(world.cell.open()).await;
    let good = world.signer.sign("good");
    world.cell.set(Some(good.clone()), Terms::default());
    let other = world.signer.sign("other");
    let bad = [
        KeyPair { certificate: Vec::new(), key: good.key.clone() },
        KeyPair { certificate: good.certificate.clone(), key: b"no key".to_vec() },
        KeyPair { certificate: other.certificate.clone(), key: good.key.clone() },
    ];
    for pair in bad {
        world.cell.set(Some(pair), Terms::default());
        assert_eq!(world.connect(address).await.certificate, leaf(&good));
    }
    world.cell.set(None, Terms::default());
    assert_eq!(world.connect(address).await.certificate, leaf(&good));
    world.cell.set(Some(other.clone()), Terms::default());
    assert_eq!(world.connect(address).await.certificate, leaf(&other));
}

#[tokio::test]
async fn terms_hold_for_new_connections() {
    let world = World::new();
    let address = World::listen(world.cell.open()).await;
    let older = async |suites: &[CipherSuite]| {
        let mut provider = ring::default_provider();
        provider.cipher_suites.retain(|suite| suites.is_empty() || suites.contains(&suite.suite()));
        let config = world.client(None, provider, &[&rustls::version::TLS12]);
        Connected::new(address, config).await
    };
    let aes128 = CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256;
    let aes256 = CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384;
    assert_eq!(world.connect(address).await.version, ProtocolVersion::TLSv1_3);
    assert_eq!(older(&[aes256]).await.ok().map(|connected| connected.suite), Some(aes256));

    let terms = |minimum, suites: &[&str]| Terms { minimum, suites: suites.iter().map(ToString::to_string).collect() };
    world.cell.set(None, terms(Version::Tls12, &["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"]));
    assert_eq!(older(&[]).await.ok().map(|connected| connected.suite), Some(aes128));
    assert!(older(&[aes256]).await.is_err());
    assert!(world.connect(address).await.works().await);

    world.cell.set(None, terms(Version::Tls12, &["TLS_RSA_WITH_AES_128_CBC_SHA"]));
    assert!(older(&[]).await.is_err(), "nothing that was named is offered");
    assert!(world.connect(address).await.works().await);

    world.cell.set(None, terms(Version::Tls13, &[]));
    assert!(older(&[]).await.is_err());
    assert!(world.connect(address).await.works().await);
    world.cell.set(None, Terms::default());
    assert!(older(&[]).await.is_ok());
}

#[test]
fn suites_that_are_not_offered() {
    let named =
        ["TLS_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"];
    let terms = Terms { minimum: Version::Tls12, suites: named.map(str::to_owned).to_vec() };
    assert_eq!(terms.not_offered(), ["TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA"]);
    assert!(Terms::default().not_offered().is_empty());
}

#[tokio::test]
async fn a_client_that_says_who_it_is_must_be_who_it_says() {
    let world = World::new();
    let (asking, open) = (World::listen(world.cell.asking()).await, World::listen(world.cell.open()).await);
    let clients = Signer::new("clients");
    let (known, other) = (clients.sign("front-proxy-client"), clients.sign("somebody"));
    let foreign = Signer::new("clients").sign("front-proxy-client");
    let enters = async |address, identity: Option<&KeyPair>| match world.connect_as(address, identity).await {
        Ok(mut connected) => connected.works().await,
        Err(()) => false,
    };
    assert!(enters(asking, Some(&foreign)).await, "without an authority nobody is asked");

    let names = vec!["front-proxy-client".to_owned()];
    world.cell.set_authority(Some(ClientCa { bundle: clients.pem.clone(), names }));
    assert!(enters(asking, None).await);
    assert!(enters(asking, Some(&known)).await);
    assert!(!enters(asking, Some(&other)).await);
    assert!(!enters(asking, Some(&foreign)).await);
    assert!(enters(open, Some(&foreign)).await, "who is not asked is not checked");

    world.cell.set_authority(Some(ClientCa { bundle: clients.pem.clone(), names: Vec::new() }));
    assert!(enters(asking, Some(&other)).await);
    assert!(!enters(asking, Some(&foreign)).await);

    world.cell.set_authority(Some(ClientCa { bundle: "nothing".to_owned(), names: Vec::new() }));
    assert!(enters(asking, None).await, "an authority that cannot be read shuts nobody out");
}
