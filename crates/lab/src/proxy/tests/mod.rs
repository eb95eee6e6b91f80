//! The proxy between a server that records its committed requests and a client of either protocol, all on loopback.
//! Tests wait for conditions. Only tests that expect no event wait for a fixed time.

mod api_server;
mod faults;
mod lifecycle;
mod partitions;
mod watches;

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use api_server::ApiServer;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::{ClientConfig, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{FaultProxy, ProxyOptions, RequestOutcome, tls};

const AGENT: &str = "operator/1.0";
const PODS: &str = "/api/v1/namespaces/ns/pods";
const PODS_WATCH: &str = "/api/v1/namespaces/ns/pods?watch=true";

/// Long enough for a loaded machine. Only a hanging test reaches it.
const DEADLINE: Duration = Duration::from_secs(60);
/// How long a test waits before it concludes that no event arrives.
const SILENCE: Duration = Duration::from_millis(150);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Http1,
    Http2,
}

/// A CA and one certificate that it signed, for both servers.
struct Pki {
    ca: String,
    certificate: String,
    key: String,
}

impl Pki {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let ca = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        let key = KeyPair::generate().unwrap();
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap().pem();
        Self { ca, certificate, key: key.serialize_pem() }
    }

    fn server(&self) -> Arc<ServerConfig> {
        tls::server(&self.certificate, &self.key).unwrap()
    }

    fn client(&self, protocol: Protocol) -> Arc<ClientConfig> {
        let mut config = ClientConfig::clone(&tls::client(&self.ca).unwrap());
        config.alpn_protocols = vec![match protocol {
            Protocol::Http1 => b"http/1.1".to_vec(),
            Protocol::Http2 => b"h2".to_vec(),
        }];
        Arc::new(config)
    }
}

/// An API server and the proxy in front of it.
struct ProxyFixture {
    pki: Pki,
    api: ApiServer,
    proxy: FaultProxy,
    protocol: Protocol,
}

impl ProxyFixture {
    async fn start(protocol: Protocol) -> Self {
        let pki = Pki::new();
        let api = ApiServer::start(&pki, "127.0.0.1:0".parse().unwrap()).await;
        let proxy = FaultProxy::start(ProxyOptions {
            listen: "127.0.0.1:0".parse().unwrap(),
            certificate: pki.certificate.clone(),
            key: pki.key.clone(),
            upstream: api.address,
            upstream_name: "localhost".to_owned(),
            upstream_ca: pki.ca.clone(),
        })
        .await
        .unwrap();
        Self { pki, api, proxy, protocol }
    }

    async fn client(&self) -> TestClient {
        self.client_as(AGENT).await
    }

    async fn client_as(&self, agent: &str) -> TestClient {
        self.try_client(agent).await.unwrap()
    }

    async fn try_client(&self, agent: &str) -> anyhow::Result<TestClient> {
        let tcp = TcpStream::connect(self.proxy.addr()).await?;
        tcp.set_nodelay(true)?;
        let tls = TlsConnector::from(self.pki.client(self.protocol));
        let io = TokioIo::new(tls.connect(tls::server_name("localhost").unwrap(), tcp).await?);
        let sender = match self.protocol {
            Protocol::Http1 => {
                let (sender, connection) = http1::handshake(io).await?;
                tokio::spawn(connection);
                Sender::Http1(sender)
            }
            Protocol::Http2 => {
                let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await?;
                tokio::spawn(connection);
                Sender::Http2(sender)
            }
        };
        Ok(TestClient { sender, agent: agent.to_owned() })
    }

    fn outcomes(&self) -> Vec<RequestOutcome> {
        self.proxy.requests().into_iter().map(|record| record.outcome).collect()
    }
}

/// Runs a test with both protocols.
async fn with_both_protocols(test: impl AsyncFn(ProxyFixture)) {
    for protocol in [Protocol::Http1, Protocol::Http2] {
        let run = async { test(ProxyFixture::start(protocol).await).await };
        tokio::time::timeout(DEADLINE, run).await.unwrap_or_else(|_| panic!("the test hangs with {protocol:?}"));
    }
}

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

/// One connection through the proxy.
struct TestClient {
    sender: Sender,
    agent: String,
}

impl TestClient {
    async fn send(&mut self, method: &str, path: &str, body: &str) -> anyhow::Result<Response<Incoming>> {
        let request = Request::builder()
            .method(method)
            .uri(match self.sender {
                Sender::Http1(_) => path.to_owned(),
                Sender::Http2(_) => format!("https://localhost{path}"),
            })
            .header("host", "localhost")
            .header("user-agent", &self.agent)
            .header("authorization", "Bearer secret");
        self.request(request.body(Full::from(body.to_owned()))?).await
    }

    async fn request(&mut self, request: Request<Full<Bytes>>) -> anyhow::Result<Response<Incoming>> {
        match &mut self.sender {
            Sender::Http1(sender) => {
                sender.ready().await?;
                Ok(sender.send_request(request).await?)
            }
            Sender::Http2(sender) => {
                sender.ready().await?;
                Ok(sender.send_request(request).await?)
            }
        }
    }

    /// Sends a request and reads the whole response.
    async fn call(&mut self, method: &str, path: &str, body: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let response = self.send(method, path, body).await?;
        let status = response.status();
        Ok((status, response.into_body().collect().await?.to_bytes()))
    }

    async fn create(&mut self, name: &str) -> anyhow::Result<StatusCode> {
        Ok(self.call("POST", PODS, name).await?.0)
    }

    async fn watch(&mut self) -> EventStream {
        let response = self.send("GET", PODS_WATCH, "").await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        EventStream { body: response.into_body(), buffer: String::new() }
    }
}

/// The client's end of a watch.
struct EventStream {
    body: Incoming,
    buffer: String,
}

impl EventStream {
    /// The next line. `None` at a clean end, which a fault must never cause.
    async fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            if let Some((line, rest)) = self.buffer.split_once('\n') {
                let (line, rest) = (line.to_owned(), rest.to_owned());
                self.buffer = rest;
                return Ok(Some(line));
            }
            match self.body.frame().await.transpose().context("the watch failed")? {
                Some(frame) => self.buffer.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap()),
                None => return Ok(None),
            }
        }
    }

    async fn event(&mut self) -> String {
        self.next().await.unwrap().expect("the watch ended")
    }

    /// Checks that neither an event nor the end of the watch arrives.
    async fn assert_silent(&mut self) {
        let next = tokio::time::timeout(SILENCE, self.next()).await;
        assert!(next.is_err(), "expected silence, got {next:?}");
    }
}
