//! The metrics that the alerts and dashboards of a KubeVirt release query. They have the names that upstream
//! virt-operator gives them.

use std::sync::Arc;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
};
use vitivirt_api::kubevirt::KubeVirt;
use vitivirt_runtime::metrics::Metrics;

/// The beginning of the names that upstream does not define.
pub(crate) const PREFIX: &str = "virt_operator";

#[derive(Default)]
pub(crate) struct OperatorMetrics {
    ready: Gauge,
    leading: Gauge,
    emulation: Gauge,
    certificate_expiry: Family<CertificateLabels, Gauge>,
    conditions: Family<ConditionLabel, Gauge>,
}

/// The conditions of the KubeVirt resource that a metric shows. The others are true for a moment only, or always.
const CONDITIONS: [&str; 3] = ["Available", "Progressing", "Degraded"];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConditionLabel {
    r#type: &'static str,
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
        metrics.register(|registry| {
            registry.register(
                "kubevirt_condition",
                "1 if the condition of the KubeVirt resource is True, 0 if it is False, by type",
                registered.conditions.clone(),
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

    /// `None`: the KubeVirt resource does not exist.
    pub(crate) fn set_conditions(&self, kubevirt: Option<&KubeVirt>) {
        let conditions = kubevirt.and_then(|kubevirt| Some(&kubevirt.status.as_ref()?.conditions));
        for r#type in CONDITIONS {
            let condition = conditions.into_iter().flatten().find(|condition| condition.condition_type == r#type);
            let label = ConditionLabel { r#type };
            match condition {
                Some(condition) => {
                    self.conditions.get_or_create(&label).set(i64::from(condition.status == "True"));
                }
                None => {
                    self.conditions.remove(&label);
                }
            }
        }
    }

    pub(crate) fn set_emulation(&self, kubevirt: &KubeVirt) {
        let developer = kubevirt.spec.configuration.developer_configuration.as_ref();
        self.emulation.set(i64::from(developer.and_then(|developer| developer.use_emulation) == Some(true)));
    }
}

/// Every metric of virt-operator as OpenMetrics, with at least one series of each.
pub fn metric_samples() -> Result<String, std::fmt::Error> {
    let metrics = Metrics::with_kubevirt_names(PREFIX);
    let own = OperatorMetrics::register(&metrics);
    own.set_certificate_expiry([(CertificateLabels { secret: String::new(), served: "true" }, 0)]);
    own.conditions.get_or_create(&ConditionLabel { r#type: "" }).set(0);
    metrics.encode_samples()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn exported(kubevirt: Option<&KubeVirt>, own: &OperatorMetrics, metrics: &Metrics) -> Vec<String> {
        own.set_conditions(kubevirt);
        let text = metrics.encode().unwrap();
        let mut lines: Vec<String> =
            text.lines().filter_map(|line| line.strip_prefix("t_kubevirt_condition")).map(str::to_owned).collect();
        lines.sort();
        lines
    }

    #[test]
    fn conditions_of_the_resource_are_exported_while_it_has_them() {
        let metrics = Metrics::with_kubevirt_names("t");
        let own = OperatorMetrics::register(&metrics);
        let condition = |kind: &str, status: &str| json!({"type": kind, "status": status});
        let kubevirt: KubeVirt = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt"}, "spec": {},
            "status": {"conditions": [
                condition("Available", "True"), condition("Degraded", "False"), condition("Created", "True"),
            ]},
        }))
        .unwrap();
        let expected = ["{type=\"Available\"} 1", "{type=\"Degraded\"} 0"];
        assert_eq!(exported(Some(&kubevirt), &own, &metrics), expected);
        assert_eq!(exported(None, &own, &metrics), [""; 0], "the resource was deleted");
    }
}
