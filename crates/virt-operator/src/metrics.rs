//! What the release's alerts and dashboards look for, under the names that the reference gives them.

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
        let own = Arc::new(Self::default());
        metrics.register_as_named(|registry| {
            registry.register(
                "kubevirt_virt_operator_ready_status",
                "1 when this replica knows the cluster and can lead",
                own.ready.clone(),
            );
            registry.register(
                "kubevirt_virt_operator_leading_status",
                "1 while this replica leads",
                own.leading.clone(),
            );
            registry.register(
                "kubevirt_configuration_emulation_enabled",
                "1 if virtual machines may be emulated in software",
                own.emulation.clone(),
            );
        });
        own
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
