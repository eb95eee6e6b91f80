//! One lab: started with [`LabOptions`], used through its client and kubeconfig, removed when it is dropped. It
//! connects the servers (`control_plane`), the fault proxy and the simulators; each of them has its own module.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::{
    core::v1::{Pod, ServiceAccount},
    rbac::v1::Role,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{net::TcpStream, sync::watch, task::JoinSet};
use vitivirt_snapshot::Snapshot;

use crate::{
    addresses::AddressRange,
    audit::{self, Record},
    control_plane::{ApiServerLag, ControlPlane, ControlPlaneOptions},
    credentials::{Credentials, service_account_credentials},
    extensions::{self, Extension},
    harness,
    image::ContainerImage,
    isolate,
    kubelet::{self, FrozenPods, Kubelet, OwnProgram, PodAddresses, PodBehaviour, Programs, probe::get_over_tls},
    kubevirt::{self, KubeVirtInstaller, VirtOperator, simulated::SimulatedKubeVirt},
    manifests, node,
    operator_process::{OperatorProcess, OperatorProcessOptions},
    outage::SubresourceClient,
    pace::DelayRange,
    paths, process_table,
    proxy::{FaultProxy, ProxyOptions},
    server_process::{LabHealth, ServerProcess},
    snapshot, snapshots, storage,
    virt_handler::{GuestBehaviour, GuestEnd, VirtHandler},
    vmi::VmiPhases,
};

/// The configuration of a lab. [`LabOptions::at`] has the delays of a pace.
#[derive(Clone, Debug)]
pub struct LabOptions {
    pub nodes: u8,
    /// Chooses the delay of each object.
    pub seed: u64,
    pub kubevirt: KubeVirtInstaller,
    pub pods: PodBehaviour,
    pub guests: GuestBehaviour,
    /// How long Endpoints and EndpointSlices lag behind the pods.
    pub endpoints_lag: Duration,
    /// From the time at which a PVC can be bound until it has a volume.
    pub pvcs_bind_after: DelayRange,
    /// A second API server on the same etcd, which hears of changes late.
    pub second_api_server: Option<ApiServerLag>,
    pub extensions: Vec<Extension>,
    /// Our programs that pods may run, by image.
    pub own_programs: Vec<OwnProgram>,
    /// Images that pods may run. They take precedence over `own_programs`.
    pub images: Vec<ContainerImage>,
}

impl Default for LabOptions {
    fn default() -> Self {
        LabOptions {
            nodes: 2,
            seed: 1,
            kubevirt: KubeVirtInstaller::None,
            pods: PodBehaviour::default(),
            guests: GuestBehaviour::default(),
            endpoints_lag: Duration::ZERO,
            pvcs_bind_after: DelayRange::NONE,
            second_api_server: None,
            extensions: Vec::new(),
            own_programs: Vec::new(),
            images: Vec::new(),
        }
    }
}

pub struct Lab {
    control_plane: ControlPlane,
    proxy: FaultProxy,
    client: Client,
    folder: PathBuf,
    kubeconfig: PathBuf,
    health: LabHealth,
    address_range: Arc<AddressRange>,
    pods: watch::Sender<PodBehaviour>,
    guests: watch::Sender<GuestBehaviour>,
    frozen: FrozenPods,
    programs_of_pods: watch::Sender<Programs>,
    virt_handler: VirtHandler,
    programs: AtomicU8,
    /// The test that started the lab. If it fails, the lab's logs are kept.
    test: Option<&'static str>,
    /// The simulators. They are aborted when the lab is dropped.
    simulators: JoinSet<()>,
}

impl Lab {
    /// Starts the lab and returns when everything in it is ready.
    pub async fn start(options: LabOptions) -> Result<Self> {
        isolate::require_inside()?;
        if !(1..=250).contains(&options.nodes) {
            bail!("nodes: invalid value {}: must be between 1 and 250", options.nodes);
        }
        let address_range = Arc::new(AddressRange::reserve()?);
        let folder = paths::run_dir()?.join(format!("lab-{}", address_range.number));
        std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let health = LabHealth::default();
        let servers =
            ControlPlaneOptions { endpoints_lag: options.endpoints_lag, second_api_server: options.second_api_server };
        let control_plane = ControlPlane::start(&folder, &address_range, &servers, &health).await?;
        let admin = control_plane.admin.clone();
        let client = admin.client("lab")?;
        let proxy = FaultProxy::start(ProxyOptions {
            listen: address_range.proxy(),
            upstream: address_range.api_server(),
            certificate: control_plane.certificates.proxy_certificate_pem.clone(),
            key: control_plane.certificates.proxy_key_pem.clone(),
            upstream_ca: control_plane.certificates.ca_pem.clone(),
            upstream_name: "kubernetes.default.svc".to_owned(),
        })
        .await
        .context("starting the fault proxy")?;

        let (pods, pod_behaviour) = watch::channel(options.pods);
        let (guests, guest_behaviour) = watch::channel(options.guests.clone());
        let (programs_of_pods, programs) =
            watch::channel(Programs { own: options.own_programs, images: options.images });
        let frozen = FrozenPods::default();
        let (vmis, addresses) = (VmiPhases::default(), PodAddresses::default());
        let kubelet = Kubelet {
            client: admin.client("lab-kubelet")?,
            admin: admin.clone(),
            address_range: address_range.clone(),
            folder: folder.clone(),
            behaviour: pod_behaviour,
            programs,
            vmis: vmis.clone(),
            addresses: addresses.clone(),
            seed: options.seed,
            known: Mutex::default(),
            frozen: frozen.clone(),
        };
        let virt_handler = VirtHandler {
            client: admin.client("lab-virt-handler")?,
            admin: admin.clone(),
            address_range: address_range.clone(),
            behaviour: guest_behaviour,
            seed: options.seed,
            vmis,
            addresses,
            identities: Arc::default(),
        };

        health.guard(prepare_cluster(&client, &address_range, options.nodes, &options.extensions)).await?;
        let mut simulators = JoinSet::new();
        simulators.spawn(node::heartbeat(client.clone()));
        simulators.spawn(storage::provision(admin.client("lab-storage")?, options.pvcs_bind_after, options.seed));
        simulators.spawn(storage::reclaim(admin.client("lab-storage")?));
        if options.extensions.contains(&Extension::Snapshots) {
            simulators.spawn(snapshots::take(admin.client("lab-snapshots")?));
        }
        simulators.spawn(kubelet.run());
        if matches!(options.kubevirt, KubeVirtInstaller::Simulated) {
            let simulated = SimulatedKubeVirt {
                client: admin.client("lab-kubevirt")?,
                address_range: address_range.clone(),
                nodes: options.nodes,
                behaviour: options.guests,
                seed: options.seed,
            };
            simulators.spawn(simulated.run());
        } else {
            simulators.spawn(virt_handler.clone().run());
        }

        let lab = Lab {
            kubeconfig: folder.join("admin.kubeconfig"),
            control_plane,
            proxy,
            client,
            folder,
            health,
            address_range,
            pods,
            guests,
            frozen,
            programs_of_pods,
            virt_handler,
            programs: AtomicU8::new(0),
            test: harness::current_test(),
            simulators,
        };
        lab.health.guard(lab.install_kubevirt(options.kubevirt)).await?;
        Ok(lab)
    }

    async fn install_kubevirt(&self, kubevirt: KubeVirtInstaller) -> Result<()> {
        match kubevirt {
            KubeVirtInstaller::None => Ok(()),
            KubeVirtInstaller::Simulated => {
                let crds = kubevirt::install_strategy::crds(&self.client, &self.kubeconfig).await?;
                manifests::create(&self.client, &crds).await
            }
            KubeVirtInstaller::Reference { custom_resource } => {
                self.create_virt_operator(&VirtOperator::reference()).await?;
                self.deploy_kubevirt(custom_resource).await.map(drop)
            }
            KubeVirtInstaller::Ours { program, custom_resource } => {
                self.create_virt_operator(&VirtOperator::ours(program)).await?;
                self.deploy_kubevirt(custom_resource).await.map(drop)
            }
        }
    }

    /// Creates everything that a virt-operator needs, and its Deployment with two pods and its own service account.
    pub async fn create_virt_operator(&self, operator: &VirtOperator) -> Result<()> {
        self.add_operator_program(operator);
        kubevirt::create_operator(&self.client, operator).await
    }

    /// Replaces the manifests of the virt-operator that runs. The Deployment then replaces its pods.
    pub async fn replace_virt_operator(&self, operator: &VirtOperator) -> Result<()> {
        self.add_operator_program(operator);
        kubevirt::replace_operator(&self.client, operator).await
    }

    fn add_operator_program(&self, operator: &VirtOperator) {
        if let Some(program) = operator.own_program() {
            self.add_program(program);
        }
    }

    /// Deletes the Deployment of virt-operator and returns when its pods have ended.
    pub async fn delete_virt_operator(&self, timeout: Duration) -> Result<()> {
        self.health.guard(kubevirt::delete_operator(&self.client, timeout)).await
    }

    /// A client that asks virt-api's subresources all the time.
    pub fn subresource_client(&self) -> SubresourceClient {
        SubresourceClient::start(self.client.clone())
    }

    /// Runs one of our programs in the pods with its image from now on.
    pub fn add_program(&self, program: OwnProgram) {
        self.programs_of_pods.send_modify(|programs| programs.own.push(program));
    }

    /// Waits until every pod of virt-operator is ready.
    pub async fn wait_for_virt_operator(&self, timeout: Duration) -> Result<()> {
        self.health.guard(kubevirt::ready(&self.client, timeout, &self.folder.join("logs"))).await
    }

    /// Creates the KubeVirt resource (by default the release's own) and waits until its phase is Deployed. Returns the
    /// resource as it was at that moment.
    pub async fn deploy_kubevirt(&self, custom_resource: Option<Value>) -> Result<DynamicObject> {
        self.health.guard(kubevirt::deploy(&self.client, custom_resource, &self.folder.join("logs"))).await
    }

    /// Everything that a virt-operator has installed, at this resource version (of any object) or now.
    pub async fn installed(&self, at: Option<&str>) -> Result<Snapshot> {
        self.health.guard(snapshot::take(&self.client, at)).await
    }

    /// A client with all permissions. Programs under test must not use it: see [`Lab::credentials`].
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// A kubeconfig with all permissions, for kubectl.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// The lab's files: logs, kubeconfigs, the audit log.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn admin(&self) -> &Credentials {
        &self.control_plane.admin
    }

    /// Credentials of a service account. The account is created if it does not exist.
    pub async fn credentials(&self, namespace: &str, account: &str) -> Result<Credentials> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        if accounts.get_opt(account).await?.is_none() {
            let mut object = ServiceAccount::default();
            object.metadata.name = Some(account.to_owned());
            accounts.create(&PostParams::default(), &object).await.context("creating a service account")?;
        }
        service_account_credentials(self.admin(), &self.client, namespace, account, None).await
    }

    /// Creates a namespace, and grants a service account the `rules` of a Role in it.
    pub async fn grant(&self, namespace: &str, account: &str, rules: &Value) -> Result<()> {
        let group = "rbac.authorization.k8s.io";
        let metadata = json!({"name": account, "namespace": namespace});
        let role = json!({"apiVersion": format!("{group}/v1"), "kind": "Role", "metadata": metadata, "rules": rules});
        let binding = json!({
            "apiVersion": format!("{group}/v1"),
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": account},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        });
        let namespace_object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        manifests::create(&self.client, &[namespace_object, role, binding]).await
    }

    /// Replaces the rules of [`Lab::grant`].
    pub async fn change_grant(&self, namespace: &str, account: &str, rules: &Value) -> Result<()> {
        let roles: Api<Role> = Api::namespaced(self.client.clone(), namespace);
        roles
            .patch(account, &PatchParams::default(), &Patch::Merge(json!({"rules": rules})))
            .await
            .context("changing a Role")?;
        Ok(())
    }

    /// A client with the token of a node's virt-handler pod.
    pub async fn virt_handler_client(&self, node: &str) -> Result<Client> {
        self.virt_handler.identity(node).await
    }

    /// Starts one of our programs with its own service account, address and log file.
    pub async fn run(&self, options: OperatorProcessOptions) -> Result<OperatorProcess> {
        let number = self.programs.fetch_add(1, Ordering::Relaxed);
        let mut credentials = self.credentials(&options.namespace, &options.service_account).await?;
        if options.through_proxy {
            credentials = credentials.through(self.proxy.addr());
        }
        OperatorProcess::start(&options, &credentials, self.address_range.program(number), &self.folder, number)
    }

    /// The address of the second API server, for [`Credentials::through`].
    pub fn second_api_server(&self) -> Result<SocketAddr> {
        let second = self.control_plane.second_api_server.as_ref();
        second.map(|second| second.address).context("the lab was started without a second API server")
    }

    /// Every request that the API servers have received so far.
    pub fn audit(&self) -> Result<Vec<Record>> {
        let mut records = audit::read(&self.control_plane.audit_log)?;
        if let Some(second) = &self.control_plane.second_api_server {
            records.extend(audit::read(&second.audit_log)?);
            records.sort_by_key(|record| record.time);
        }
        Ok(records)
    }

    /// The proxy in front of the API server, for rules that make requests fail.
    pub fn proxy(&self) -> &FaultProxy {
        &self.proxy
    }

    /// Changes how pods behave from now on.
    pub fn set_pods(&self, change: impl FnOnce(&mut PodBehaviour)) {
        self.pods.send_modify(change);
    }

    /// Whether the process of a pod answers its readiness probe now. None if the pod is only simulated or has no probe.
    pub async fn answers(&self, pod: &Pod) -> Option<bool> {
        kubelet::answers(pod, &self.programs_of_pods.borrow().clone()).await
    }

    /// GETs a path from the process of a pod, over TLS without checking its certificate. Returns the status and the body.
    pub async fn get_from_pod(&self, pod: &Pod, port: u16, path: &str) -> Result<(u16, String)> {
        let address: IpAddr = pod
            .status
            .as_ref()
            .and_then(|status| status.pod_ip.as_deref()?.parse().ok())
            .context("the pod has no address")?;
        let stream = TcpStream::connect((address, port)).await.with_context(|| format!("connecting to port {port}"))?;
        let response = get_over_tls(stream, address, path, None).await?;
        Ok((response.status(), response.text().await?))
    }

    /// Never again updates the Secrets and ConfigMaps that running pods mount, as if their programs did not read the
    /// files again. It applies to the pods of the namespace whose name or image contains this text; pods that are
    /// created later are not affected. Returns the names of the pods.
    pub async fn freeze_volumes(&self, namespace: &str, name_or_image: &str) -> Result<Vec<String>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let selected = pods.list(&ListParams::default()).await?.items.into_iter().filter(|pod| {
            let images =
                pod.spec.iter().flat_map(|spec| &spec.containers).filter_map(|container| container.image.as_ref());
            pod.name_any().contains(name_or_image) || images.into_iter().any(|image| image.contains(name_or_image))
        });
        Ok(selected
            .map(|pod| {
                self.frozen.add(pod.uid().unwrap_or_default());
                pod.name_any()
            })
            .collect())
    }

    /// Changes how guests behave from now on. Simulated KubeVirt uses the options of the lab only.
    pub fn set_guests(&self, change: impl FnOnce(&mut GuestBehaviour)) {
        self.guests.send_modify(change);
    }

    /// Makes a guest shut down or crash.
    pub async fn end_guest(&self, namespace: &str, name: &str, end: GuestEnd) -> Result<()> {
        self.virt_handler.end(namespace, name, end).await
    }

    pub async fn install(&self, extension: Extension) -> Result<()> {
        extensions::install(&self.client, extension).await
    }

    /// Creates the objects of a YAML text.
    pub async fn create(&self, yaml: &str) -> Result<()> {
        manifests::create(&self.client, &manifests::parse(yaml)?).await
    }

    pub async fn stop_api_server(&self) -> Result<()> {
        self.control_plane.api_server.stop(Signal::SIGKILL).await
    }

    /// Starts the API server and returns when it is ready.
    pub async fn start_api_server(&self) -> Result<()> {
        self.control_plane.resume_api_server(&self.health).await
    }

    pub async fn stop_etcd(&self) -> Result<()> {
        self.control_plane.etcd.stop(Signal::SIGKILL).await
    }

    pub async fn start_etcd(&self) -> Result<()> {
        self.control_plane.etcd.resume()
    }

    /// The server processes by name, for tests that kill one.
    pub fn servers(&self) -> Vec<(&'static str, &ServerProcess)> {
        let mut servers = vec![
            ("etcd", &self.control_plane.etcd),
            ("kube-apiserver", &self.control_plane.api_server),
            ("kube-controller-manager", &self.control_plane.controller_manager),
            ("kube-scheduler", &self.control_plane.scheduler),
        ];
        servers.extend(
            self.control_plane.second_api_server.as_ref().map(|second| ("second-kube-apiserver", &second.process)),
        );
        servers
    }

    /// Runs `work`. If it fails, keeps the lab's logs and adds their location to the error.
    pub async fn keeping_logs<T>(&self, name: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        let result = work.await;
        if result.is_err() {
            let log_folder = paths::failures_dir()?.join(name);
            let _ = std::fs::remove_dir_all(&log_folder);
            harness::copy_logs(&self.folder, &log_folder)?;
            return result.with_context(|| format!("the lab's logs are kept in {}", log_folder.display()));
        }
        result
    }

    /// Copies the lab's logs to another folder.
    pub fn copy_logs(&self, to: &Path) -> Result<()> {
        harness::copy_logs(&self.folder, to)
    }

    /// The health of the lab's own processes.
    pub fn health(&self) -> &LabHealth {
        &self.health
    }

    /// Waits until an object, or its absence, satisfies `condition`. Returns an error if the lab fails, or at the
    /// timeout with the last state of the object.
    pub async fn wait<K>(
        &self,
        what: &str,
        timeout: Duration,
        api: Api<K>,
        name: &str,
        condition: impl Fn(Option<&K>) -> bool + Send + Sync,
    ) -> Result<Option<K>>
    where
        K: kube::Resource + Clone + serde::de::DeserializeOwned + serde::Serialize + std::fmt::Debug + Send + 'static,
    {
        let done = kube::runtime::wait::await_condition(api.clone(), name, |object: Option<&K>| condition(object));
        let waited = self.health.guard(async {
            match tokio::time::timeout(timeout, done).await {
                Ok(result) => result.context("watching").map(Some),
                Err(_) => Ok(None),
            }
        });
        if let Some(object) = waited.await? {
            return Ok(object);
        }
        let last: Option<Value> = api.get_opt(name).await?.and_then(|object| serde_json::to_value(object).ok());
        bail!(
            "{what}: timed out after {timeout:?}; {name} is {}",
            last.map_or("absent".to_owned(), |last| last.to_string())
        )
    }

    /// Stops all processes in a safe order. Dropping the lab kills them all at the same time.
    pub async fn stop(mut self) -> Result<()> {
        self.simulators.shutdown().await;
        self.control_plane.stop().await
    }
}

/// Stops servers and simulators first, so that nothing writes into a folder that is being removed. The files are on a
/// tmpfs. Only the logs are kept, until the test has succeeded.
impl Drop for Lab {
    fn drop(&mut self) {
        self.simulators.abort_all();
        let pids: Vec<u32> =
            self.servers().iter().filter_map(|(_, server)| u32::try_from(server.pid()?).ok()).collect();
        for (_, server) in self.servers() {
            server.kill();
        }
        let killed = Instant::now();
        while killed.elapsed() < KILL_TIMEOUT && pids.iter().any(|pid| process_table::find(*pid).is_some()) {
            std::thread::sleep(Duration::from_millis(2));
        }
        if let Some(test) = self.test
            && let Err(error) = save_logs(&self.folder, test)
        {
            tracing::warn!("cannot save the logs of {}: {error:#}", self.folder.display());
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A killed process disappears within milliseconds.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

fn save_logs(folder: &Path, test: &str) -> Result<()> {
    // A test may start several labs one after the other, with the same number.
    static ENDED: AtomicU32 = AtomicU32::new(0);
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let target = paths::stopped_labs_dir(test)?.join(format!("{name}-ended-{}", ENDED.fetch_add(1, Ordering::Relaxed)));
    std::fs::create_dir_all(&target).with_context(|| format!("creating {}", target.display()))?;
    for what in ["logs"].into_iter().chain(audit::LOGS) {
        let from = folder.join(what);
        if from.exists() {
            std::fs::rename(&from, target.join(what)).with_context(|| format!("moving {}", from.display()))?;
        }
    }
    Ok(())
}

async fn prepare_cluster(
    client: &Client,
    address_range: &AddressRange,
    nodes: u8,
    extensions: &[Extension],
) -> Result<()> {
    for number in 1..=nodes {
        node::create(client, address_range, number).await?;
    }
    storage::create_classes(client).await?;
    for extension in extensions {
        extensions::install(client, *extension).await?;
    }
    Ok(())
}
