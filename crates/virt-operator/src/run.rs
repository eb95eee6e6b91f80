//! `virt-operator run`: settings to program. Every replica follows the cluster and answers webhooks; the leader also
//! installs.
//!
//! Its endpoints are served over TLS from the beginning: `Serving` is what they are served with, and is told wherever
//! the Secret of this operator and the KubeVirt resource are seen to change.

use std::{path::Path, process::ExitCode, sync::Arc, time::Duration};

use anyhow::bail;
use vitivirt_install::{Environment, names::FIELD_MANAGER};
use vitivirt_runtime::{
    lease::Leadership,
    program::{Context, LeaseName, Listener, Program, SERVICE_ACCOUNT_NAMESPACE, identity, own_namespace},
    reconcile::{Executor, Runner, RunnerOptions},
    telemetry::LogLevel,
};

use crate::{
    arguments::{RunArguments, Settings},
    cache::Caches,
    controller::KubeVirtController,
    desired::DesiredStateBuilder,
    metrics::OperatorMetrics,
    monitoring::Monitoring,
    observe::Observer,
    router::EventRouter,
    stored_objects::StoredObjectRecorder,
    synchronization::Synchronization,
    webhook::{self, Serving},
};

const NAME: &str = "virt-operator";
const USUAL_NAMESPACE: &str = "kubevirt";
/// There is one resource, and a pass over it writes hundreds of objects.
const OPTIONS: RunnerOptions = RunnerOptions { workers: 1, reconcile_deadline: Duration::from_secs(120), resync: None };

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let settings = Settings::try_from(arguments)?;
    let environment = Environment::from_variables(std::env::vars());
    if let Some(problem) = environment.problem() {
        bail!(problem);
    }
    let serving = Serving::new()?;
    let namespace = own_namespace(settings.namespace.as_deref(), Path::new(SERVICE_ACCOUNT_NAMESPACE), USUAL_NAMESPACE);
    let (bind, level) = (settings.bind, settings.log_level);
    Ok(program(&settings, &namespace, &serving).run(async move |context: Context| {
        webhook::start(&context, bind, &serving).await?;
        let work = Arc::new(Work::prepare(context, namespace, environment, serving, level));
        Ok(move |leadership: Leadership| work.clone().lead(leadership))
    }))
}

/// What the replica that leads works with.
struct Work {
    context: Context,
    caches: Caches,
    router: Arc<EventRouter>,
    controller: Arc<KubeVirtController>,
    executor: Arc<Executor>,
    metrics: Arc<OperatorMetrics>,
}

impl Work {
    fn prepare(
        context: Context,
        namespace: String,
        environment: Environment,
        serving: Serving,
        level: LogLevel,
    ) -> Self {
        let metrics = OperatorMetrics::register(&context.metrics);
        let router = EventRouter::new(serving, metrics.clone(), level);
        let caches = Caches::start(&context, &namespace, &router);
        let stored_objects = Arc::new(StoredObjectRecorder::default());
        let executor = Executor::new(context.clients.rate_limited.clone(), FIELD_MANAGER);
        let executor = Arc::new(caches.over(executor, &stored_objects));
        let monitoring = Monitoring::new(context.clone(), router.clone());
        let synchronization = Synchronization::new(&context, &router);
        let client = context.clients.rate_limited.clone();
        let desired = DesiredStateBuilder::new(client.clone(), environment.clone(), stored_objects);
        let observer = Observer { client, caches: caches.clone(), environment, namespace, monitoring, synchronization };
        let controller = Arc::new(KubeVirtController { observer, desired });
        let (ready, known) = (metrics.clone(), caches.clone());
        context.spawn("readiness", async move {
            known.ready().await;
            ready.set_ready();
        });
        Self { context, caches, router, controller, executor, metrics }
    }

    async fn lead(self: Arc<Self>, leadership: Leadership) {
        tokio::select! {
            () = leadership.stop.cancelled() => return,
            () = self.caches.ready() => {}
        }
        let guard = LeaderGuard(&self);
        self.metrics.set_leading(true);
        let runner = Runner {
            controller: self.controller.clone(),
            queue: self.router.begin(),
            executor: self.executor.clone(),
            events: self.context.events.clone(),
            metrics: self.context.metrics.clone(),
            health: self.context.health.clone(),
            options: OPTIONS,
        };
        runner.run(leadership).await;
        drop(guard);
    }
}

/// However the work ends, also by being dropped: nothing is queued for it after.
struct LeaderGuard<'a>(&'a Work);

impl Drop for LeaderGuard<'_> {
    fn drop(&mut self) {
        self.0.router.end();
        self.0.metrics.set_leading(false);
    }
}

fn program(settings: &Settings, namespace: &str, serving: &Serving) -> Program {
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
            tls: Some(serving.metrics()),
        }],
        lease: Some(LeaseName { namespace: namespace.to_owned(), name: NAME.to_owned() }),
        identity: identity(settings.pod_name.as_deref(), &mut rand::rng()),
    }
}
