//! A TLS proxy in front of the API server that injects faults by rule.
//!
//! Tests must show what an operator does when a response is late, lost or wrong. The API server cannot lose one
//! particular response on request, so the operator under test gets a kubeconfig that points to the proxy. The proxy
//! speaks TLS and HTTP/1.1 or HTTP/2 to the client, parses which Kubernetes request it has received, and injects a
//! fault into the requests that match a [`ProxyRule`]. It streams all other requests to the API server, with their
//! bearer token. It terminates TLS, so clients must authenticate with a token and not with a certificate.
//!
//! ```text
//! request.rs       method, path, query → verb, group, resource, …     pure
//! rule.rs          which requests fail, and how                       pure
//! table.rs         the active rules and the open watches
//! request_log.rs   the requests and their outcomes
//! server.rs        connections of clients
//! upstream.rs      connections to the API server
//! forward.rs       one request
//! watch.rs         the body of one watch
//! ```
//!
//! A cut is a TCP reset with HTTP/1.1 and a stream reset with HTTP/2, where other requests use the same connection. If
//! the API server is unreachable, the proxy resets the whole connection: it never generates a status without a rule. (A
//! dead server would refuse the connection instead. Go's client repeats reads ten times after a reset, but not after a
//! refused connection.)

mod forward;
mod request;
mod request_log;
mod rule;
mod server;
mod status;
mod table;
#[cfg(test)]
mod tests;
pub(crate) mod tls;
mod upstream;
mod watch;

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use tokio::{net::TcpListener, sync};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{forward::Core, upstream::Upstream};
pub use self::{
    request::{RequestInfo, RequestVerb},
    request_log::{RequestOutcome, RequestRecord},
    rule::{Caller, Match, ProxyFault, ProxyRule, Then, Verbs, When},
    table::RuleHandle,
};

/// The configuration of a proxy.
pub(crate) struct ProxyOptions {
    /// With port 0, the proxy uses a free port: see [`FaultProxy::addr`].
    pub(crate) listen: SocketAddr,
    /// The serving certificate chain and its key, in PEM.
    pub(crate) certificate: String,
    pub(crate) key: String,
    /// The API server's TLS address.
    pub(crate) upstream: SocketAddr,
    /// The DNS name that its certificate must contain.
    pub(crate) upstream_name: String,
    /// The CA that must have signed it, in PEM.
    pub(crate) upstream_ca: String,
}

/// A simulated network partition between clients and proxy. It affects all requests, independent of the rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Partition {
    /// No partition.
    #[default]
    None,
    /// The proxy resets all connections: open ones immediately, new ones as soon as they are accepted.
    Refuse,
    /// The proxy freezes all connections, and accepts new ones without answering. When the partition ends, they
    /// continue as TCP connections would. Earlier responses of the API server may still be delivered then.
    BlackHole,
}

/// A running proxy. Dropping it closes its listener and all its connections.
pub struct FaultProxy {
    address: SocketAddr,
    core: Arc<Core>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl FaultProxy {
    pub(crate) async fn start(options: ProxyOptions) -> anyhow::Result<Self> {
        let acceptor = TlsAcceptor::from(tls::server(&options.certificate, &options.key)?);
        let connector = TlsConnector::from(tls::client(&options.upstream_ca)?);
        let name = tls::server_name(&options.upstream_name)?;
        let listener = TcpListener::bind(options.listen)
            .await
            .with_context(|| format!("the fault proxy cannot listen on {}", options.listen))?;
        let address = listener.local_addr().context("reading the fault proxy's address")?;

        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let core = Arc::new(Core {
            table: Arc::default(),
            request_log: Arc::default(),
            upstream: Upstream {
                address: options.upstream,
                name,
                tls: connector,
                tasks: tasks.clone(),
                stop: stop.clone(),
                idle: Arc::default(),
            },
            partition: sync::watch::Sender::new(Partition::None),
        });
        let accept = server::accept(listener, acceptor, Arc::clone(&core), tasks.clone(), stop.clone());
        tasks.spawn(stop.clone().run_until_cancelled_owned(accept));
        Ok(Self { address, core, tasks, stop })
    }

    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// Activates a rule until its handle is dropped. If several rules apply to a request, the one that was added first
    /// wins.
    pub fn add(&self, rule: ProxyRule) -> RuleHandle {
        self.core.table.add(rule)
    }

    /// Removes all rules, even if their handles still exist. It does not end a partition.
    pub fn clear(&self) {
        self.core.table.clear();
    }

    pub fn partition(&self, partition: Partition) {
        self.core.partition.send_replace(partition);
    }

    /// The last 10,000 requests that reached the proxy, oldest first.
    pub fn requests(&self) -> Vec<RequestRecord> {
        self.core.request_log.records()
    }

    /// Stops the proxy and waits until all its tasks have ended.
    pub async fn stop(self) {
        self.shut_down();
        self.tasks.wait().await;
    }

    fn shut_down(&self) {
        // Before the rules are removed: requests that a rule holds must end with their connection, not continue.
        self.stop.cancel();
        self.tasks.close();
        self.core.table.clear();
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shut_down();
    }
}
