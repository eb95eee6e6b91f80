//! The metrics that the alerts and dashboards of a KubeVirt release query. They have the names that upstream
//! virt-operator gives them.

use std::sync::Arc;

use prometheus_client::metrics::gauge::Gauge;
use vitivirt_api::kubevirt::KubeVirt;
use vitivirt_runtime::metrics::Metrics;

#[derive(Default)]
pub(crate) struct OperatorMetrics {
    ready: Gauge,
    leading: Gauge,
    emulation: Gauge,
}

impl OperatorMetrics {
    pub(crate) fn register(metrics: &Metrics) -> Arc<Self> {
        let registered = Arc::new(Self::default());
        metrics.register_as_named(|registry| {
            registry.register(
                "kubevirt_virt_operator_ready_status",
                "1 if the caches of this replica are synced, so that it can become the leader",
                registered.ready.clone(),
            );
            registry.register(
                "kubevirt_virt_operator_leading_status",
                "1 if this replica is the leader",
                registered.leading.clone(),
            );
            registry.register(
                "kubevirt_configuration_emulation_enabled",
                "1 if software emulation of virtual machines is allowed",
                registered.emulation.clone(),
            );
        });
        registered
    }

    pub(crate) fn set_ready(&self) {
        self.ready.set(1);
    }

    pub(crate) fn set_leading(&self, leads: bool) {
        self.leading.set(i64::from(leads));
    }

    pub(crate) fn set_emulation(&self, kubevirt: &KubeVirt) {
        let developer = kubevirt.spec.configuration.developer_configuration.as_ref();
        self.emulation.set(i64::from(developer.and_then(|developer| developer.use_emulation) == Some(true)));
    }
}
