//! `virt-operator run`: from settings to the running operator. Every replica watches the cluster and serves webhooks;
//! the leader also reconciles the KubeVirt resource.
//!
//! The endpoints use TLS from the start. `OperatorSettings` replaces their certificate and policy when the Secret of
//! this operator or the KubeVirt resource changes.

use std::{
    marker::PhantomData,
    path::Path,
    process::ExitCode,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyhow::bail;
use parking_lot::Mutex;
use vitivirt_api::ObjectKey;
use vitivirt_install::{Environment, Kind, names::FIELD_MANAGER};
use vitivirt_runtime::{
    client::RateLimit,
    lease::Leadership,
    metrics::Metrics,
    program::{
        BoxError, Context, LeaseName, Listener, Operator, Program, SERVICE_ACCOUNT_NAMESPACE, identity, own_namespace,
    },
    queue::Queue,
    reconcile::{Executor, Runner, RunnerOptions},
    watch::Watches,
};

use crate::{
    arguments::{RunArguments, Settings},
    cache::Caches,
    certificate_controller::CertificateController,
    controller::{self as lane, Components, Instancetypes, LaneContext, LaneController, LaneType},
    crd_reader::CrdReader,
    desired::DesiredStateBuilder,
    lanes::{LaneGates, LaneProblems},
    metrics::{OperatorMetrics, PREFIX},
    migration_addresses::MigrationAddresses,
    monitoring::MonitoringWatches,
    node_checks::NodeChecks,
    node_count::NodeCount,
    observe::Observer,
    probe::CertificateProber,
    revisions::Revisions,
    router::EventRouter,
    settings::OperatorSettings,
    status_page,
    storage_pages::StoragePages,
    stored_objects::StoredObjectRecorder,
    webhook::{self, ServerTls},
};

const NAME: &str = "virt-operator";
const DEFAULT_NAMESPACE: &str = "kubevirt";
/// There is one resource, and one reconcile of it may write hundreds of objects.
const OPTIONS: RunnerOptions =
    RunnerOptions { workers: 1, reconcile_deadline: Duration::from_secs(120), resync: None, slow_after: None };

/// No event follows when an object of another client, whose name the installation needs, is deleted.
const INVALID_RETRY: Duration = Duration::from_secs(60);

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let settings = Settings::new(arguments, |name| std::env::var(name).ok())?;
    let environment = Environment::from_variables(std::env::vars());
    if let Some(problem) = environment.problem() {
        bail!(problem);
    }
    let tls = ServerTls::new()?;
    let namespace =
        own_namespace(settings.namespace.as_deref(), Path::new(SERVICE_ACCOUNT_NAMESPACE), DEFAULT_NAMESPACE);
    let program = program(&settings, &namespace, &tls);
    Ok(program.run::<KubeVirtOperator>(StartSettings { settings, environment, namespace, tls }))
}

struct StartSettings {
    settings: Settings,
    environment: Environment,
    namespace: String,
    tls: ServerTls,
}

struct KubeVirtOperator {
    context: Context,
    caches: Caches,
    router: Arc<EventRouter>,
    lanes: Arc<LaneContext>,
    environment: Environment,
    metrics: Arc<OperatorMetrics>,
    prober: Arc<CertificateProber>,
}

impl Operator for KubeVirtOperator {
    type Settings = StartSettings;

    async fn start(start: StartSettings, context: Context) -> Result<Self, BoxError> {
        let StartSettings { settings, environment, namespace, tls } = start;
        for warning in &settings.warnings {
            tracing::warn!(warning, "invalid setting");
        }
        webhook::start(&context, settings.bind, &tls).await?;
        let client = context.clients.rate_limited.clone();
        let mut watches = Watches::new(client.clone(), context.health.clone(), context.shutdown.clone());
        let caches = Caches::new(&mut watches, &namespace);
        let metrics = OperatorMetrics::register(&context.metrics);
        OperatorSettings::new(caches.clone(), tls, metrics.clone(), settings.log_level).subscribe();
        let router = EventRouter::new(caches.clone());
        router.subscribe(&context);
        let prober = CertificateProber::new(&caches, &router, &metrics, settings.certificate_reload_time);
        prober.subscribe();
        let node_count = Arc::new(NodeCount::new(client.clone()));
        for (_, cache) in caches.installed_objects().filter(|(kind, _)| *kind == Kind::DaemonSet) {
            let node_count = node_count.clone();
            cache.subscribe(move |_| node_count.count_soon());
        }
        watches.start(&context.metrics);

        let problems = Arc::new(LaneProblems::default());
        let last_reports = Arc::default();
        status_page::start(&context, settings.status, &caches, &prober, &last_reports).await;
        let observer = Observer {
            client: client.clone(),
            caches: caches.clone(),
            environment: environment.clone(),
            namespace: namespace.clone(),
            monitoring: MonitoringWatches::new(context.clone(), router.clone()),
            migration_addresses: MigrationAddresses::new(&context, &router),
            lane_problems: problems.clone(),
            node_checks: NodeChecks::default(),
            revisions: Revisions::default(),
            crd_reader: CrdReader::default(),
            storage_pages: StoragePages::default(),
            prober: prober.clone(),
            node_count,
        };
        let desired = DesiredStateBuilder::new(client, environment.clone());
        let gates = LaneGates::default();
        let lanes = Arc::new(LaneContext {
            observer,
            desired,
            problems,
            gates,
            unconfirmed: Mutex::default(),
            router: router.clone(),
            own_pod: settings.pod_name.as_deref().map(|name| ObjectKey::namespaced(&namespace, name)),
            superseded: AtomicBool::default(),
            last_reports,
        });
        let (ready, kinds) = (metrics.clone(), caches.kinds.clone());
        context.spawn("readiness", async move {
            kinds.synced().await;
            ready.set_ready();
        });
        Ok(Self { context, caches, router, lanes, environment, metrics, prober })
    }

    async fn caches_synced(&self) {
        self.caches.kinds.synced().await;
    }

    fn set_leading(&self, leading: bool) {
        self.metrics.set_leading(leading);
        if !leading {
            self.router.stop_queues();
            self.prober.clear();
            self.lanes.observer.node_count.clear();
            self.lanes.last_reports.clear();
        }
    }

    async fn run_controllers(&self, leadership: Leadership) {
        self.lanes.problems.clear();
        let queues = self.router.start_queues();
        let stored_objects = Arc::default();
        let executor = self.executor(&stored_objects);
        let (context, environment) = (self.lanes.clone(), self.environment.clone());
        let certificates = CertificateController { context, environment, stored_objects, trusted_ca: Mutex::default() };
        let certificates = Runner::new(&self.context, Arc::new(certificates), queues.certificates, executor, OPTIONS);
        let lanes = async {
            tokio::join!(
                certificates.run(leadership.clone()),
                self.run_lane::<Components>(queues.components, leadership.clone()),
                self.run_lane::<lane::Monitoring>(queues.monitoring, leadership.clone()),
                self.run_lane::<Instancetypes>(queues.instancetypes, leadership.clone()),
            )
        };
        tokio::select! {
            _ = lanes => {}
            () = self.prober.run() => {}
            () = self.lanes.observer.node_count.run(|| self.caches.ready_handlers(), || self.router.nodes_changed()) => {}
        }
    }
}

impl KubeVirtOperator {
    async fn run_lane<L: LaneType>(&self, queue: Queue<ObjectKey>, leadership: Leadership) {
        let stored_objects = Arc::default();
        let executor = self.executor(&stored_objects);
        let controller = LaneController::<L> { context: self.lanes.clone(), stored_objects, lane: PhantomData };
        Runner::new(&self.context, Arc::new(controller), queue, executor, OPTIONS).run(leadership).await;
    }

    /// The executor of one lane. The caches learn of the writes of all lanes.
    fn executor(&self, stored_objects: &Arc<StoredObjectRecorder>) -> Arc<Executor> {
        let executor = Executor::new(self.context.clients.rate_limited.clone(), FIELD_MANAGER);
        let executor = executor.retry_invalid_within(INVALID_RETRY);
        Arc::new(self.caches.observe_writes(executor, stored_objects))
    }
}

/// The API server sends requests to the webhook of a pod until its endpoints have changed. Together with the end of the
/// controllers this is shorter than the pod's terminationGracePeriodSeconds, 10.
const WEBHOOK_LINGER: Duration = Duration::from_secs(3);

fn program(settings: &Settings, namespace: &str, tls: &ServerTls) -> Program {
    Program {
        name: NAME,
        version: env!("CARGO_PKG_VERSION"),
        log_format: settings.log_format,
        log_level: settings.log_level,
        kubeconfig: settings.kubeconfig.clone(),
        rate: Some(RateLimit::Fixed(settings.rate)),
        metrics: Metrics::with_kubevirt_names(PREFIX),
        listeners: vec![Listener {
            bind: settings.bind,
            what: "the metrics server",
            health: true,
            metrics: true,
            tls: Some(tls.metrics()),
            // As in upstream virt-operator, every client can read the metrics.
            authorize_metrics: false,
        }],
        lease: Some(LeaseName { namespace: namespace.to_owned(), name: NAME.to_owned() }),
        #[expect(clippy::disallowed_methods, reason = "the identity of a process is random")]
        identity: identity(settings.pod_name.as_deref(), &mut rand::rng()),
        linger: WEBHOOK_LINGER,
    }
}
