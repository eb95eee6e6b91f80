//! `kubevirt-operator run`: from settings to the running operator. Every replica watches the cluster; the leader also
//! reconciles Machines and NetworkConfigurations.

use std::{path::Path, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use parking_lot::Mutex;
use vitivirt_api::machine::MANAGED_BY;
use vitivirt_runtime::{
    client::{Rate, RateLimit},
    lease::Leadership,
    metrics::Metrics,
    program::{
        BoxError, Context, LeaseName, Listener, Operator, Program, SERVICE_ACCOUNT_NAMESPACE, identity, own_namespace,
    },
    reconcile::{Executor, Runner, RunnerOptions},
    tls::{Acceptor, MountedCertificate, PemKeyPair, ReloadableTls},
    watch::Watches,
};

use crate::{
    arguments::{RunArguments, SecureMetrics, Settings},
    cache::Caches,
    controller::MachineController,
    crd_guard,
    metrics::MachineMetrics,
    network_controller::NetworkController,
    observe::Observer,
    rbac::NAMESPACE,
    repairs::RepairHistory,
    router::EventRouter,
    source_secrets::SourceSecrets,
    status_page,
};

const NAME: &str = "kubevirt-operator";
/// The beginning is enough to create fifty Machines in a second or two, and little for an API server.
const RATE: RateLimit =
    RateLimit::FollowServer { from: Rate { per_second: 200.0, burst: 400 }, max_per_second: 1000.0 };
const RECONCILE_DEADLINE: Duration = Duration::from_secs(60);
/// Far more than a reconcile takes whose requests are answered.
const SLOW: Duration = Duration::from_millis(500);
/// The name in the self-signed certificate of the metrics.
const METRICS_CERTIFICATE: &str = "kubevirt-operator-metrics";
/// How long the executor skips a patch that changed nothing, because another client undoes it in the same request.
const NO_OP_PATCH_TTL: Duration = Duration::from_secs(600);

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let settings = Settings::try_from(arguments)?;
    let metrics_tls = settings.secure_metrics.as_ref().map(MetricsTls::new).transpose()?;
    let program = program(&settings, metrics_tls.as_ref());
    Ok(program.run::<MachineOperator>(StartSettings { settings, metrics_tls }))
}

struct StartSettings {
    settings: Settings,
    metrics_tls: Option<MetricsTls>,
}

/// The certificate of the metrics.
enum MetricsTls {
    SelfSigned(ReloadableTls),
    Mounted(MountedCertificate),
}

impl MetricsTls {
    fn new(secure: &SecureMetrics) -> anyhow::Result<Self> {
        Ok(match &secure.certificate {
            Some(folder) => Self::Mounted(
                MountedCertificate::load(folder).context("METRICS_TLS_CERT_DIR (--metrics-tls-cert-dir)")?,
            ),
            None => Self::SelfSigned(ReloadableTls::new(&PemKeyPair::self_signed(METRICS_CERTIFICATE)?)?),
        })
    }

    fn acceptor(&self) -> Acceptor {
        match self {
            Self::SelfSigned(tls) => tls.acceptor(),
            Self::Mounted(mounted) => mounted.acceptor(),
        }
    }
}

struct MachineOperator {
    context: Context,
    caches: Caches,
    router: Arc<EventRouter>,
    metrics: Arc<MachineMetrics>,
    machines: Arc<MachineController>,
    networks: Arc<NetworkController>,
    executor: Arc<Executor>,
    options: RunnerOptions,
}

impl Operator for MachineOperator {
    type Settings = StartSettings;

    async fn start(start: StartSettings, context: Context) -> Result<Self, BoxError> {
        let StartSettings { settings, metrics_tls } = start;
        if let Some(MetricsTls::Mounted(mounted)) = metrics_tls {
            context.spawn("the reload of the metrics certificate", mounted.reload());
        }
        let client = context.clients.rate_limited.clone();
        context.health.set_waiting(Some("CRDs that belong to this operator"));
        crd_guard::wait(&client).await;
        context.health.set_waiting(None);
        let mut watches = Watches::new(client.clone(), context.health.clone(), context.shutdown.clone());
        let caches = Caches::new(&mut watches, settings.watch_namespace.as_deref());
        let metrics = MachineMetrics::register(&context.metrics);
        metrics.subscribe(&caches);
        let source_secrets = SourceSecrets::new(
            client.clone(),
            context.clients.background.clone(),
            context.health.clone(),
            context.shutdown.clone(),
        );
        let router = EventRouter::new(caches.clone(), source_secrets.clone());
        router.subscribe(&context);
        crd_guard::watch(&context, &caches.crds);
        watches.start(&context.metrics);

        let repairs = Arc::<RepairHistory>::default();
        let observer = Observer::new(client.clone(), caches.clone(), source_secrets, repairs.clone());
        let machines = Arc::new(MachineController {
            observer,
            metrics: metrics.clone(),
            waiting_status: Mutex::default(),
            repairs: repairs.clone(),
        });
        status_page::start(&context, settings.status, &machines).await;
        let networks = Arc::new(NetworkController { caches: caches.clone() });
        let executor = Executor::new(client, MANAGED_BY)
            .skip_no_op_patches(NO_OP_PATCH_TTL)
            .retry_invalid_within(settings.reconcile_interval);
        let executor = Arc::new(repairs.observe(executor).notify(caches.kinds.write_observers()));
        let options = RunnerOptions {
            workers: settings.workers,
            reconcile_deadline: RECONCILE_DEADLINE,
            resync: Some(settings.reconcile_interval),
            slow_after: Some(SLOW),
        };
        Ok(Self { context, caches, router, metrics, machines, networks, executor, options })
    }

    async fn caches_synced(&self) {
        self.caches.kinds.synced().await;
    }

    fn set_leading(&self, leading: bool) {
        self.metrics.set_leads(leading);
        if !leading {
            self.router.stop_queues();
        }
    }

    async fn run_controllers(&self, leadership: Leadership) {
        let queues = self.router.start_queues();
        let (context, executor) = (&self.context, &self.executor);
        let machines = Runner::new(context, self.machines.clone(), queues.machines, executor.clone(), self.options);
        // The router enqueues a network whenever it may have lost its last user, so it needs no resync.
        let options = RunnerOptions { workers: 1, resync: None, ..self.options };
        let networks = Runner::new(context, self.networks.clone(), queues.networks, executor.clone(), options);
        tokio::join!(machines.run(leadership.clone()), networks.run(leadership));
    }
}

fn program(settings: &Settings, metrics_tls: Option<&MetricsTls>) -> Program {
    let namespace = own_namespace(settings.namespace.as_deref(), Path::new(SERVICE_ACCOUNT_NAMESPACE), NAMESPACE);
    Program {
        name: NAME,
        version: env!("CARGO_PKG_VERSION"),
        log_format: settings.log_format,
        log_level: settings.log_level,
        kubeconfig: settings.kubeconfig.clone(),
        rate: Some(RATE),
        metrics: Metrics::new(crate::metrics::PREFIX),
        listeners: listeners(settings, metrics_tls.map(MetricsTls::acceptor)),
        lease: settings.leader_election.then(|| LeaseName { namespace, name: NAME.to_owned() }),
        #[expect(clippy::disallowed_methods, reason = "the identity of a process is random")]
        identity: identity(settings.pod_name.as_deref(), &mut rand::rng()),
        linger: Duration::ZERO,
    }
}

/// Two addresses, or one for both when they are the same. Only the metrics can have TLS.
fn listeners(settings: &Settings, tls: Option<Acceptor>) -> Vec<Listener> {
    let same = settings.metrics == settings.health;
    let metrics = Listener {
        bind: settings.metrics,
        what: "the metrics server",
        health: same,
        metrics: true,
        tls,
        authorize_metrics: settings.secure_metrics.as_ref().is_some_and(|secure| secure.authorization),
    };
    let health = Listener {
        bind: settings.health,
        what: "the health probe server",
        health: true,
        metrics: false,
        tls: None,
        authorize_metrics: false,
    };
    if same { vec![metrics] } else { vec![metrics, health] }
}
