//! What the KubeVirt resource says about the operator itself: TLS of its endpoints, its log level, some metrics.
//!
//! Every replica applies these settings, whether it leads or not.

use std::sync::Arc;

use vitivirt_install::{Kind, certificates};
use vitivirt_runtime::telemetry::{self, LogLevel};

use crate::{arguments::log_level, cache::Caches, metrics::OperatorMetrics, webhook::ServerTls};

pub(crate) struct OperatorSettings {
    caches: Caches,
    tls: ServerTls,
    metrics: Arc<OperatorMetrics>,
    /// The level of the command line, which the resource may override.
    default_level: LogLevel,
}

impl OperatorSettings {
    pub(crate) fn new(
        caches: Caches,
        tls: ServerTls,
        metrics: Arc<OperatorMetrics>,
        default_level: LogLevel,
    ) -> Arc<Self> {
        Arc::new(Self { caches, tls, metrics, default_level })
    }

    /// Applies the settings whenever the KubeVirt resource or the Secret of this operator's certificate changes.
    pub(crate) fn subscribe(self: &Arc<Self>) {
        let settings = self.clone();
        self.caches.kubevirts.subscribe(move |_| settings.apply());
        for (_, secrets) in self.caches.installed_objects().filter(|(kind, _)| *kind == Kind::Secret) {
            let settings = self.clone();
            secrets.subscribe(move |change| {
                if change.key.name() == certificates::VIRT_OPERATOR {
                    settings.apply();
                }
            });
        }
    }

    fn apply(&self) {
        let kubevirt = self.caches.first_kubevirt();
        self.metrics.set_conditions(kubevirt.as_deref());
        if let Some(kubevirt) = &kubevirt {
            self.metrics.set_emulation(kubevirt);
            let developer = kubevirt.spec.configuration.developer_configuration.as_ref();
            let verbosity = developer.and_then(|developer| developer.log_verbosity.as_ref()?.virt_operator);
            let level = |verbosity: i64| log_level(u8::try_from(verbosity.max(0)).unwrap_or(u8::MAX));
            telemetry::set_level(verbosity.map_or(self.default_level, level));
        }
        let tls = kubevirt.as_ref().and_then(|kubevirt| kubevirt.spec.configuration.tls_configuration.as_ref());
        self.tls.set(self.caches.key_pair(certificates::VIRT_OPERATOR).as_ref(), tls);
    }
}
