//! Where other clusters reach virt-synchronization-controller: at the addresses of the pod that leads, which its Lease
//! names. On the migration network if it has one. It is followed only while that component is installed.

use std::{net::IpAddr, sync::Arc};

use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::Api;
use serde::Deserialize;
use vitivirt_api::{Failure, ObjectKey};
use vitivirt_install::{DeploymentConfig, names::VIRT_SYNCHRONIZATION_CONTROLLER};
use vitivirt_runtime::{
    program::Context,
    watch::{Expression, WatchConfig},
};

use crate::{on_demand::OnDemand, router::EventRouter};

const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
const MIGRATION_INTERFACE: &str = "migration0";
/// A pod has one address of each family.
const MOST_ADDRESSES: usize = 8;

pub(crate) struct Synchronization {
    /// Who leads.
    leases: OnDemand<String>,
    pods: OnDemand<Vec<IpAddr>>,
}

impl Synchronization {
    pub(crate) fn new(context: &Context, router: &Arc<EventRouter>) -> Self {
        Self {
            leases: OnDemand::new(context.clone(), router.clone()),
            pods: OnDemand::new(context.clone(), router.clone()),
        }
    }

    /// With their port. Nothing while nobody leads.
    pub(crate) async fn addresses(&self, config: &DeploymentConfig) -> Result<Vec<String>, Failure> {
        let (namespace, name) = (config.namespace.as_str(), VIRT_SYNCHRONIZATION_CONTROLLER);
        let leases = self
            .leases
            .get::<Lease>(
                "the Lease of virt-synchronization-controller",
                |context| Api::namespaced(context.clients.rate_limited.clone(), namespace),
                || WatchConfig { fields: Some(format!("metadata.name={name}")), ..WatchConfig::default() },
                |lease| lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default(),
            )
            .await?;
        let pods = self
            .pods
            .get::<Pod>(
                "pods of virt-synchronization-controller",
                |context| Api::namespaced(context.clients.rate_limited.clone(), namespace),
                || WatchConfig::labels(Expression::Equal("kubevirt.io".to_owned(), name.to_owned())),
                |pod| addresses(&pod),
            )
            .await?;
        let Some(holder) = leases.get(&ObjectKey::namespaced(namespace, name)) else { return Ok(Vec::new()) };
        let Some(found) = pods.get(&ObjectKey::namespaced(namespace, &holder)) else { return Ok(Vec::new()) };
        let port = config.synchronization_port();
        let with_port = |address: &IpAddr| match address {
            IpAddr::V4(address) => format!("{address}:{port}"),
            IpAddr::V6(address) => format!("[{address}]:{port}"),
        };
        Ok(found.iter().map(with_port).collect())
    }

    pub(crate) fn close(&self) {
        self.leases.close();
        self.pods.close();
    }
}

#[derive(Deserialize)]
struct Network {
    #[serde(default)]
    interface: String,
    #[serde(default)]
    ips: Vec<String>,
}

fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let parse = |text: &str| text.parse().ok();
    let annotation = pod.metadata.annotations.as_ref().and_then(|annotations| annotations.get(NETWORK_STATUS));
    let networks: Vec<Network> = annotation.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let migration = networks.iter().find(|network| network.interface == MIGRATION_INTERFACE);
    let found: Vec<IpAddr> =
        migration.into_iter().flat_map(|network| &network.ips).filter_map(|ip| parse(ip)).collect();
    if !found.is_empty() {
        return found.into_iter().take(MOST_ADDRESSES).collect();
    }
    let own = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
    own.filter_map(|address| parse(&address.ip)).take(MOST_ADDRESSES).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(pod: serde_json::Value) -> Vec<String> {
        let pod: Pod = serde_json::from_value(pod).unwrap();
        addresses(&pod).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_migration_network_comes_first() {
        let status = json!({"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]});
        assert_eq!(of(json!({"status": status})), ["10.0.0.1", "fd00::1"]);
        let network =
            json!([{"interface": "eth0", "ips": ["10.0.0.1"]}, {"interface": "migration0", "ips": ["192.168.1.2"]}]);
        let annotated = |text: String| json!({"metadata": {"annotations": {NETWORK_STATUS: text}}, "status": status});
        assert_eq!(of(annotated(network.to_string())), ["192.168.1.2"]);
        assert_eq!(of(annotated("not json".to_owned())), ["10.0.0.1", "fd00::1"]);
    }
}
