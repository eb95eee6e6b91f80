//! A TLS client whose clock is wrong.
//!
//! A lab cannot run a pod with another clock: KubeVirt's programs are static Go programs, which `LD_PRELOAD` does not
//! reach, and a time namespace of Linux shifts only the monotonic clocks, not the time of day. A wrong clock matters
//! where a client checks the validity of a certificate, and this client does that at any time.

use std::{net::SocketAddr, sync::Arc};

use anyhow::{Context, Result};
use jiff::{SignedDuration, Timestamp};
use rustls::{
    ClientConfig,
    pki_types::{ServerName, UnixTime},
    time_provider::TimeProvider,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::proxy::tls;

/// Connects to a server and checks its certificate, by a clock that is off by this much. The error names the reason
/// for which the client does not trust the server.
pub async fn check_tls(server: SocketAddr, name: &str, ca_pem: &str, clock_is_off_by: SignedDuration) -> Result<()> {
    let now = Timestamp::now().checked_add(clock_is_off_by).context("the time is out of range")?;
    let config = ClientConfig::builder_with_details(tls::provider(), Arc::new(FixedTime::new(now)?))
        .with_safe_default_protocol_versions()
        .context("choosing TLS versions")?
        .with_root_certificates(tls::roots(ca_pem)?)
        .with_no_client_auth();
    let name = ServerName::try_from(name.to_owned()).with_context(|| format!("invalid server name {name:?}"))?;
    let stream = TcpStream::connect(server).await.with_context(|| format!("connecting to {server}"))?;
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.context("TLS handshake")?;
    Ok(())
}

#[derive(Debug)]
struct FixedTime(UnixTime);

impl FixedTime {
    fn new(time: Timestamp) -> Result<Self> {
        let since_epoch = time.duration_since(Timestamp::UNIX_EPOCH);
        let since_epoch = since_epoch.try_into().context("the time is before 1970")?;
        Ok(FixedTime(UnixTime::since_unix_epoch(since_epoch)))
    }
}

impl TimeProvider for FixedTime {
    fn current_time(&self) -> Option<UnixTime> {
        Some(self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use rcgen::{CertificateParams, KeyPair};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    #[tokio::test]
    async fn a_client_trusts_a_certificate_only_while_it_is_valid_by_its_clock() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["virt-api.kubevirt.svc".to_owned()]).unwrap();
        params.not_before = (SystemTime::now() - Duration::from_secs(60)).into();
        params.not_after = (SystemTime::now() + Duration::from_secs(600)).into();
        let certificate = params.self_signed(&key).unwrap().pem();
        let acceptor = TlsAcceptor::from(tls::server(&certificate, &key.serialize_pem()).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let _ = acceptor.accept(stream).await;
            }
        });
        for (offset, expected) in
            [(0, None), (-50, None), (-70, Some("NotValidYet")), (590, None), (610, Some("Expired"))]
        {
            let off_by = SignedDuration::from_secs(offset);
            let result = check_tls(address, "virt-api.kubevirt.svc", &certificate, off_by).await;
            let reason = result.err().map(|error| format!("{error:#?}"));
            match (&reason, expected) {
                (None, None) => {}
                (Some(reason), Some(expected)) if reason.contains(expected) => {}
                _ => panic!("a clock that is off by {offset} s: {reason:?}"),
            }
        }
        let other = check_tls(address, "virt-handler.kubevirt.svc", &certificate, SignedDuration::ZERO).await;
        assert!(other.is_err(), "the certificate has another name");
    }
}
