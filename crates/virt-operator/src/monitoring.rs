//! Finds the namespace of the cluster's monitoring stack: the first of the configured namespaces in which its
//! ServiceAccount exists.
//!
//! The ServiceAccount has the same name in every namespace, so one watch that selects this name is enough. It is open
//! only while a monitoring stack is configured.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, core::PartialObjectMeta};
use vitivirt_api::{Failure, ObjectKey};
use vitivirt_install::DeploymentConfig;
use vitivirt_runtime::{program::Context, watch::WatchConfig};

use crate::{lazy_watch::LazyWatch, router::EventRouter};

pub(crate) struct MonitoringWatches(LazyWatch<()>);

impl MonitoringWatches {
    pub(crate) fn new(context: Context, router: Arc<EventRouter>) -> Self {
        Self(LazyWatch::new(context, router))
    }

    /// `None` if there is no monitoring stack.
    pub(crate) async fn namespace(&self, config: &DeploymentConfig) -> Result<Option<String>, Failure> {
        let Some(account) = config.monitor_account() else {
            self.close();
            return Ok(None);
        };
        let accounts = self
            .0
            .get::<PartialObjectMeta<ServiceAccount>>(
                &format!("ServiceAccount {account}"),
                |context| Api::all(context.clients.rate_limited.clone()),
                || WatchConfig { fields: Some(format!("metadata.name={account}")), ..WatchConfig::default() },
                |_| (),
            )
            .await?;
        let mut namespaces = config.monitor_namespaces().into_iter();
        let found = namespaces.find(|namespace| accounts.get(&ObjectKey::namespaced(namespace, account)).is_some());
        Ok(found.map(ToOwned::to_owned))
    }

    pub(crate) fn close(&self) {
        self.0.close();
    }
}
