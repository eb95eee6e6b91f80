//! A TLS proxy in front of the API server that breaks requests by rule.
//!
//! An operator is only as good as what it does when an answer is late, lost, or a lie. The API server cannot be asked
//! to lose one particular answer, so whoever is to suffer gets a kubeconfig that points here: the proxy speaks TLS and
//! HTTP/1.1 or HTTP/2 to the client, knows which Kubernetes request it has before it, and strikes those that a [`ProxyRule`]
//! means. All others pass through, streamed both ways, with their bearer token; client certificates end here, so who
//! uses the proxy needs a token.
//!
//! ```text
//! request.rs   method, path, query → verb, group, resource, …     pure
//! rule.rs      which requests, which of them, what happens        pure
//! table.rs     the rules in force; the watches that are open
//! request_log.rs    what went through
//! server.rs    connections of clients        upstream.rs   connections to the API server
//! forward.rs   one request                   watch.rs      the body of one watch
//! ```
//!
//! A cut is a TCP reset under HTTP/1.1 and a stream reset under HTTP/2, where the connection belongs to other requests
//! too. An API server that cannot be reached is a reset of the whole connection: the proxy never invents a status
//! unless a rule says so. (A dead server would refuse the connection instead. Go's client repeats reads ten times after
//! a reset and not after a refusal.)

mod forward;
mod request;
mod request_log;
mod rule;
mod server;
mod status;
mod table;
#[cfg(test)]
mod tests;
mod tls;
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

/// Where a proxy listens, and what it stands in front of.
pub(crate) struct ProxyOptions {
    /// Port 0 takes a free one; see [`FaultProxy::addr`].
    pub(crate) listen: SocketAddr,
    /// The certificate chain and its key that clients see, in PEM.
    pub(crate) certificate: String,
    pub(crate) key: String,
    /// The API server's TLS address.
    pub(crate) upstream: SocketAddr,
    /// The name that its certificate must carry.
    pub(crate) upstream_name: String,
    /// The authority that must have signed it, in PEM.
    pub(crate) upstream_ca: String,
}

/// What the network does to everything that passes the proxy, whatever the rules say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Partition {
    /// Nothing.
    #[default]
    None,
    /// Connections are reset: those that are open at once, new ones as soon as they are made.
    Refuse,
    /// Connections freeze where they are, new ones are accepted and never answered. When the partition ends, they go on
    /// as TCP would. What the API server had answered before may still be delivered then.
    BlackHole,
}

/// A running proxy. When it is dropped its listener and all its connections end.
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
        let address = listener.local_addr().context("the fault proxy's own address")?;

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

    /// Puts a rule in force until its handle is dropped. Where several strike one request, the one added first has it.
    pub fn add(&self, rule: ProxyRule) -> RuleHandle {
        self.core.table.add(rule)
    }

    /// Ends all rules, whoever holds their handles. A partition stays.
    pub fn clear(&self) {
        self.core.table.clear();
    }

    pub fn partition(&self, partition: Partition) {
        self.core.partition.send_replace(partition);
    }

    /// The requests that reached the proxy, oldest first; the oldest are forgotten beyond 10,000.
    pub fn requests(&self) -> Vec<RequestRecord> {
        self.core.request_log.records()
    }

    /// Ends the proxy and waits until nothing of it is left.
    pub async fn stop(self) {
        self.end();
        self.tasks.wait().await;
    }

    fn end(&self) {
        // Before the rules go: what they hold must end with its connection, not go on.
        self.stop.cancel();
        self.tasks.close();
        self.core.table.clear();
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.end();
    }
}
