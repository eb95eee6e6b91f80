//! The limits of the HTTP server, over real connections.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(30);
const LIMITS: Limits =
    Limits { connections: 8, first_request_timeout: LONG, idle_timeout: LONG, request_timeout: LONG, max_age: LONG };

async fn start(limits: Limits, stop: CancellationToken) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let handler = |request: Request<Incoming>| async move {
        match request.uri().path() {
            "/panic" => panic!("requested by the test"),
            "/too-slow" => sleep(LONG * 2).await,
            "/slow" => sleep(SHORT).await,
            _ => {}
        }
        text_response(StatusCode::OK, "done".to_owned())
    };
    tokio::spawn(serve(listener, None, limits, handler, stop));
    address
}

struct RawClient(TcpStream);

impl RawClient {
    async fn new(address: SocketAddr) -> Self {
        Self(TcpStream::connect(address).await.unwrap())
    }

    async fn get(&mut self, path: &str) -> String {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n")).await;
        self.receive().await
    }

    async fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// The next response, or an empty string if the connection was closed.
    async fn receive(&mut self) -> String {
        let mut buffer = vec![0; 4096];
        let read = timeout(LONG, self.0.read(&mut buffer)).await.expect("no response, and the connection stays open");
        String::from_utf8_lossy(&buffer[..read.unwrap_or(0)]).into_owned()
    }
}

#[tokio::test]
async fn a_panic_fails_one_request() {
    let address = start(LIMITS, CancellationToken::new()).await;
    let mut client = RawClient::new(address).await;
    assert!(client.get("/panic").await.starts_with("HTTP/1.1 500"));
    assert!(client.get("/").await.ends_with("done"));
}

#[tokio::test]
async fn a_request_that_takes_too_long_fails_with_503() {
    let address = start(Limits { request_timeout: SHORT, ..LIMITS }, CancellationToken::new()).await;
    let mut client = RawClient::new(address).await;
    assert!(client.get("/too-slow").await.starts_with("HTTP/1.1 503"));
    assert!(client.get("/").await.ends_with("done"));
}

#[tokio::test]
async fn a_connection_without_a_complete_first_request_is_closed() {
    let address = start(Limits { first_request_timeout: SHORT, ..LIMITS }, CancellationToken::new()).await;
    let mut silent = RawClient::new(address).await;
    assert_eq!(silent.receive().await, "");
    let mut slow = RawClient::new(address).await;
    slow.send("GET / HTTP/1.1\r\nHost:").await;
    assert_eq!(slow.receive().await, "");
    let mut good = RawClient::new(address).await;
    assert!(good.get("/").await.ends_with("done"));
    sleep(SHORT * 2).await;
    assert!(good.get("/").await.ends_with("done"), "the timeout applies to the first request only");
}

#[tokio::test]
async fn a_response_ends_a_connection_that_reached_its_maximum_age() {
    let address = start(Limits { max_age: SHORT, ..LIMITS }, CancellationToken::new()).await;
    let mut client = RawClient::new(address).await;
    assert!(!client.get("/").await.contains("connection: close"));
    sleep(SHORT * 2).await;
    let response = client.get("/").await;
    assert!(response.contains("connection: close") && response.ends_with("done"), "{response}");
    assert_eq!(client.receive().await, "");
}

#[tokio::test]
async fn a_flood_of_idle_connections_does_not_keep_others_out() {
    let address = start(LIMITS, CancellationToken::new()).await;
    let mut busy = RawClient::new(address).await;
    busy.send("GET /slow HTTP/1.1\r\nHost: h\r\n\r\n").await;
    sleep(SHORT / 3).await;
    let mut flood = Vec::new();
    for _ in 0..200 {
        flood.push(RawClient::new(address).await);
    }
    let mut probe = RawClient::new(address).await;
    assert!(probe.get("/").await.ends_with("done"));
    assert!(busy.receive().await.ends_with("done"), "a request in progress is served");
    assert_eq!(flood[0].receive().await, "");
}

#[tokio::test]
async fn a_request_in_progress_is_served_after_stop() {
    let stop = CancellationToken::new();
    let address = start(LIMITS, stop.clone()).await;
    let (mut busy, mut idle) = (RawClient::new(address).await, RawClient::new(address).await);
    assert!(idle.get("/").await.ends_with("done"));
    busy.send("GET /slow HTTP/1.1\r\nHost: h\r\n\r\n").await;
    sleep(SHORT / 3).await;
    stop.cancel();
    assert!(busy.receive().await.ends_with("done"));
    assert_eq!(busy.receive().await, "");
    assert_eq!(idle.receive().await, "");
    assert!(TcpStream::connect(address).await.is_err());
}
