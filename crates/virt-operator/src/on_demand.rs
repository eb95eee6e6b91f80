//! Watches that only some installations need: opened when they are asked for, and closed when they are not.

use std::{fmt::Debug, sync::Arc, time::Duration};

use kube::{Api, Resource};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use vitivirt_api::{Failure, reason};
use vitivirt_runtime::{
    program::Context,
    watch::{Cache, WatchConfig, watch},
};

use crate::router::EventRouter;

const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct OnDemand<V> {
    context: Context,
    router: Arc<EventRouter>,
    handle: Mutex<Option<WatchHandle<V>>>,
}

struct WatchHandle<V> {
    /// What was selected.
    what: String,
    cache: Cache<V>,
    stop: CancellationToken,
}

impl<V: PartialEq + Send + Sync + 'static> OnDemand<V> {
    pub(crate) fn new(context: Context, router: Arc<EventRouter>) -> Self {
        Self { context, router, handle: Mutex::default() }
    }

    /// The cache of what is selected, when it can be believed. `what` tells one selection from another.
    pub(crate) async fn get<K>(
        &self,
        what: &str,
        api: impl FnOnce(&Context) -> Api<K>,
        selection: impl FnOnce() -> WatchConfig,
        project: fn(K) -> V,
    ) -> Result<Cache<V>, Failure>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let cache = self.open(what, api, selection, project);
        match timeout(PATIENCE, cache.ready()).await {
            Ok(()) => Ok(cache),
            Err(_) => Err(Failure::transient(reason::API_SERVER_UNREACHABLE, format!("{what} cannot be listed yet"))),
        }
    }

    fn open<K>(
        &self,
        what: &str,
        api: impl FnOnce(&Context) -> Api<K>,
        selection: impl FnOnce() -> WatchConfig,
        project: fn(K) -> V,
    ) -> Cache<V>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut handle = self.handle.lock();
        if let Some(handle) = handle.as_ref().filter(|handle| handle.what == what) {
            return handle.cache.clone();
        }
        close(&mut handle);
        let stop = self.context.shutdown.child_token();
        let (cache, following) = watch(api(&self.context), selection(), &[], project, stop.clone());
        cache.subscribe(self.router.handler(EventRouter::dependency_changed));
        self.context.spawn("a watch on demand", following);
        *handle = Some(WatchHandle { what: what.to_owned(), cache: cache.clone(), stop });
        cache
    }

    pub(crate) fn close(&self) {
        close(&mut self.handle.lock());
    }
}

fn close<V>(handle: &mut Option<WatchHandle<V>>) {
    if let Some(handle) = handle.take() {
        handle.stop.cancel();
    }
}
