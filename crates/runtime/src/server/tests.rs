use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const MOMENT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(30);
const LIMITS: Limits = Limits { connections: 8, silence: LONG, idle: LONG, request: LONG, age: LONG };

async fn start(limits: Limits, stop: CancellationToken) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = |request: Request<Incoming>| async move {
        match request.uri().path() {
            "/panic" => panic!("as the test asks"),
            "/slow" => sleep(LONG * 2).await,
            "/while" => sleep(MOMENT).await,
            _ => {}
        }
        text(StatusCode::OK, "done".to_owned())
    };
    tokio::spawn(serve(listener, None, limits, answer, stop));
    address
}

struct Client(TcpStream);

impl Client {
    async fn new(address: SocketAddr) -> Self {
        Self(TcpStream::connect(address).await.unwrap())
    }

    async fn ask(&mut self, path: &str) -> String {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n")).await;
        self.hear().await
    }

    async fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// What comes next; nothing if the connection has ended.
    async fn hear(&mut self) -> String {
        let mut buffer = vec![0; 4096];
        let read = timeout(LONG, self.0.read(&mut buffer)).await.expect("neither an answer nor an end");
        String::from_utf8_lossy(&buffer[..read.unwrap_or(0)]).into_owned()
    }
}

#[tokio::test]
async fn a_panic_is_one_failed_request() {
    let address = start(LIMITS, CancellationToken::new()).await;
    let mut client = Client::new(address).await;
    assert!(client.ask("/panic").await.starts_with("HTTP/1.1 500"));
    assert!(client.ask("/").await.ends_with("done"));
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_given_up() {
    let address = start(Limits { request: MOMENT, ..LIMITS }, CancellationToken::new()).await;
    let mut client = Client::new(address).await;
    assert!(client.ask("/slow").await.starts_with("HTTP/1.1 503"));
    assert!(client.ask("/").await.ends_with("done"));
}

#[tokio::test]
async fn who_says_nothing_or_half_of_it_is_hung_up_on() {
    let address = start(Limits { silence: MOMENT, ..LIMITS }, CancellationToken::new()).await;
    let mut silent = Client::new(address).await;
    assert_eq!(silent.hear().await, "");
    let mut slow = Client::new(address).await;
    slow.send("GET / HTTP/1.1\r\nHost:").await;
    assert_eq!(slow.hear().await, "");
    let mut good = Client::new(address).await;
    assert!(good.ask("/").await.ends_with("done"));
    sleep(MOMENT * 2).await;
    assert!(good.ask("/").await.ends_with("done"), "who has asked once may wait longer");
}

#[tokio::test]
async fn an_old_connection_is_ended_by_its_answer() {
    let address = start(Limits { age: MOMENT, ..LIMITS }, CancellationToken::new()).await;
    let mut client = Client::new(address).await;
    assert!(!client.ask("/").await.contains("connection: close"));
    sleep(MOMENT * 2).await;
    let answer = client.ask("/").await;
    assert!(answer.contains("connection: close") && answer.ends_with("done"), "{answer}");
    assert_eq!(client.hear().await, "");
}

#[tokio::test]
async fn connections_beyond_the_limit_wait() {
    let address = start(Limits { connections: 1, ..LIMITS }, CancellationToken::new()).await;
    let mut first = Client::new(address).await;
    assert!(first.ask("/").await.ends_with("done"));
    let mut second = Client::new(address).await;
    assert!(timeout(MOMENT, second.ask("/")).await.is_err());
    drop(first);
    assert!(second.hear().await.ends_with("done"));
}

#[tokio::test]
async fn what_is_being_answered_at_the_end_still_is() {
    let stop = CancellationToken::new();
    let address = start(LIMITS, stop.clone()).await;
    let (mut busy, mut idle) = (Client::new(address).await, Client::new(address).await);
    assert!(idle.ask("/").await.ends_with("done"));
    busy.send("GET /while HTTP/1.1\r\nHost: h\r\n\r\n").await;
    sleep(MOMENT / 3).await;
    stop.cancel();
    assert!(busy.hear().await.ends_with("done"));
    assert_eq!(busy.hear().await, "");
    assert_eq!(idle.hear().await, "");
    assert!(TcpStream::connect(address).await.is_err());
}
