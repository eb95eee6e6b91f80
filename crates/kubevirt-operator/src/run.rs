//! `kubevirt-operator run`: settings to program. Every replica follows the cluster; the leader also works on Machines.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use vitivirt_api::ObjectKey;
use vitivirt_api::machine::MANAGED_BY;
use vitivirt_runtime::{
    client::Rate,
    lease::Leadership,
    program::{Context, LeaseName, Listener, Program, SERVICE_ACCOUNT_NAMESPACE, identity, own_namespace},
    queue::Queue,
    reconcile::{Controller, Executor, Runner, RunnerOptions},
};

use crate::arguments::{RunArguments, Settings};
use crate::cache::Caches;
use crate::controller::MachineController;
use crate::metrics::MachineMetrics;
use crate::networks::NetworkController;
use crate::observe::Observer;
use crate::rbac::NAMESPACE;
use crate::router::EventRouter;
use crate::source_secrets::SourceSecrets;

const NAME: &str = "kubevirt-operator";
/// Enough to create fifty Machines in a second or two, and little for an API server.
const RATE: Rate = Rate { per_second: 200.0, burst: 400 };
const RECONCILE_DEADLINE: Duration = Duration::from_secs(60);
/// How long a patch that somebody undoes in the same request is not sent again.
const NO_OP_PATCH_TTL: Duration = Duration::from_secs(600);

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let settings = Settings::try_from(arguments)?;
    let options = RunnerOptions {
        workers: settings.workers,
        reconcile_deadline: RECONCILE_DEADLINE,
        resync: Some(settings.reconcile_interval),
    };
    let namespace = settings.watch_namespace.clone();
    Ok(program(&settings).run(async move |context: Context| {
        let work = Arc::new(Work::prepare(context, namespace.as_deref(), options));
        Ok(move |leadership: Leadership| work.clone().lead(leadership))
    }))
}

/// What the replica that leads works with.
struct Work {
    context: Context,
    caches: Caches,
    router: Arc<EventRouter>,
    metrics: Arc<MachineMetrics>,
    controller: Arc<MachineController>,
    networks: Arc<NetworkController>,
    executor: Arc<Executor>,
    options: RunnerOptions,
}

impl Work {
    fn prepare(context: Context, namespace: Option<&str>, options: RunnerOptions) -> Self {
        let metrics = MachineMetrics::register(&context.metrics);
        let router = EventRouter::new(metrics.clone());
        let client = context.clients.rate_limited.clone();
        let sources = SourceSecrets::new(client.clone(), &router, context.shutdown.clone());
        let caches = Caches::start(&context, namespace, &router);
        let observer = Observer::new(client.clone(), caches.clone(), sources, router.clone());
        let controller = Arc::new(MachineController { observer, metrics: metrics.clone() });
        let networks = Arc::new(NetworkController { caches: caches.clone() });
        let executor = Executor::new(client, MANAGED_BY).skip_no_op_patches(NO_OP_PATCH_TTL);
        let executor = Arc::new(caches.over(executor));
        Self { context, caches, router, metrics, controller, networks, executor, options }
    }

    async fn lead(self: Arc<Self>, leadership: Leadership) {
        tokio::select! {
            () = leadership.stop.cancelled() => return,
            () = self.caches.ready() => {}
        }
        let guard = LeaderGuard(&self);
        self.metrics.set_leads(true);
        let queues = self.router.begin();
        let machines = self.runner(self.controller.clone(), queues.machines, self.options);
        // A network changes hands seldom, and every way in which it does wakes it.
        let seldom = RunnerOptions { workers: 1, resync: None, ..self.options };
        let networks = self.runner(self.networks.clone(), queues.networks, seldom);
        tokio::join!(machines.run(leadership.clone()), networks.run(leadership));
        drop(guard);
    }

    fn runner<C: Controller>(&self, controller: Arc<C>, queue: Queue<ObjectKey>, options: RunnerOptions) -> Runner<C> {
        Runner {
            controller,
            queue,
            executor: self.executor.clone(),
            events: self.context.events.clone(),
            metrics: self.context.metrics.clone(),
            health: self.context.health.clone(),
            options,
        }
    }
}

/// However the work ends, also by being dropped: nothing is queued for it and no gauge speaks for it after.
struct LeaderGuard<'a>(&'a Work);

impl Drop for LeaderGuard<'_> {
    fn drop(&mut self) {
        self.0.router.end();
        self.0.metrics.set_leads(false);
    }
}

fn program(settings: &Settings) -> Program {
    let namespace = own_namespace(settings.namespace.as_deref(), Path::new(SERVICE_ACCOUNT_NAMESPACE), NAMESPACE);
    Program {
        name: NAME,
        version: env!("CARGO_PKG_VERSION"),
        log_format: settings.log_format,
        log_level: settings.log_level,
        kubeconfig: settings.kubeconfig.clone(),
        rate: Some(RATE),
        metrics_prefix: "kubevirt_operator",
        listeners: listeners(settings),
        lease: settings.leader_election.then(|| LeaseName { namespace, name: NAME.to_owned() }),
        #[expect(clippy::disallowed_methods, reason = "the identity of a process is random")]
        identity: identity(settings.pod_name.as_deref(), &mut rand::rng()),
    }
}

/// Two addresses, or one for both when they are the same.
fn listeners(settings: &Settings) -> Vec<Listener> {
    let same = settings.metrics == settings.health;
    let metrics =
        Listener { bind: settings.metrics, what: "the metrics server", health: same, metrics: true, tls: None };
    let health =
        Listener { bind: settings.health, what: "the health probe server", health: true, metrics: false, tls: None };
    if same { vec![metrics] } else { vec![metrics, health] }
}
