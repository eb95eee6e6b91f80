//! Clients for the API server, with a deadline, a rate limit and a user agent.
//!
//! `connect` builds its clients from one configuration. `rate_limited` obeys the configured rate. `unlimited` does not:
//! it is for the lease and for events, which have their own limits. It has its own connections, so that a busy
//! `rate_limited` cannot delay the renewal of the lease.
//!
//! This module builds the stack itself. `kube`'s default builder retries requests for minutes, which would hide the
//! server's state from the error classes, and opens connections without keep-alive.

mod bucket;
mod layer;
mod pages;
mod rate;
#[cfg(test)]
mod tests;

use std::{path::Path, sync::Arc, time::Duration};

use http::{HeaderValue, header};
use hyper_util::{
    client::legacy::{Builder, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::{
    Client, Config,
    client::{Body, ConfigExt},
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::{BoxError, ServiceBuilder};

pub use self::bucket::Bucket;
pub(crate) use self::layer::{ClientLayer, DeadlineExceeded, NotLeading, SilentWatch, WATCH_IDLE_TIMEOUT};
use crate::{metrics::Metrics, root_cause::root_cause};

/// Longer than the usual timeout of a webhook, shorter than the deadline of a reconcile.
pub(crate) const REQUEST_DEADLINE: Duration = Duration::from_secs(15);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const WATCHES_PER_SECOND: f64 = 10.0;
const WATCHES_BURST: u32 = 100;

/// Requests per second on average, and how many at once after an idle time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub per_second: f64,
    pub burst: u32,
}

/// How many requests a client sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RateLimit {
    /// At most this many.
    Fixed(Rate),
    /// This many in the beginning. The rate then follows the API server: it grows up to `max_per_second` while the
    /// server responds quickly, and shrinks when the server refuses requests or becomes slow.
    FollowServer { from: Rate, max_per_second: f64 },
}

impl RateLimit {
    fn bucket(self) -> Bucket {
        match self {
            Self::Fixed(rate) => Bucket::new(rate.per_second, rate.burst),
            Self::FollowServer { from, max_per_second } => {
                Bucket::new(from.per_second, from.burst).following_the_server(from.per_second, max_per_second)
            }
        }
    }
}

/// The errors contain the text of their root cause and have no source: kube's errors repeat their sources.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("invalid kubeconfig {path}: {cause}")]
    Kubeconfig { path: String, cause: String },
    #[error(
        "no cluster is configured: KUBECONFIG is not set, ~/.kube/config cannot be used ({0}), and this process does not \
         run in a pod with a service account; set KUBECONFIG or --kubeconfig"
    )]
    Infer(String),
    #[error("context {context:?} not found in kubeconfig; available contexts: {}", available.join(", "))]
    Context { context: String, available: Vec<String> },
    #[error("the kubeconfig sets proxy-url {0}, but proxies are not supported; remove proxy-url")]
    Proxy(String),
    #[error("invalid cluster configuration: {0}")]
    Client(String),
}

impl From<kube::Error> for ConnectError {
    fn from(error: kube::Error) -> Self {
        Self::Client(root_cause(&error))
    }
}

#[derive(Clone)]
pub struct Clients {
    pub rate_limited: Client,
    /// Like `rate_limited`. Its watches wait for each other, and not for those of `rate_limited`: for watches whose
    /// number depends on users.
    pub background: Client,
    pub unlimited: Client,
}

/// `--kubeconfig`, else `KUBECONFIG`, else `~/.kube/config`, else the service account of the pod. `context` selects a
/// context of the kubeconfig instead of its current one.
pub async fn configuration(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Config, ConnectError> {
    let from_environment = std::env::var("KUBECONFIG").ok().filter(|value| !value.is_empty());
    let (path, read) = match (kubeconfig, from_environment) {
        (Some(path), _) => (path.display().to_string(), Kubeconfig::read_from(path)),
        // A path that the user names must be valid: falling back to another cluster would be a surprise.
        (None, Some(path)) => (path, Kubeconfig::read()),
        (None, None) if context.is_some() => ("~/.kube/config".to_owned(), Kubeconfig::read()),
        (None, None) => return Config::infer().await.map_err(|error| ConnectError::Infer(root_cause(&error))),
    };
    let invalid = |error: KubeconfigError| ConnectError::Kubeconfig { path: path.clone(), cause: root_cause(&error) };
    let read = read.map_err(invalid)?;
    if let Some(context) = context
        && !read.contexts.iter().any(|named| named.name == context)
    {
        let available = read.contexts.into_iter().map(|named| named.name).collect();
        return Err(ConnectError::Context { context: context.to_owned(), available });
    }
    let options = KubeConfigOptions { context: context.map(ToOwned::to_owned), ..KubeConfigOptions::default() };
    Config::from_custom_kubeconfig(read, &options).await.map_err(invalid)
}

/// Builds the clients. It sends no request.
pub fn connect(
    config: &Config,
    user_agent: &str,
    rate: Option<RateLimit>,
    metrics: &Arc<Metrics>,
) -> Result<Clients, ConnectError> {
    let host: Arc<str> = config.cluster_url.authority().map_or("", |authority| authority.as_str()).into();
    let layer = |requests| ClientLayer {
        deadline: REQUEST_DEADLINE,
        requests,
        watches: Arc::new(Bucket::new(WATCHES_PER_SECOND, WATCHES_BURST)),
        pages: Arc::default(),
        metrics: metrics.clone(),
        host: host.clone(),
    };
    let bucket = rate.map(|rate| Arc::new(rate.bucket()));
    Ok(Clients {
        rate_limited: build_client(config, user_agent, &layer(bucket.clone()))?,
        background: build_client(config, user_agent, &layer(bucket))?,
        unlimited: build_client(config, user_agent, &layer(None))?,
    })
}

fn build_client(config: &Config, user_agent: &str, layer: &ClientLayer) -> Result<Client, ConnectError> {
    if let Some(proxy) = &config.proxy_url {
        return Err(ConnectError::Proxy(proxy.to_string()));
    }
    // Only the first call in a process has an effect. All calls choose the same provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut config = config.clone();
    let agent = HeaderValue::from_str(user_agent).map_err(|error| kube::Error::HttpError(error.into()))?;
    config.headers.push((header::USER_AGENT, agent));

    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    // With keep-alive the kernel notices a dead peer long before the idle timeout of a watch.
    http.set_keepalive(Some(Duration::from_secs(30)));
    http.set_keepalive_interval(Some(Duration::from_secs(10)));
    http.set_keepalive_retries(Some(3));
    let connector = config.rustls_https_connector_with_connector(http)?;
    let hyper = Builder::new(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(Duration::from_secs(60))
        .build::<_, Body>(connector);

    let service = ServiceBuilder::new()
        .layer(layer)
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(hyper);
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// Whether an error, or one that it was caused by, is an `E`.
pub(crate) fn is_caused_by<E: std::error::Error + 'static>(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(<dyn std::error::Error>::is::<E>)
}
