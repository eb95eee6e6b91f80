//! etcd, kube-apiserver, kube-controller-manager and kube-scheduler of one lab: real programs, each on its own address. A
//! second kube-apiserver on the same etcd is an option.

mod certificates;
mod lagging_etcd;

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use certificates::{Certificates, FRONT_PROXY};
use lagging_etcd::LaggingEtcd;
pub use lagging_etcd::{ApiServerLag, LagScope};
use nix::sys::signal::Signal;

use crate::{
    addresses::{AddressRange, require_free},
    audit,
    components::{self, ComponentGroup},
    credentials::Credentials,
    hex::hex,
    server_process::{LabHealth, ServerCommand, ServerProcess, log_tail},
};

pub(crate) struct ControlPlane {
    pub(crate) etcd: ServerProcess,
    pub(crate) api_server: ServerProcess,
    pub(crate) second_api_server: Option<SecondApiServer>,
    pub(crate) controller_manager: ServerProcess,
    pub(crate) scheduler: ServerProcess,
    pub(crate) certificates: Certificates,
    /// A member of system:masters. Only the lab itself uses it.
    pub(crate) admin: Credentials,
    pub(crate) audit_log: PathBuf,
}

/// An API server with the same data, certificates and tokens as the first one.
pub(crate) struct SecondApiServer {
    pub(crate) process: ServerProcess,
    pub(crate) address: SocketAddr,
    pub(crate) audit_log: PathBuf,
    _etcd: LaggingEtcd,
}

/// The options of a lab that concern its servers.
pub(crate) struct ControlPlaneOptions {
    pub(crate) endpoints_lag: Duration,
    pub(crate) second_api_server: Option<ApiServerLag>,
}

/// Metadata of every request, without bodies: user, verb, object, time and result.
const AUDIT_POLICY: &str = r#"{"apiVersion":"audit.k8s.io/v1","kind":"Policy","omitStages":["RequestReceived"],"rules":[{"level":"Metadata"}]}"#;
const ADMIN: &str = "lab-admin";
const START_TIMEOUT: Duration = Duration::from_secs(90);

impl ControlPlane {
    pub(crate) async fn start(
        folder: &Path,
        address_range: &AddressRange,
        options: &ControlPlaneOptions,
        health: &LabHealth,
    ) -> Result<Self> {
        let api = address_range.api_server();
        require_free("kube-apiserver", api)?;
        let second = address_range.second_api_server();
        let certificates =
            Certificates::generate(&folder.join("certificates"), &[api.ip(), second.ip()], address_range.proxy().ip())?;
        let token = random_token()?;
        let admin = Credentials { server: api, ca_pem: certificates.ca_pem.clone(), token, name: ADMIN.to_owned() };
        write(folder, "tokens.csv", &format!("{},{ADMIN},{ADMIN},\"system:masters\"\n", admin.token))?;
        write(folder, "audit-policy.json", AUDIT_POLICY)?;
        let kubeconfig = folder.join("admin.kubeconfig");
        admin.write(&kubeconfig)?;
        let audit_log = folder.join(audit::LOG);

        let start_as = |group, program: &str, name: &str, arguments: Vec<String>| -> Result<ServerProcess> {
            let command = ServerCommand {
                name: name.to_owned(),
                program: components::binary(group, program)?,
                arguments,
                // More memory and less CPU time for garbage collection. The programs of pods use the default.
                environment: vec![("GOGC".to_owned(), "400".to_owned())],
                log: folder.join("logs").join(format!("{name}.log")),
                restarts: matches!(name, "kube-controller-manager" | "kube-scheduler"),
            };
            ServerProcess::start(command, health)
        };
        let start = |group, name: &str, arguments| start_as(group, name, name, arguments);
        let services = address_range.services();
        let server = |address, etcd, audit_log| ApiServerAddresses { address, etcd, services: &services, audit_log };

        let etcd = start(ComponentGroup::Etcd, "etcd", etcd_arguments(folder, address_range.etcd()))?;
        let api_server = start(
            ComponentGroup::Kubernetes,
            "kube-apiserver",
            api_server_arguments(folder, &server(api, address_range.etcd(), &audit_log), &certificates),
        )?;
        health.guard(wait_ready(&admin, &api_server)).await?;
        let controller_manager = start(
            ComponentGroup::Kubernetes,
            "kube-controller-manager",
            controller_manager_arguments(
                &kubeconfig,
                address_range.controller_manager(),
                &certificates,
                options.endpoints_lag,
            ),
        )?;
        let scheduler = start(
            ComponentGroup::Kubernetes,
            "kube-scheduler",
            scheduler_arguments(&kubeconfig, address_range.scheduler()),
        )?;
        let second_api_server = match options.second_api_server {
            None => None,
            Some(lag) => {
                let etcd = address_range.lagging_etcd();
                let proxy = LaggingEtcd::start(etcd, address_range.etcd(), lag).await?;
                let audit_log = folder.join(audit::SECOND_LOG);
                let process = start_as(
                    ComponentGroup::Kubernetes,
                    "kube-apiserver",
                    "second-kube-apiserver",
                    api_server_arguments(folder, &server(second, etcd, &audit_log), &certificates),
                )?;
                health.guard(wait_ready(&admin.through(second), &process)).await?;
                Some(SecondApiServer { process, address: second, audit_log, _etcd: proxy })
            }
        };
        Ok(ControlPlane {
            etcd,
            api_server,
            second_api_server,
            controller_manager,
            scheduler,
            certificates,
            admin,
            audit_log,
        })
    }

    /// Starts the API server again and waits until it is ready.
    pub(crate) async fn resume_api_server(&self, health: &LabHealth) -> Result<()> {
        self.api_server.resume()?;
        health.guard(wait_ready(&self.admin, &self.api_server)).await
    }

    /// Stops the writers first, then the API server, then etcd, so that no write is lost.
    pub(crate) async fn stop(&self) -> Result<()> {
        self.scheduler.stop(Signal::SIGKILL).await?;
        self.controller_manager.stop(Signal::SIGKILL).await?;
        if let Some(second) = &self.second_api_server {
            second.process.stop(Signal::SIGKILL).await?;
        }
        self.api_server.stop(Signal::SIGKILL).await?;
        self.etcd.stop(Signal::SIGKILL).await
    }
}

async fn wait_ready(admin: &Credentials, api_server: &ServerProcess) -> Result<()> {
    let client = admin.client("lab")?;
    let started = Instant::now();
    loop {
        let request = http::Request::get("/readyz").body(Vec::new()).context("building a request")?;
        let response = tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await;
        if matches!(response, Ok(Ok(ref text)) if text == "ok") {
            return Ok(());
        }
        if started.elapsed() > START_TIMEOUT {
            bail!(
                "kube-apiserver was not ready within {START_TIMEOUT:?}; end of its log: {}",
                log_tail(api_server.log())
            );
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn etcd_arguments(folder: &Path, client: SocketAddr) -> Vec<String> {
    let peer = SocketAddr::new(client.ip(), 2380);
    vec![
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls=http://{client}"),
        format!("--advertise-client-urls=http://{client}"),
        format!("--listen-peer-urls=http://{peer}"),
        format!("--initial-advertise-peer-urls=http://{peer}"),
        format!("--initial-cluster=default=http://{peer}"),
        // The data of a lab is temporary. Syncing it to disk would only slow the lab down.
        "--unsafe-no-fsync=true".to_owned(),
        "--quota-backend-bytes=4294967296".to_owned(),
        "--log-level=warn".to_owned(),
    ]
}

struct ApiServerAddresses<'a> {
    address: SocketAddr,
    etcd: SocketAddr,
    services: &'a str,
    audit_log: &'a Path,
}

fn api_server_arguments(folder: &Path, server: &ApiServerAddresses<'_>, certificates: &Certificates) -> Vec<String> {
    let address = server.address;
    vec![
        format!("--etcd-servers=http://{}", server.etcd),
        format!("--secure-port={}", address.port()),
        format!("--bind-address={}", address.ip()),
        format!("--advertise-address={}", address.ip()),
        format!("--cert-dir={}", folder.join("certificates").display()),
        format!("--tls-cert-file={}", certificates.path("apiserver.crt")),
        format!("--tls-private-key-file={}", certificates.path("apiserver.key")),
        format!("--token-auth-file={}", folder.join("tokens.csv").display()),
        "--authorization-mode=RBAC".to_owned(),
        // Some distributions enable it, such as OpenShift: an owner reference that blocks the deletion of its owner needs
        // the permission to update the owner's finalizers.
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={}", certificates.path("service-account.pub")),
        format!("--service-account-signing-key-file={}", certificates.path("service-account.key")),
        format!("--service-cluster-ip-range={}", server.services),
        "--allow-privileged=true".to_owned(),
        // The names of nodes cannot be resolved.
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        // Otherwise the API server would call Services at their cluster IPs, and the lab has no kube-proxy.
        "--enable-aggregator-routing=true".to_owned(),
        format!("--requestheader-client-ca-file={}", certificates.path("front-proxy-ca.crt")),
        format!("--requestheader-allowed-names={FRONT_PROXY}"),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        format!("--proxy-client-cert-file={}", certificates.path("front-proxy.crt")),
        format!("--proxy-client-key-file={}", certificates.path("front-proxy.key")),
        format!("--audit-policy-file={}", folder.join("audit-policy.json").display()),
        format!("--audit-log-path={}", server.audit_log.display()),
        "--audit-log-mode=blocking".to_owned(),
        // In megabytes. By default the API server rotates the log at 100 MB, and a benchmark writes more.
        "--audit-log-maxsize=100000".to_owned(),
    ]
}

fn controller_manager_arguments(
    kubeconfig: &Path,
    address: IpAddr,
    certificates: &Certificates,
    endpoints_lag: Duration,
) -> Vec<String> {
    let endpoints_lag = endpoints_lag.as_millis();
    vec![
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--bind-address={address}"),
        // The lab does not renew node leases, so the node lifecycle controller would evict all pods.
        "--controllers=*,-nodelifecycle,-node-lifecycle-controller".to_owned(),
        format!("--service-account-private-key-file={}", certificates.path("service-account.key")),
        format!("--root-ca-file={}", certificates.path("ca.crt")),
        "--leader-elect=false".to_owned(),
        "--kube-api-qps=500".to_owned(),
        "--kube-api-burst=1000".to_owned(),
        "--pvclaimbinder-sync-period=5s".to_owned(),
        // The controllers wait this long after a change of a pod before they write.
        format!("--endpoint-updates-batch-period={endpoints_lag}ms"),
        format!("--endpointslice-updates-batch-period={endpoints_lag}ms"),
    ]
}

fn scheduler_arguments(kubeconfig: &Path, address: IpAddr) -> Vec<String> {
    vec![
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--bind-address={address}"),
        "--leader-elect=false".to_owned(),
        "--kube-api-qps=500".to_owned(),
        "--kube-api-burst=1000".to_owned(),
    ]
}

fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    std::fs::create_dir_all(folder.join("logs")).context("creating the log folder")?;
    std::fs::write(folder.join(name), text).with_context(|| format!("writing {name}"))
}

fn random_token() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("reading random bytes from the kernel")?;
    Ok(hex(&bytes))
}
