//! One HTTP GET over a connection of its own, for probes and for a program's endpoints.

use std::net::IpAddr;

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::task::AbortOnDropHandle;

/// The head of an answer; its body comes when it is asked for. The connection ends with it.
pub(crate) struct GetResponse {
    response: http::Response<Incoming>,
    _driver: AbortOnDropHandle<hyper::Result<()>>,
}

pub(crate) async fn get(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: IpAddr,
    path: &str,
) -> Result<GetResponse> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.context("speaking HTTP")?;
    let driver = AbortOnDropHandle::new(tokio::spawn(connection));
    let request = http::Request::get(path)
        .header(http::header::HOST, host.to_string())
        .body(Empty::<Bytes>::new())
        .context("building a request")?;
    let response = sender.send_request(request).await.with_context(|| format!("asking for {path}"))?;
    Ok(GetResponse { response, _driver: driver })
}

impl GetResponse {
    pub(crate) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    pub(crate) async fn text(self) -> Result<String> {
        let body = self.response.into_body().collect().await.context("reading the answer")?.to_bytes();
        Ok(String::from_utf8_lossy(&body).into_owned())
    }
}
