//! One HTTP GET on its own connection, for readiness probes and for the endpoints of an operator.

use std::net::IpAddr;

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::task::AbortOnDropHandle;

/// A response whose body has not been read yet. Dropping it closes the connection.
pub(crate) struct GetResponse {
    response: http::Response<Incoming>,
    _driver: AbortOnDropHandle<hyper::Result<()>>,
}

pub(crate) async fn get(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: IpAddr,
    path: &str,
) -> Result<GetResponse> {
    get_with_token(stream, host, path, None).await
}

/// A GET with a bearer token.
pub(crate) async fn get_with_token(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: IpAddr,
    path: &str,
    token: Option<&str>,
) -> Result<GetResponse> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.context("HTTP handshake")?;
    let driver = AbortOnDropHandle::new(tokio::spawn(connection));
    let mut request = http::Request::get(path).header(http::header::HOST, host.to_string());
    if let Some(token) = token {
        request = request.header(http::header::AUTHORIZATION, format!("Bearer {token}"));
    }
    let request = request.body(Empty::<Bytes>::new()).context("building a request")?;
    let response = sender.send_request(request).await.with_context(|| format!("requesting {path}"))?;
    Ok(GetResponse { response, _driver: driver })
}

impl GetResponse {
    pub(crate) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    pub(crate) async fn text(self) -> Result<String> {
        let body = self.response.into_body().collect().await.context("reading the response")?.to_bytes();
        Ok(String::from_utf8_lossy(&body).into_owned())
    }
}
