//! A client that calls KubeVirt's webhooks and aggregated API every 200 ms, and remembers every call that failed.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::{
    sync::Mutex,
    task::JoinSet,
    time::{Instant, interval, sleep},
};
use vitivirt_lab::kubevirt_resource;

use crate::{
    install::vm,
    support::{NAMESPACE, TIMEOUT},
};

const EVERY: Duration = Duration::from_millis(200);
/// The aggregated API, which virt-api serves.
const AGGREGATED: &str = "/apis/subresources.kubevirt.io/v1/version";

/// The call of the webhook of virt-api.
#[derive(Clone, Copy)]
pub(crate) enum VmCall {
    Create,
    /// Of the VM with this name. While KubeVirt is being removed, the API server rejects new VMs.
    Update(&'static str),
}

pub(crate) struct WebhookClient {
    failures: Arc<Mutex<Vec<String>>>,
    calls: Arc<Mutex<usize>>,
    tasks: JoinSet<()>,
}

impl WebhookClient {
    /// Waits until every call succeeds.
    pub(crate) async fn wait_until_answered(client: &Client) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let failed = Self::failures(client).await;
            if failed.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "calls fail: {failed:?}");
            // No watch reports when the API server reaches another server, so this polls.
            sleep(EVERY).await;
        }
    }

    /// Calls everything once. Returns the calls that failed.
    pub(crate) async fn failures(client: &Client) -> Vec<String> {
        let calls = call_everything(client, VmCall::Create).await.into_iter();
        calls.filter_map(|(what, result)| Some(format!("{what}: {}", result.err()?))).collect()
    }

    /// Calls through each of these clients, until it is dropped.
    pub(crate) fn start(clients: Vec<Client>) -> Self {
        Self::start_with(clients, VmCall::Create)
    }

    pub(crate) fn start_with(clients: Vec<Client>, vm_call: VmCall) -> Self {
        let (failures, calls): (Arc<Mutex<Vec<String>>>, Arc<Mutex<usize>>) = Default::default();
        let mut tasks = JoinSet::new();
        for (number, client) in clients.into_iter().enumerate() {
            let (failures, calls) = (failures.clone(), calls.clone());
            tasks.spawn(async move {
                let mut ticks = interval(EVERY);
                loop {
                    ticks.tick().await;
                    for (what, result) in call_everything(&client, vm_call).await {
                        *calls.lock().await += 1;
                        if let Err(error) = result {
                            failures.lock().await.push(format!("API server {number}, {what}: {error}"));
                        }
                    }
                }
            });
        }
        Self { failures, calls, tasks }
    }

    /// Fails if a call has failed.
    pub(crate) async fn finish(mut self) -> Result<()> {
        self.tasks.shutdown().await;
        let (failures, calls) = (self.failures.lock().await.clone(), *self.calls.lock().await);
        ensure!(calls > 50, "only {calls} calls");
        let first: Vec<&String> = failures.iter().take(5).collect();
        ensure!(failures.is_empty(), "{} of {calls} calls failed: {first:#?}", failures.len());
        Ok(())
    }
}

impl VmCall {
    /// A write that is only validated.
    async fn send(self, vms: &Api<DynamicObject>) -> Result<(), String> {
        let sent = match self {
            Self::Create => {
                let dry_run = PostParams { dry_run: true, ..PostParams::default() };
                let vm = serde_json::from_value(vm("probe")).map_err(|error| error.to_string())?;
                vms.create(&dry_run, &vm).await
            }
            Self::Update(name) => touch(vms, name).await,
        };
        sent.map(|_| ()).map_err(|error| error.to_string())
    }
}

async fn touch(objects: &Api<DynamicObject>, name: &str) -> kube::Result<DynamicObject> {
    let dry_run = PatchParams { dry_run: true, ..PatchParams::default() };
    let patch = Patch::Merge(json!({"metadata": {"annotations": {"example.com/probe": "true"}}}));
    objects.patch(name, &dry_run, &patch).await
}

async fn call_everything(client: &Client, vm_call: VmCall) -> [(&'static str, Result<(), String>); 3] {
    let vms: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &kubevirt_resource("VirtualMachine"));
    let kubevirts: Api<DynamicObject> = Api::namespaced_with(client.clone(), NAMESPACE, &kubevirt_resource("KubeVirt"));
    let request = http::Request::get(AGGREGATED).body(Vec::new());
    let aggregated = async {
        let request = request.map_err(|error| error.to_string())?;
        client.request_text(request).await.map(|_| ()).map_err(|error| error.to_string())
    };
    [
        ("webhook of virt-api", vm_call.send(&vms).await),
        (
            "webhook of virt-operator",
            touch(&kubevirts, "kubevirt").await.map(|_| ()).map_err(|error| error.to_string()),
        ),
        ("aggregated API", aggregated.await),
    ]
}
