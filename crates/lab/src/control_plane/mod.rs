//! etcd, kube-apiserver, kube-controller-manager and kube-scheduler of one lab: real programs on addresses of their own.

mod certificates;

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use certificates::{Certificates, FRONT_PROXY};
use nix::sys::signal::Signal;

use crate::{
    addresses::{AddressRange, require_free},
    components::{self, ComponentGroup},
    credentials::Credentials,
    server_process::{LabHealth, ServerCommand, ServerProcess, last_words},
};

pub(crate) struct ControlPlane {
    pub(crate) etcd: ServerProcess,
    pub(crate) api_server: ServerProcess,
    pub(crate) controller_manager: ServerProcess,
    pub(crate) scheduler: ServerProcess,
    pub(crate) certificates: Certificates,
    /// system:masters; only the lab itself uses it.
    pub(crate) admin: Credentials,
    pub(crate) audit_log: PathBuf,
}

/// Everything but the noise of watch bookmarks and leases' bodies: who did what to which object, when, with what result.
const AUDIT_POLICY: &str = r#"{"apiVersion":"audit.k8s.io/v1","kind":"Policy","omitStages":["RequestReceived"],"rules":[{"level":"Metadata"}]}"#;
const ADMIN: &str = "lab-admin";
const START: Duration = Duration::from_secs(90);

impl ControlPlane {
    pub(crate) async fn start(folder: &Path, address_range: &AddressRange, health: &LabHealth) -> Result<Self> {
        let api = address_range.api_server();
        require_free("kube-apiserver", api)?;
        let certificates = Certificates::make(&folder.join("certificates"), api.ip(), address_range.proxy().ip())?;
        let token = random_token()?;
        let admin = Credentials {
            server: api,
            authority_pem: certificates.authority_pem.clone(),
            token,
            name: ADMIN.to_owned(),
        };
        write(folder, "tokens.csv", &format!("{},{ADMIN},{ADMIN},\"system:masters\"\n", admin.token))?;
        write(folder, "audit-policy.json", AUDIT_POLICY)?;
        let kubeconfig = folder.join("admin.kubeconfig");
        admin.write(&kubeconfig)?;
        let audit_log = folder.join("audit.log");

        let start = |group, name: &str, arguments: Vec<String>| -> Result<ServerProcess> {
            let command = ServerCommand {
                name: name.to_owned(),
                program: components::binary(group, name)?,
                arguments,
                // Memory is plentiful here and processors are not. Pods run as they would anywhere.
                environment: vec![("GOGC".to_owned(), "400".to_owned())],
                log: folder.join("logs").join(format!("{name}.log")),
                gives_up: matches!(name, "kube-controller-manager" | "kube-scheduler"),
            };
            ServerProcess::start(command, health)
        };

        let etcd = start(ComponentGroup::Etcd, "etcd", etcd_arguments(folder, address_range.etcd()))?;
        let api_server = start(
            ComponentGroup::Kubernetes,
            "kube-apiserver",
            api_server_arguments(folder, address_range, &certificates, &audit_log),
        )?;
        health.guard(wait_ready(&admin, &api_server)).await?;
        let controller_manager = start(
            ComponentGroup::Kubernetes,
            "kube-controller-manager",
            controller_manager_arguments(&kubeconfig, address_range.controller_manager(), &certificates),
        )?;
        let scheduler = start(
            ComponentGroup::Kubernetes,
            "kube-scheduler",
            scheduler_arguments(&kubeconfig, address_range.scheduler()),
        )?;
        Ok(ControlPlane { etcd, api_server, controller_manager, scheduler, certificates, admin, audit_log })
    }

    /// Starts the API server again and waits until it answers.
    pub(crate) async fn resume_api_server(&self, health: &LabHealth) -> Result<()> {
        self.api_server.resume()?;
        health.guard(wait_ready(&self.admin, &self.api_server)).await
    }

    /// In the order that loses nothing: first the writers, then the API server, then the store.
    pub(crate) async fn stop(&self) -> Result<()> {
        self.scheduler.stop(Signal::SIGKILL).await?;
        self.controller_manager.stop(Signal::SIGKILL).await?;
        self.api_server.stop(Signal::SIGKILL).await?;
        self.etcd.stop(Signal::SIGKILL).await
    }
}

async fn wait_ready(admin: &Credentials, api_server: &ServerProcess) -> Result<()> {
    let client = admin.client("lab")?;
    let started = Instant::now();
    loop {
        let request = http::Request::get("/readyz").body(Vec::new()).context("building a request")?;
        let answer = tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await;
        if matches!(answer, Ok(Ok(ref text)) if text == "ok") {
            return Ok(());
        }
        if started.elapsed() > START {
            bail!("kube-apiserver was not ready within {START:?}; its last words: {}", last_words(api_server.log()));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn etcd_arguments(folder: &Path, address: IpAddr) -> Vec<String> {
    let client = SocketAddr::new(address, 2379);
    let peer = SocketAddr::new(address, 2380);
    vec![
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls=http://{client}"),
        format!("--advertise-client-urls=http://{client}"),
        format!("--listen-peer-urls=http://{peer}"),
        format!("--initial-advertise-peer-urls=http://{peer}"),
        format!("--initial-cluster=default=http://{peer}"),
        // A lab is thrown away with the machine's memory; waiting for a disk would only slow it down.
        "--unsafe-no-fsync=true".to_owned(),
        "--quota-backend-bytes=4294967296".to_owned(),
        "--log-level=warn".to_owned(),
    ]
}

fn api_server_arguments(
    folder: &Path,
    address_range: &AddressRange,
    certificates: &Certificates,
    audit_log: &Path,
) -> Vec<String> {
    let address = address_range.api_server();
    vec![
        format!("--etcd-servers=http://{}", SocketAddr::new(address_range.etcd(), 2379)),
        format!("--secure-port={}", address.port()),
        format!("--bind-address={}", address.ip()),
        format!("--advertise-address={}", address.ip()),
        format!("--cert-dir={}", folder.join("certificates").display()),
        format!("--tls-cert-file={}", certificates.path("apiserver.crt")),
        format!("--tls-private-key-file={}", certificates.path("apiserver.key")),
        format!("--token-auth-file={}", folder.join("tokens.csv").display()),
        "--authorization-mode=RBAC".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={}", certificates.path("service-account.pub")),
        format!("--service-account-signing-key-file={}", certificates.path("service-account.key")),
        format!("--service-cluster-ip-range={}", address_range.services()),
        "--allow-privileged=true".to_owned(),
        // Without this, Services would be called at cluster addresses that no kube-proxy serves here.
        "--enable-aggregator-routing=true".to_owned(),
        format!("--requestheader-client-ca-file={}", certificates.path("front-proxy-ca.crt")),
        format!("--requestheader-allowed-names={FRONT_PROXY}"),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        "--requestheader-group-headers=X-Remote-ComponentGroup".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        format!("--proxy-client-cert-file={}", certificates.path("front-proxy.crt")),
        format!("--proxy-client-key-file={}", certificates.path("front-proxy.key")),
        format!("--audit-policy-file={}", folder.join("audit-policy.json").display()),
        format!("--audit-log-path={}", audit_log.display()),
        "--audit-log-mode=blocking".to_owned(),
        // In megabytes: one file, whatever a benchmark asks for. By default it would be renamed at 100, and forgotten.
        "--audit-log-maxsize=100000".to_owned(),
    ]
}

fn controller_manager_arguments(kubeconfig: &Path, address: IpAddr, certificates: &Certificates) -> Vec<String> {
    vec![
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--bind-address={address}"),
        // Nobody renews node leases here; node-lifecycle would evict everything.
        "--controllers=*,-nodelifecycle,-node-lifecycle-controller".to_owned(),
        format!("--service-account-private-key-file={}", certificates.path("service-account.key")),
        format!("--root-ca-file={}", certificates.path("ca.crt")),
        "--leader-elect=false".to_owned(),
        "--kube-api-qps=500".to_owned(),
        "--kube-api-burst=1000".to_owned(),
        "--pvclaimbinder-sync-period=5s".to_owned(),
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
    getrandom::fill(&mut bytes).context("asking the kernel for randomness")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
