//! Where the cluster's monitoring stack is: the first of some namespaces in which its service account exists.
//!
//! The account has the same name everywhere, so one watch by that name tells, and it is opened only where there is a
//! monitoring stack to look for.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, core::PartialObjectMeta};
use vitivirt_api::{Failure, ObjectKey};
use vitivirt_install::DeploymentConfig;
use vitivirt_runtime::{program::Context, watch::WatchConfig};

use crate::{on_demand::OnDemand, router::EventRouter};

pub(crate) struct Monitoring(OnDemand<()>);

impl Monitoring {
    pub(crate) fn new(context: Context, router: Arc<EventRouter>) -> Self {
        Self(OnDemand::new(context, router))
    }

    pub(crate) async fn namespace(&self, config: &DeploymentConfig) -> Result<Option<String>, Failure> {
        let Some(account) = config.monitor_account() else {
            self.close();
            return Ok(None);
        };
        let accounts = self
            .0
            .get::<PartialObjectMeta<ServiceAccount>>(
                account,
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
