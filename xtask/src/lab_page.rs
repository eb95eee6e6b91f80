//! `cargo xtask lab page`: the status page of an operator in a browser of this machine.
//!
//! A lab has its own network, which no program of the machine reaches. This process opens its listener in the network of
//! the machine and then joins the network of the lab: the listener stays where it is, and new connections go to the lab.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    Api, Client, Config, ResourceExt,
    api::ListParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::net::TcpStream;
use vitivirt_lab::{daemon, loopback};

/// The port of the status page, in the pods and by default also on this machine.
pub(crate) const PORT: u16 = 8082;

#[derive(Args)]
pub(crate) struct PageOptions {
    /// Name of the lab
    #[arg(long, default_value = "default")]
    name: String,
    /// Operator whose page is shown
    #[arg(long, value_enum, default_value_t = PageOperator::KubevirtOperator)]
    operator: PageOperator,
    /// Port on 127.0.0.1 of this machine
    #[arg(long, default_value_t = PORT)]
    port: u16,
}

#[derive(Clone, Copy, ValueEnum)]
enum PageOperator {
    KubevirtOperator,
    VirtOperator,
}

impl PageOperator {
    fn namespace(self) -> &'static str {
        match self {
            PageOperator::KubevirtOperator => "kubevirt-operator-system",
            PageOperator::VirtOperator => "kubevirt",
        }
    }

    fn labels(self) -> &'static str {
        match self {
            PageOperator::KubevirtOperator => "app.kubernetes.io/name=kubevirt-operator",
            PageOperator::VirtOperator => "kubevirt.io=virt-operator",
        }
    }

    /// Also the name of its Lease.
    fn name(self) -> &'static str {
        match self {
            PageOperator::KubevirtOperator => "kubevirt-operator",
            PageOperator::VirtOperator => "virt-operator",
        }
    }
}

/// Runs until it is interrupted.
pub(crate) fn run(options: &PageOptions) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, options.port))
        .with_context(|| format!("listening on 127.0.0.1:{}; choose another port with --port", options.port))?;
    let address = listener.local_addr().context("reading the address of the listener")?;
    let kubeconfig = daemon::enter_network(&options.name)?;
    let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
    runtime.block_on(async {
        let client = client(&kubeconfig).await?;
        // Fails before a browser is opened.
        page_address(&client, options.operator).await?;
        eprintln!("The page of {} is at http://localhost:{}", options.operator.name(), address.port());
        eprintln!("Ctrl-C ends this command.");
        serve(listener, &client, options.operator).await
    })
}

async fn client(kubeconfig: &Path) -> Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig).with_context(|| format!("reading {}", kubeconfig.display()))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

async fn serve(listener: TcpListener, client: &Client, operator: PageOperator) -> Result<()> {
    listener.set_nonblocking(true).context("preparing the listener")?;
    let listener = tokio::net::TcpListener::from_std(listener).context("preparing the listener")?;
    loop {
        let (browser, _) = listener.accept().await.context("accepting a connection")?;
        let client = client.clone();
        tokio::spawn(async move {
            if let Err(error) = connect(browser, &client, operator).await {
                eprintln!("error: {error:#}");
            }
        });
    }
}

async fn connect(mut browser: TcpStream, client: &Client, operator: PageOperator) -> Result<()> {
    // For each connection, because the leader may have changed.
    let address = page_address(client, operator).await?;
    let mut page = TcpStream::connect(address).await.with_context(|| {
        format!(
            "connecting to the page of {} at {address} in the lab; only operators of this project have a page",
            operator.name()
        )
    })?;
    // A browser may close its connection at any time.
    let _ = tokio::io::copy_bidirectional(&mut browser, &mut page).await;
    Ok(())
}

/// The address of the leader's page, or of another pod's if there is no leader.
async fn page_address(client: &Client, operator: PageOperator) -> Result<SocketAddr> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), operator.namespace());
    let pods = pods.list(&ListParams::default().labels(operator.labels())).await.context("listing the pods")?;
    let leases: Api<Lease> = Api::namespaced(client.clone(), operator.namespace());
    let lease = leases.get_opt(operator.name()).await.context("reading the lease")?;
    let leader = lease.and_then(|lease| lease.spec?.holder_identity).unwrap_or_default();
    let address = choose(&pods.items, &leader).with_context(|| {
        format!("no pod of {} runs in the lab; start one with `cargo xtask lab up --kubevirt ours`", operator.name())
    })?;
    Ok(SocketAddr::new(loopback(address), PORT))
}

/// The identity of a leader begins with the name of its pod.
fn choose(pods: &[Pod], leader: &str) -> Option<IpAddr> {
    let address = |pod: &Pod| -> Option<IpAddr> {
        let status = pod.status.as_ref()?;
        (status.phase.as_deref() == Some("Running")).then(|| status.pod_ip.as_ref()?.parse().ok())?
    };
    let of_leader = pods.iter().filter(|pod| leader.starts_with(&pod.name_any())).find_map(address);
    of_leader.or_else(|| pods.iter().find_map(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_the_leader_is_chosen() {
        let pod = |name: &str, phase: &str, address: &str| -> Pod {
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": name}, "status": {"phase": phase, "podIP": address},
            }))
            .unwrap()
        };
        let pods = [pod("a", "Pending", "10.1.2.1"), pod("b", "Running", "10.1.2.2"), pod("c", "Running", "10.1.2.3")];
        let chosen = |leader: &str| choose(&pods, leader).map(|address| address.to_string());
        assert_eq!(chosen("c_1f2e").as_deref(), Some("10.1.2.3"));
        assert_eq!(chosen("a_1f2e").as_deref(), Some("10.1.2.2"));
        assert_eq!(chosen("").as_deref(), Some("10.1.2.2"));
        assert_eq!(choose(&pods[..1], ""), None);
    }
}
