//! The addresses at which other clusters reach virt-synchronization-controller: those of its leader pod, which its
//! Lease names. The addresses are on the migration network if the pod has one. The Lease and the pods are watched only
//! while the component is installed.

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

use crate::{lazy_watch::LazyWatch, router::EventRouter};

const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
const MIGRATION_INTERFACE: &str = "migration0";
/// The status lists at most this many addresses. A pod usually has one address of each IP family.
const MAX_ADDRESSES: usize = 8;

pub(crate) struct MigrationAddresses {
    /// The name of the leader pod.
    leases: LazyWatch<String>,
    pods: LazyWatch<Vec<IpAddr>>,
}

impl MigrationAddresses {
    pub(crate) fn new(context: &Context, router: &Arc<EventRouter>) -> Self {
        Self {
            leases: LazyWatch::new(context.clone(), router.clone()),
            pods: LazyWatch::new(context.clone(), router.clone()),
        }
    }

    /// Addresses with the port, as `address:port`. Empty while no pod leads.
    pub(crate) async fn addresses(&self, config: &DeploymentConfig) -> Result<Vec<String>, Failure> {
        let (namespace, name) = (config.namespace.as_str(), VIRT_SYNCHRONIZATION_CONTROLLER);
        let leases = self
            .leases
            .get::<Lease>(
                "Lease of virt-synchronization-controller",
                |context| Api::namespaced(context.clients.rate_limited.clone(), namespace),
                || WatchConfig { fields: Some(format!("metadata.name={name}")), ..WatchConfig::default() },
                |lease| lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default(),
            )
            .await?;
        let pods = self
            .pods
            .get::<Pod>(
                "Pods of virt-synchronization-controller",
                |context| Api::namespaced(context.clients.rate_limited.clone(), namespace),
                || WatchConfig::labels(Expression::Equal("kubevirt.io".to_owned(), name.to_owned())),
                |pod| pod_addresses(&pod),
            )
            .await?;
        let Some(leader) = leases.get(&ObjectKey::namespaced(namespace, name)) else { return Ok(Vec::new()) };
        let Some(addresses) = pods.get(&ObjectKey::namespaced(namespace, &leader)) else { return Ok(Vec::new()) };
        let port = config.synchronization_port();
        let with_port = |address: &IpAddr| match address {
            IpAddr::V4(address) => format!("{address}:{port}"),
            IpAddr::V6(address) => format!("[{address}]:{port}"),
        };
        Ok(addresses.iter().map(with_port).collect())
    }

    pub(crate) fn close(&self) {
        self.leases.close();
        self.pods.close();
    }
}

/// One element of the annotation in which Multus describes a pod's networks.
#[derive(Deserialize)]
struct NetworkStatus {
    #[serde(default)]
    interface: String,
    #[serde(default)]
    ips: Vec<String>,
}

/// The addresses on the migration network, or those of the pod network if there are none.
fn pod_addresses(pod: &Pod) -> Vec<IpAddr> {
    let parse = |text: &str| text.parse().ok();
    let annotation = pod.metadata.annotations.as_ref().and_then(|annotations| annotations.get(NETWORK_STATUS));
    let networks: Vec<NetworkStatus> = annotation.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let migration = networks.iter().find(|network| network.interface == MIGRATION_INTERFACE);
    let on_migration_network: Vec<IpAddr> =
        migration.into_iter().flat_map(|network| &network.ips).filter_map(|ip| parse(ip)).collect();
    if !on_migration_network.is_empty() {
        return on_migration_network.into_iter().take(MAX_ADDRESSES).collect();
    }
    let pod_ips = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
    pod_ips.filter_map(|address| parse(&address.ip)).take(MAX_ADDRESSES).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed_addresses(pod: serde_json::Value) -> Vec<String> {
        let pod: Pod = serde_json::from_value(pod).unwrap();
        pod_addresses(&pod).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn addresses_on_the_migration_network_are_preferred() {
        let status = json!({"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]});
        assert_eq!(parsed_addresses(json!({"status": status})), ["10.0.0.1", "fd00::1"]);
        let network =
            json!([{"interface": "eth0", "ips": ["10.0.0.1"]}, {"interface": "migration0", "ips": ["192.168.1.2"]}]);
        let annotated = |text: String| json!({"metadata": {"annotations": {NETWORK_STATUS: text}}, "status": status});
        assert_eq!(parsed_addresses(annotated(network.to_string())), ["192.168.1.2"]);
        assert_eq!(parsed_addresses(annotated("not json".to_owned())), ["10.0.0.1", "fd00::1"]);
    }
}
