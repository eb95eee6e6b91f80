//! The address to listen on, in the notation of Kubernetes programs.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

use tokio::net::TcpListener;

/// The address to listen on. `:8080`, `0.0.0.0:8080` and `[::]:8080` stand for every address of the host, IPv6 and IPv4, as
/// in Go: `0.0.0.0` is the default of upstream virt-operator, whose pods also run in clusters with IPv6 only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bind {
    /// `None`: every address.
    pub address: Option<IpAddr>,
    pub port: u16,
}

#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("invalid value {0:?}: must be an address such as :8080, 0.0.0.0:8080 or [::]:8080")]
    Malformed(String),
    #[error("port {} is in use: {what} cannot listen on {bind}; choose another address or stop the other program", bind.port)]
    InUse { bind: Bind, what: &'static str },
    #[error("{what} cannot listen on {bind}: {source}")]
    Other { bind: Bind, what: &'static str, source: std::io::Error },
}

impl FromStr for Bind {
    type Err = BindError;

    fn from_str(text: &str) -> Result<Self, BindError> {
        let malformed = || BindError::Malformed(text.to_owned());
        if let Some(port) = text.strip_prefix(':') {
            return Ok(Self { address: None, port: port.parse().map_err(|_| malformed())? });
        }
        let address: SocketAddr = text.parse().map_err(|_| malformed())?;
        Ok(Self { address: Some(address.ip()), port: address.port() })
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => SocketAddr::new(address, self.port).fmt(f),
            None => write!(f, ":{}", self.port),
        }
    }
}

impl Bind {
    /// `what` names the server in an error.
    pub async fn listen(self, what: &'static str) -> Result<TcpListener, BindError> {
        let result = match self.address.filter(|address| !address.is_unspecified()) {
            Some(address) => TcpListener::bind((address, self.port)).await,
            // A host without IPv6 cannot listen on the IPv6 wildcard address.
            None => match TcpListener::bind((Ipv6Addr::UNSPECIFIED, self.port)).await {
                Err(error) if error.kind() != std::io::ErrorKind::AddrInUse => {
                    TcpListener::bind((Ipv4Addr::UNSPECIFIED, self.port)).await
                }
                bound => bound,
            },
        };
        result.map_err(|source| match source.kind() {
            std::io::ErrorKind::AddrInUse => BindError::InUse { bind: self, what },
            _ => BindError::Other { bind: self, what, source },
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;

    #[test]
    fn addresses_are_parsed_in_the_notation_of_kubernetes_programs() {
        assert_eq!(":8080".parse::<Bind>().unwrap(), Bind { address: None, port: 8080 });
        assert_eq!("0.0.0.0:8081".parse::<Bind>().unwrap().to_string(), "0.0.0.0:8081");
        assert_eq!("[::]:80".parse::<Bind>().unwrap().to_string(), "[::]:80");
        for bad in ["", "8080", ":", ":99999", "localhost:80", "0.0.0.0", ":80 "] {
            let error = bad.parse::<Bind>().unwrap_err().to_string();
            assert!(error.contains("must be an address such as :8080") && error.contains(bad), "{error}");
        }
    }

    #[tokio::test]
    async fn an_unspecified_address_accepts_ipv4_and_ipv6() {
        let has_ipv6 = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).await.is_ok();
        for text in [":0", "0.0.0.0:0", "[::]:0"] {
            let listener = text.parse::<Bind>().unwrap().listen("the test").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
            let ipv6 = TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await;
            assert_eq!(ipv6.is_ok(), has_ipv6, "{text}");
        }
    }

    #[tokio::test]
    async fn the_error_for_a_port_in_use_names_the_port_and_the_server() {
        let first = Bind { address: Some(Ipv4Addr::LOCALHOST.into()), port: 0 }.listen("the test").await.unwrap();
        let port = first.local_addr().unwrap().port();
        let second = Bind { address: Some(Ipv4Addr::LOCALHOST.into()), port };
        let error = second.listen("the metrics server").await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("port {port} is in use: the metrics server")), "{error}");
    }
}
