//! The metrics that the alerts and dashboards of a KubeVirt release query. They have the names that upstream
//! virt-operator gives them.

use std::sync::Arc;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
};
use vitivirt_api::kubevirt::KubeVirt;
use vitivirt_runtime::metrics::Metrics;

#[derive(Default)]
pub(crate) struct OperatorMetrics {
    ready: Gauge,
    leading: Gauge,
    emulation: Gauge,
    certificate_expiry: Family<CertificateLabels, Gauge>,
}

/// The Secrets of certificates have fixed names.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct CertificateLabels {
    pub(crate) secret: String,
    /// `true` for the certificate that pods serve, `false` for the one in the Secret.
    pub(crate) served: &'static str,
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
            registry.register(
                "kubevirt_virt_operator_certificate_expiry_seconds",
                "Seconds until a certificate expires: the one in the Secret, and the first to expire of those that pods \
                 serve",
                registered.certificate_expiry.clone(),
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

    /// Replaces the values of all certificates.
    pub(crate) fn set_certificate_expiry(&self, seconds: impl IntoIterator<Item = (CertificateLabels, i64)>) {
        self.certificate_expiry.clear();
        for (labels, seconds) in seconds {
            self.certificate_expiry.get_or_create(&labels).set(seconds);
        }
    }

    pub(crate) fn set_emulation(&self, kubevirt: &KubeVirt) {
        let developer = kubevirt.spec.configuration.developer_configuration.as_ref();
        self.emulation.set(i64::from(developer.and_then(|developer| developer.use_emulation) == Some(true)));
    }
}
