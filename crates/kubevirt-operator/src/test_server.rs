//! A server with fixed responses, for tests of requests without a cluster.

use std::sync::Arc;

use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpListener,
};
use vitivirt_runtime::{client::connect, metrics::Metrics};

/// A client of a server that answers each path, with its query, with a status and an object.
pub(crate) async fn client(respond: impl Fn(&str) -> (u16, Value) + Send + 'static) -> Client {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = BufReader::new(stream);
            let mut request = String::new();
            while !request.ends_with("\r\n\r\n") && stream.read_line(&mut request).await.is_ok_and(|read| read > 0) {}
            let (status, body) = respond(request.split(' ').nth(1).unwrap_or_default());
            let (body, kind) = (body.to_string(), "content-type: application/json");
            let head = format!("HTTP/1.1 {status} x\r\n{kind}\r\ncontent-length: {}\r\nconnection: close", body.len());
            let _ = stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await;
        }
    });
    client_of(&format!("http://{address}"))
}

/// A client as the operator has it. It does not retry.
pub(crate) fn client_of(address: &str) -> Client {
    let config = Config::new(address.parse().unwrap());
    connect(&config, "test", None, &Arc::new(Metrics::new("test"))).unwrap().rate_limited
}

/// The response of an API server that refuses a request.
pub(crate) fn failure(code: u16, message: &str) -> (u16, Value) {
    (code, json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}))
}
