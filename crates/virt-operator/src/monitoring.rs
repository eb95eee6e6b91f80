//! Where the cluster's monitoring stack is: the first of some namespaces in which its service account exists.
//!
//! The account has the same name everywhere, so one watch by that name tells, and it is opened only where there is a
//! monitoring stack to look for.

use std::{sync::Arc, time::Duration};

use api::{Failure, ObjectKey, reason};
use install::DeploymentConfig;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, core::PartialObjectMeta};
use parking_lot::Mutex;
use runtime::{
    program::Context,
    watch::{Cache, Selection, follow},
};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::wake::Wake;

const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Monitoring {
    context: Context,
    wake: Arc<Wake>,
    followed: Mutex<Option<Followed>>,
}

struct Followed {
    account: String,
    accounts: Cache<()>,
    stop: CancellationToken,
}

impl Monitoring {
    pub(crate) fn new(context: Context, wake: Arc<Wake>) -> Self {
        Self { context, wake, followed: Mutex::default() }
    }

    pub(crate) async fn namespace(&self, config: &DeploymentConfig) -> Result<Option<String>, Failure> {
        let account = config.monitor_account();
        let accounts = self.accounts(account);
        if timeout(PATIENCE, accounts.ready()).await.is_err() {
            let message = format!("service accounts with the name {account} cannot be listed yet");
            return Err(Failure::transient(reason::API_SERVER_UNREACHABLE, message));
        }
        let mut namespaces = config.monitor_namespaces().into_iter();
        let found = namespaces.find(|namespace| accounts.get(&ObjectKey::namespaced(namespace, account)).is_some());
        Ok(found.map(ToOwned::to_owned))
    }

    fn accounts(&self, account: &str) -> Cache<()> {
        let mut followed = self.followed.lock();
        if let Some(followed) = followed.as_ref().filter(|followed| followed.account == account) {
            return followed.accounts.clone();
        }
        if let Some(before) = followed.take() {
            before.stop.cancel();
        }
        let stop = self.context.shutdown.child_token();
        let api = Api::<PartialObjectMeta<ServiceAccount>>::all(self.context.clients.ordinary.clone());
        let selection = Selection { fields: Some(format!("metadata.name={account}")), ..Selection::default() };
        let (accounts, following) = follow(api, selection, &[], |_| (), self.wake.on(Wake::changed), stop.clone());
        self.context.spawn("monitoring accounts", following);
        *followed = Some(Followed { account: account.to_owned(), accounts: accounts.clone(), stop });
        accounts
    }
}
