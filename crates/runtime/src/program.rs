//! From settings to a running program and its exit code: logs, listeners, client, lease, work, end.
//!
//! What runs on every replica is prepared first and returns the work that only the leader does. Either ends with the
//! first signal, the work within a bound, and then the lease is given back.

use std::{
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use rand::Rng;
use tokio_util::sync::CancellationToken;
use tower::BoxError;

use crate::{
    client::{Clients, Rate, configuration, connect},
    events::{Recorder, Reporter, recorder},
    health::{Bind, Health, Routes, serve},
    lease::{Elector, Leadership, Timing},
    metrics::Metrics,
    shutdown,
    telemetry::{self, LogFormat, LogLevel},
    tls,
};

pub mod message {
    pub const STARTED: &str = "started";
    pub const FAILED: &str = "cannot go on";
}

/// Together with the release it must leave room for another replica to take over within three seconds of a signal.
pub const DRAIN: Duration = Duration::from_secs(2);
/// How long a pass that was dropped may take to reach its next await.
const ABORTED: Duration = Duration::from_millis(500);
/// Two are enough for work that waits most of the time, and one that blocks cannot silence the health endpoints.
const THREADS: usize = 2;

pub struct Program {
    pub name: &'static str,
    pub version: &'static str,
    pub log_format: LogFormat,
    pub log_level: LogLevel,
    pub kubeconfig: Option<PathBuf>,
    /// `None`: no limit.
    pub rate: Option<Rate>,
    pub metrics_prefix: &'static str,
    pub listeners: Vec<Listener>,
    /// `None`: this process leads without asking.
    pub lease: Option<LeaseName>,
    pub identity: String,
}

pub struct Listener {
    pub bind: Bind,
    /// Who listens, for an error.
    pub what: &'static str,
    pub health: bool,
    pub metrics: bool,
    /// `None`: plain text.
    pub tls: Option<tls::Acceptor>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    pub namespace: String,
    pub name: String,
}

/// What the parts of a program share.
#[derive(Clone)]
pub struct Context {
    pub clients: Clients,
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
    pub events: Recorder,
    /// Cancelled by the first signal.
    pub shutdown: CancellationToken,
}

impl Context {
    /// Runs something for as long as the process lives. Should it panic, nobody would miss it: therefore the process
    /// says that it is not healthy, and is replaced.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let health = self.health.clone();
        tokio::spawn(async move {
            if AssertUnwindSafe(task).catch_unwind().await.is_err() {
                health.fail(format!("{name} has panicked"));
            }
        });
    }
}

impl Program {
    /// `prepare` runs on every replica, once; what it returns runs while this replica leads, perhaps several times.
    pub fn run<P, F, L, W>(self, prepare: P) -> ExitCode
    where
        P: FnOnce(Context) -> F,
        F: Future<Output = Result<L, BoxError>>,
        L: Fn(Leadership) -> W,
        W: Future<Output = ()> + Send + 'static,
    {
        telemetry::init(self.log_format, self.log_level);
        let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return failed(&error),
        };
        let result = runtime.block_on(async {
            let shutdown = CancellationToken::new();
            shutdown::listen(shutdown.clone())?;
            self.serve(prepare, shutdown).await
        });
        // Whatever still blocks a thread ends with the process.
        runtime.shutdown_background();
        match result {
            Ok(()) => {
                tracing::info!("{}", shutdown::message::STOPPED);
                ExitCode::SUCCESS
            }
            Err(error) => failed(&*error),
        }
    }

    async fn serve<P, F, L, W>(self, prepare: P, shutdown: CancellationToken) -> Result<(), BoxError>
    where
        P: FnOnce(Context) -> F,
        F: Future<Output = Result<L, BoxError>>,
        L: Fn(Leadership) -> W,
        W: Future<Output = ()> + Send + 'static,
    {
        let metrics = Arc::new(Metrics::new(self.metrics_prefix));
        let health = Arc::new(Health::default());
        for listener in &self.listeners {
            let socket = listener.bind.listen(listener.what).await?;
            let routes = Routes {
                health: listener.health.then(|| health.clone()),
                metrics: listener.metrics.then(|| metrics.clone()),
            };
            // Until the very end: a replica that stops is still alive.
            tokio::spawn(serve(socket, listener.tls.clone(), routes, CancellationToken::new()));
        }

        // Whatever is waited for before the work begins, a signal ends it.
        let config = tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            config = configuration(self.kubeconfig.as_deref()) => config?,
        };
        let user_agent = format!("{}/{}", self.name, self.version);
        let clients = connect(&config, &user_agent, self.rate, &metrics)?;
        let reporter = Reporter { controller: self.name.to_owned(), instance: self.identity.clone() };
        let (events, send_events) = recorder(clients.unlimited.clone(), reporter, metrics.clone());
        let context =
            Context { clients: clients.clone(), metrics: metrics.clone(), health, events, shutdown: shutdown.clone() };
        context.spawn("the sender of events", send_events);
        let lead = tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            lead = prepare(context) => lead?,
        };
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
            return unopposed(&shutdown, lead).await;
        };
        let elector = Elector {
            client: clients.unlimited,
            namespace: lease.namespace,
            name: lease.name,
            identity: self.identity,
            timing: Timing::default(),
            drain: DRAIN,
            metrics,
        };
        Ok(elector.run(&shutdown, lead).await?)
    }
}

/// The work of a program that needs no lease, with the same end.
async fn unopposed<L, W>(shutdown: &CancellationToken, lead: L) -> Result<(), BoxError>
where
    L: Fn(Leadership) -> W,
    W: Future<Output = ()> + Send + 'static,
{
    let stop = CancellationToken::new();
    let leadership = Leadership::without_lease(stop.clone());
    let mut work = tokio::spawn(lead(leadership.clone()));
    tokio::select! {
        () = shutdown.cancelled() => stop.cancel(),
        _ = &mut work => return Err("the work ended by itself".into()),
    }
    if tokio::time::timeout(DRAIN, &mut work).await.is_err() {
        work.abort();
        // Nobody waits to take over; what blocks its thread ends with the process.
        let _ = tokio::time::timeout(ABORTED, leadership.ended()).await;
    }
    Ok(())
}

fn failed(error: &(dyn std::error::Error + 'static)) -> ExitCode {
    tracing::error!("{}: {error}", message::FAILED);
    ExitCode::FAILURE
}

/// A name for this process that no other has: the pod's or the host's name and something random.
pub fn identity(pod: Option<&str>, random: &mut impl Rng) -> String {
    let host = || {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Some(name.trim().to_owned()).filter(|name| !name.is_empty())
    };
    let place = pod.filter(|pod| !pod.is_empty()).map(ToOwned::to_owned).or_else(host);
    let place = place.unwrap_or_else(|| "unknown".to_owned());
    format!("{place}_{:08x}-{:08x}", random.random::<u32>(), random.random::<u32>())
}

pub const SERVICE_ACCOUNT_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// The namespace that this program lives in: as told, else that of its service account, else the one it is usually
/// installed in.
pub fn own_namespace(told: Option<&str>, service_account: &Path, otherwise: &str) -> String {
    let mounted = || std::fs::read_to_string(service_account).ok().map(|text| text.trim().to_owned());
    told.map(|told| told.trim().to_owned())
        .filter(|told| !told.is_empty())
        .or_else(|| mounted().filter(|name| !name.is_empty()))
        .unwrap_or_else(|| otherwise.to_owned())
}

/// A name that cannot be that of a namespace, and the names of the setting that it was told with.
#[derive(Debug, thiserror::Error)]
#[error("{setting} must be the name of one namespace, and {told:?} cannot be one")]
pub struct BadNamespace {
    setting: &'static str,
    told: String,
}

/// The namespace that a setting tells, or nothing when it is empty.
pub fn namespace(told: Option<String>, setting: &'static str) -> Result<Option<String>, BadNamespace> {
    let Some(told) = told.filter(|told| !told.is_empty()) else { return Ok(None) };
    if vitivirt_api::text::is_label(&told) { Ok(Some(told)) } else { Err(BadNamespace { setting, told }) }
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

    fn program(kubeconfig: PathBuf) -> Program {
        Program {
            name: "tester",
            version: "1",
            log_format: LogFormat::Json,
            log_level: LogLevel::Info,
            kubeconfig: Some(kubeconfig),
            rate: None,
            metrics_prefix: "tester",
            listeners: Vec::new(),
            lease: None,
            identity: "tester-0".to_owned(),
        }
    }

    #[tokio::test]
    async fn a_signal_ends_a_program_that_is_not_prepared_yet() {
        let file = std::env::temp_dir().join(format!("kubeconfig-of-test-{}", std::process::id()));
        let kubeconfig = concat!(
            r#"{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":"#,
            r#"{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{}}],"clusters":[{"name":"c","cluster":"#,
            r#"{"server":"http://127.0.0.1:1"}}]}"#
        );
        std::fs::write(&file, kubeconfig).unwrap();
        let shutdown = CancellationToken::new();
        let signal = shutdown.clone();
        // As a program whose caches are never in step, because the server is not there.
        let prepare = async |_: Context| {
            signal.cancel();
            std::future::pending::<()>().await;
            Ok(async |_: Leadership| {})
        };
        let served = tokio::time::timeout(Duration::from_secs(10), program(file.clone()).serve(prepare, shutdown));
        assert!(served.await.expect("it goes on waiting").is_ok());
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn the_namespace_is_told_or_mounted_or_usual() {
        let file = std::env::temp_dir().join(format!("namespace-of-test-{}", std::process::id()));
        assert_eq!(own_namespace(None, &file, "usual"), "usual");
        std::fs::write(&file, "mounted\n").unwrap();
        assert_eq!(own_namespace(None, &file, "usual"), "mounted");
        assert_eq!(own_namespace(Some(""), &file, "usual"), "mounted");
        assert_eq!(own_namespace(Some("told"), &file, "usual"), "told");
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_namespace_has_a_name_or_none() {
        let told = |text: &str| namespace(Some(text.to_owned()), "NAMESPACE (--namespace)");
        assert_eq!(told("kube-virt").unwrap().as_deref(), Some("kube-virt"));
        assert_eq!((told("").unwrap(), namespace(None, "x").unwrap()), (None, None));
        for bad in ["A_B", "-a", "a-", "a.b", "a,b", " a", &"x".repeat(64)] {
            let error = told(bad).unwrap_err().to_string();
            assert!(error.starts_with("NAMESPACE (--namespace) must be the name of one namespace"), "{error}");
        }
    }
}
