//! The life of a program, from its settings to its exit code: logs, listeners, client, lease, controllers, shutdown.
//!
//! Every replica starts the [`Operator`]: its watches and servers. The replica that holds the lease also runs its
//! controllers. The first signal stops both: the controllers get `DRAIN` to finish, then the lease is released.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rand::Rng;
use tokio_util::sync::CancellationToken;
pub use tower::BoxError;

use crate::{
    authorization::Authorizer,
    client::{Clients, RateLimit, configuration, connect},
    events::{Recorder, Reporter, recorder},
    health::{Bind, Health, METRICS, Routes, serve},
    lease::{CurrentLeader, Elector, Leadership, Timing},
    metrics::Metrics,
    shutdown,
    telemetry::{self, LogFormat, LogLevel},
    tls,
};

pub mod message {
    pub const STARTED: &str = "started";
    pub const FAILED: &str = "fatal error";
}

/// How long running reconciles may take to finish after a signal. Together with the release of the lease it must let
/// another replica take over within three seconds.
pub(crate) const DRAIN: Duration = Duration::from_secs(2);
/// How long an aborted reconcile may take to reach its next await.
const ABORT_TIMEOUT: Duration = Duration::from_millis(500);
/// Reconciles wait for the network most of the time, so two threads are enough. With one, a reconcile that blocks its
/// thread would also block the health endpoints.
const THREADS: usize = 2;

pub struct Program {
    pub name: &'static str,
    pub version: &'static str,
    pub log_format: LogFormat,
    pub log_level: LogLevel,
    pub kubeconfig: Option<PathBuf>,
    /// `None`: requests are not limited.
    pub rate: Option<RateLimit>,
    pub metrics: Metrics,
    pub listeners: Vec<Listener>,
    /// `None`: no leader election, this process leads.
    pub lease: Option<LeaseName>,
    pub identity: String,
    /// How long the servers work after the controllers have stopped and the lease is released. Clients of a Service connect to
    /// a pod until they have received the changed endpoints.
    pub linger: Duration,
}

pub struct Listener {
    pub bind: Bind,
    /// The name of the server in an error message.
    pub what: &'static str,
    pub health: bool,
    pub metrics: bool,
    /// `None`: plain text.
    pub tls: Option<tls::Acceptor>,
    /// Only clients can read the metrics whose token belongs to a user that can get the URL `/metrics`. The account of
    /// the program needs the permission to create TokenReviews and SubjectAccessReviews.
    pub authorize_metrics: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    pub namespace: String,
    pub name: String,
}

/// What the parts of an operator share.
#[derive(Clone)]
pub struct Context {
    pub clients: Clients,
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
    pub events: Recorder,
    /// The identity of this replica.
    pub identity: Arc<str>,
    pub leader: CurrentLeader,
    /// Cancelled by the first signal.
    pub shutdown: CancellationToken,
}

impl Context {
    /// See [`Health::spawn`].
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.health.spawn(name, task);
    }
}

/// What a program does between its start and its end.
pub trait Operator: Sized + Send + Sync + 'static {
    type Settings;

    /// Runs once on every replica: starts watches and servers.
    fn start(settings: Self::Settings, context: Context) -> impl Future<Output = Result<Self, BoxError>>;

    /// Returns when every cache that the controllers read is synced.
    fn caches_synced(&self) -> impl Future<Output = ()> + Send;

    /// This replica starts (`true`) or stops leading. Also called with `false` when the controllers are aborted: after
    /// that nothing may be enqueued, and no metric of the leader may be exported.
    fn set_leading(&self, leading: bool);

    /// Runs the controllers until the leadership ends. Runs again when this replica leads again.
    fn run_controllers(&self, leadership: Leadership) -> impl Future<Output = ()> + Send;
}

/// Calls `set_leading`, with `false` however the leadership ends.
struct LeaderGuard<'a, O: Operator>(&'a O);

impl<'a, O: Operator> LeaderGuard<'a, O> {
    fn new(operator: &'a O) -> Self {
        operator.set_leading(true);
        Self(operator)
    }
}

impl<O: Operator> Drop for LeaderGuard<'_, O> {
    fn drop(&mut self) {
        self.0.set_leading(false);
    }
}

async fn lead<O: Operator>(operator: Arc<O>, leadership: Leadership) {
    tokio::select! {
        () = leadership.stop.cancelled() => return,
        () = operator.caches_synced() => {}
    }
    let _guard = LeaderGuard::new(&*operator);
    operator.run_controllers(leadership).await;
}

impl Program {
    /// Runs the operator until a signal or a fatal error.
    pub fn run<O: Operator>(self, settings: O::Settings) -> ExitCode {
        telemetry::init(self.log_format, self.log_level);
        raise_file_limit();
        let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return log_fatal_error(&error),
        };
        let result = runtime.block_on(async {
            let shutdown = CancellationToken::new();
            shutdown::listen(shutdown.clone())?;
            self.serve::<O>(settings, shutdown).await
        });
        // A task that still blocks its thread ends with the process.
        runtime.shutdown_background();
        match result {
            Ok(()) => {
                tracing::info!("{}", shutdown::message::STOPPED);
                ExitCode::SUCCESS
            }
            Err(error) => log_fatal_error(&*error),
        }
    }

    async fn serve<O: Operator>(self, settings: O::Settings, shutdown: CancellationToken) -> Result<(), BoxError> {
        self.metrics.set_build(self.version);
        let metrics = Arc::new(self.metrics);
        let health = Arc::new(Health::default());
        let authorizer = Arc::new(Authorizer::new(METRICS));
        for listener in &self.listeners {
            let socket = listener.bind.listen(listener.what).await?;
            let routes = Routes {
                health: listener.health.then(|| health.clone()),
                metrics: listener.metrics.then(|| metrics.clone()),
                authorizer: listener.authorize_metrics.then(|| authorizer.clone()),
            };
            // The server runs until the process ends: a replica that shuts down is still alive.
            tokio::spawn(serve(socket, listener.tls.clone(), routes, CancellationToken::new()));
        }

        // A signal ends every wait before the operator runs.
        let config = tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            config = configuration(self.kubeconfig.as_deref(), None) => config?,
        };
        let user_agent = format!("{}/{}", self.name, self.version);
        let clients = connect(&config, &user_agent, self.rate, &metrics)?;
        authorizer.set_client(clients.unlimited.clone());
        let reporter = Reporter { controller: self.name.to_owned(), instance: self.identity.clone() };
        let (events, send_events) = recorder(clients.unlimited.clone(), reporter, metrics.clone());
        let leader = CurrentLeader::default();
        let context = Context {
            clients: clients.clone(),
            metrics: metrics.clone(),
            health: health.clone(),
            events,
            identity: self.identity.as_str().into(),
            leader: leader.clone(),
            shutdown: shutdown.clone(),
        };
        context.spawn("the sender of events", send_events);
        let operator = tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            operator = O::start(settings, context) => Arc::new(operator?),
        };
        let ending = (shutdown.clone(), health.clone());
        health.spawn("the end of the readiness", async move {
            ending.0.cancelled().await;
            ending.1.set_waiting(Some("the end of the process"));
        });
        let synced = operator.clone();
        let lead = move |leadership| lead(operator.clone(), leadership);
        let server = config.cluster_url.to_string();
        tracing::info!(
            program = self.name,
            version = self.version,
            identity = self.identity,
            server,
            "{}",
            message::STARTED
        );

        let Some(lease) = self.lease else {
            metrics.set_leader(true);
            leader.set(Some(&self.identity));
            run_without_lease(&shutdown, lead).await?;
            tokio::time::sleep(self.linger).await;
            return Ok(());
        };
        let elector = Elector {
            client: clients.unlimited,
            namespace: lease.namespace,
            name: lease.name,
            identity: self.identity,
            timing: Timing::default(),
            drain: DRAIN,
            metrics,
            leader,
        };
        // A replica that cannot work must not keep another one from it.
        tokio::select! {
            biased;
            () = shutdown.cancelled() => {}
            () = synced.caches_synced() => elector.run(&shutdown, lead).await?,
        }
        tokio::time::sleep(self.linger).await;
        Ok(())
    }
}

/// Runs the controllers of a program without a lease, with the same shutdown.
async fn run_without_lease<L, W>(shutdown: &CancellationToken, lead: L) -> Result<(), BoxError>
where
    L: Fn(Leadership) -> W,
    W: Future<Output = ()> + Send + 'static,
{
    let stop = CancellationToken::new();
    let leadership = Leadership::without_lease(stop.clone());
    let mut work = tokio::spawn(lead(leadership.clone()));
    tokio::select! {
        () = shutdown.cancelled() => stop.cancel(),
        _ = &mut work => return Err("the controllers ended before a shutdown was requested".into()),
    }
    if tokio::time::timeout(DRAIN, &mut work).await.is_err() {
        work.abort();
        // No other replica waits for the lease; a task that blocks its thread ends with the process.
        let _ = tokio::time::timeout(ABORT_TIMEOUT, leadership.ended()).await;
    }
    Ok(())
}

/// Raises the soft limit of open files to the hard one. Every connection is an open file, many systems begin with a soft
/// limit of 1024, and nothing here uses `select`, for which the soft limit exists.
fn raise_file_limit() {
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

fn log_fatal_error(error: &(dyn std::error::Error + 'static)) -> ExitCode {
    tracing::error!("{}: {error}", message::FAILED);
    ExitCode::FAILURE
}

/// A unique name for this process: the name of the pod or the host, and a random suffix.
pub fn identity(pod: Option<&str>, random: &mut impl Rng) -> String {
    let host = || {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Some(name.trim().to_owned()).filter(|name| !name.is_empty())
    };
    let host_or_pod = pod.filter(|pod| !pod.is_empty()).map(ToOwned::to_owned).or_else(host);
    let host_or_pod = host_or_pod.unwrap_or_else(|| "unknown".to_owned());
    format!("{host_or_pod}_{:08x}-{:08x}", random.random::<u32>(), random.random::<u32>())
}

pub const SERVICE_ACCOUNT_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// The namespace that this program runs in: the configured one, else that of its service account, else `default`.
pub fn own_namespace(configured: Option<&str>, service_account: &Path, default: &str) -> String {
    let mounted = || std::fs::read_to_string(service_account).ok().map(|text| text.trim().to_owned());
    configured
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .or_else(|| mounted().filter(|name| !name.is_empty()))
        .unwrap_or_else(|| default.to_owned())
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::SmallRng};

    use super::*;

    #[test]
    fn identities_differ_even_on_one_host() {
        let mut random = SmallRng::seed_from_u64(1);
        let (first, second) = (identity(Some("pod-0"), &mut random), identity(Some("pod-0"), &mut random));
        assert!(first.starts_with("pod-0_") && second.starts_with("pod-0_"));
        assert_ne!(first, second);
        assert!(!identity(Some(""), &mut random).starts_with('_'));
    }

    #[test]
    fn the_soft_limit_of_open_files_is_raised_to_the_hard_one() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard / 2, hard).unwrap();
        raise_file_limit();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
    }

    fn program(kubeconfig: PathBuf) -> Program {
        Program {
            name: "tester",
            version: "1",
            log_format: LogFormat::Json,
            log_level: LogLevel::Info,
            kubeconfig: Some(kubeconfig),
            rate: None,
            metrics: Metrics::new("tester"),
            listeners: Vec::new(),
            lease: None,
            identity: "tester-0".to_owned(),
            linger: Duration::ZERO,
        }
    }

    /// A kubeconfig for a server on this port of the loopback.
    fn kubeconfig(test: &str, port: u16) -> PathBuf {
        let file = std::env::temp_dir().join(format!("kubeconfig-of-{test}-{}", std::process::id()));
        let text = concat!(
            r#"{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":"#,
            r#"{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{}}],"clusters":[{"name":"c","cluster":"#,
            r#"{"server":"http://127.0.0.1:PORT"}}]}"#
        );
        std::fs::write(&file, text.replace("PORT", &port.to_string())).unwrap();
        file
    }

    /// Waits for a server that does not answer. The signal arrives meanwhile.
    struct NeverStarts;

    impl Operator for NeverStarts {
        type Settings = CancellationToken;

        async fn start(signal: CancellationToken, _: Context) -> Result<Self, BoxError> {
            signal.cancel();
            std::future::pending().await
        }

        async fn caches_synced(&self) {}

        fn set_leading(&self, _: bool) {}

        async fn run_controllers(&self, _: Leadership) {}
    }

    #[tokio::test]
    async fn a_signal_ends_an_operator_that_is_still_starting() {
        let file = kubeconfig("a-start", 1);
        let shutdown = CancellationToken::new();
        let served = program(file.clone()).serve::<NeverStarts>(shutdown.clone(), shutdown);
        let served = tokio::time::timeout(Duration::from_secs(10), served);
        assert!(served.await.expect("the program still waits for its operator").is_ok());
        std::fs::remove_file(&file).unwrap();
    }

    /// Its caches are never complete, for example because a permission is missing.
    struct NeverSynced;

    impl Operator for NeverSynced {
        type Settings = ();

        async fn start((): (), _: Context) -> Result<Self, BoxError> {
            Ok(Self)
        }

        async fn caches_synced(&self) {
            std::future::pending::<()>().await;
        }

        fn set_leading(&self, _: bool) {
            panic!("it cannot work");
        }

        async fn run_controllers(&self, _: Leadership) {}
    }

    #[tokio::test]
    async fn a_replica_that_cannot_work_does_not_take_the_lease() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let file = kubeconfig("a-lease", server.local_addr().unwrap().port());
        let lease = LeaseName { namespace: "ns".to_owned(), name: "lease".to_owned() };
        let (shutdown, program) = (CancellationToken::new(), Program { lease: Some(lease), ..program(file.clone()) });
        let served = tokio::spawn(program.serve::<NeverSynced>((), shutdown.clone()));
        let request = tokio::time::timeout(Duration::from_millis(500), server.accept()).await;
        assert!(request.is_err(), "it asked for the lease");
        shutdown.cancel();
        assert!(served.await.unwrap().is_ok());
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn the_namespace_is_configured_or_mounted_or_the_default() {
        let file = std::env::temp_dir().join(format!("namespace-of-test-{}", std::process::id()));
        assert_eq!(own_namespace(None, &file, "default"), "default");
        std::fs::write(&file, "mounted\n").unwrap();
        assert_eq!(own_namespace(None, &file, "default"), "mounted");
        assert_eq!(own_namespace(Some(""), &file, "default"), "mounted");
        assert_eq!(own_namespace(Some("configured"), &file, "default"), "configured");
        std::fs::remove_file(&file).unwrap();
    }
}
