//! `virt-operator run`: from settings to the running operator. Every replica watches the cluster and serves webhooks;
//! the leader also reconciles the KubeVirt resource.
//!
//! The endpoints use TLS from the start. `OperatorSettings` replaces their certificate and policy when the Secret of
//! this operator or the KubeVirt resource changes.

use std::{path::Path, process::ExitCode, sync::Arc, time::Duration};

use anyhow::bail;
use parking_lot::Mutex;
use vitivirt_install::{Environment, names::FIELD_MANAGER};
use vitivirt_runtime::{
    lease::Leadership,
    program::{
        BoxError, Context, LeaseName, Listener, Operator, Program, SERVICE_ACCOUNT_NAMESPACE, identity, own_namespace,
    },
    reconcile::{Executor, Runner, RunnerOptions},
    watch::Watches,
};

use crate::{
    arguments::{RunArguments, Settings},
    cache::Caches,
    controller::KubeVirtController,
    desired::DesiredStateBuilder,
    metrics::OperatorMetrics,
    migration_addresses::MigrationAddresses,
    monitoring::Monitoring,
    observe::Observer,
    router::EventRouter,
    settings::OperatorSettings,
    stored_objects::StoredObjectRecorder,
    webhook::{self, ServerTls},
};

const NAME: &str = "virt-operator";
const DEFAULT_NAMESPACE: &str = "kubevirt";
/// There is one resource, and one reconcile of it may write hundreds of objects.
const OPTIONS: RunnerOptions = RunnerOptions { workers: 1, reconcile_deadline: Duration::from_secs(120), resync: None };

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let settings = Settings::try_from(arguments)?;
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
    controller: Arc<KubeVirtController>,
    executor: Arc<Executor>,
    metrics: Arc<OperatorMetrics>,
}

impl Operator for KubeVirtOperator {
    type Settings = StartSettings;

    async fn start(start: StartSettings, context: Context) -> Result<Self, BoxError> {
        let StartSettings { settings, environment, namespace, tls } = start;
        webhook::start(&context, settings.bind, &tls).await?;
        let client = context.clients.rate_limited.clone();
        let mut watches = Watches::new(client.clone(), context.health.clone(), context.shutdown.clone());
        let caches = Caches::new(&mut watches, &namespace);
        let metrics = OperatorMetrics::register(&context.metrics);
        OperatorSettings::new(caches.clone(), tls, metrics.clone(), settings.log_level).subscribe();
        let router = EventRouter::new(caches.clone());
        router.subscribe(&context);
        watches.start(&context);

        let stored_objects = Arc::new(StoredObjectRecorder::default());
        let executor = Executor::new(client.clone(), FIELD_MANAGER);
        let executor = Arc::new(caches.observe_writes(executor, &stored_objects));
        let monitoring = Monitoring::new(context.clone(), router.clone());
        let migration_addresses = MigrationAddresses::new(&context, &router);
        let desired = DesiredStateBuilder::new(client.clone(), environment.clone(), stored_objects);
        let observer = Observer {
            client,
            caches: caches.clone(),
            environment,
            namespace,
            monitoring,
            migration_addresses,
            nodes: Mutex::default(),
        };
        let controller = Arc::new(KubeVirtController { observer, desired });
        let (ready, kinds) = (metrics.clone(), caches.kinds.clone());
        context.spawn("readiness", async move {
            kinds.synced().await;
            ready.set_ready();
        });
        Ok(Self { context, caches, router, controller, executor, metrics })
    }

    async fn caches_synced(&self) {
        self.caches.kinds.synced().await;
    }

    fn set_leading(&self, leading: bool) {
        self.metrics.set_leading(leading);
        if !leading {
            self.router.stop_queue();
        }
    }

    async fn run_controllers(&self, leadership: Leadership) {
        let queue = self.router.start_queue();
        let (controller, executor) = (self.controller.clone(), self.executor.clone());
        Runner::new(&self.context, controller, queue, executor, OPTIONS).run(leadership).await;
    }
}

fn program(settings: &Settings, namespace: &str, tls: &ServerTls) -> Program {
    Program {
        name: NAME,
        version: env!("CARGO_PKG_VERSION"),
        log_format: settings.log_format,
        log_level: settings.log_level,
        kubeconfig: settings.kubeconfig.clone(),
        rate: Some(settings.rate),
        metrics_prefix: "virt_operator",
        listeners: vec![Listener {
            bind: settings.bind,
            what: "the metrics server",
            health: true,
            metrics: true,
            tls: Some(tls.metrics()),
        }],
        lease: Some(LeaseName { namespace: namespace.to_owned(), name: NAME.to_owned() }),
        #[expect(clippy::disallowed_methods, reason = "the identity of a process is random")]
        identity: identity(settings.pod_name.as_deref(), &mut rand::rng()),
    }
}
