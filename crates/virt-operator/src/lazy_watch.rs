//! Watches that only some installations need. They are opened when they are first needed, and closed when they are no
//! longer needed.

use std::{fmt::Debug, sync::Arc, time::Duration};

use kube::{Api, Resource};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use vitivirt_api::{Failure, reason};
use vitivirt_runtime::{
    program::Context,
    watch::{Cache, WatchConfig, watch},
};

use crate::router::EventRouter;

/// How long after it was opened reconciles wait for the first list of a watch. Later ones do not wait.
const SYNC_TIMEOUT: Duration = Duration::from_secs(2);

/// A watch with its cache. It is open for at most one selection at a time.
pub(crate) struct LazyWatch<V> {
    context: Context,
    router: Arc<EventRouter>,
    running: Mutex<Option<RunningWatch<V>>>,
}

struct RunningWatch<V> {
    /// The `selection` of the call that opened the watch.
    selection: String,
    cache: Cache<V>,
    opened: Instant,
    stop: CancellationToken,
}

impl<V: PartialEq + Send + Sync + 'static> LazyWatch<V> {
    pub(crate) fn new(context: Context, router: Arc<EventRouter>) -> Self {
        Self { context, router, running: Mutex::default() }
    }

    /// Returns the synced cache, and opens the watch if it is not open yet.
    ///
    /// `selection` identifies the selected objects: with another value the present watch is replaced. It is also the
    /// name of these objects in the error message.
    pub(crate) async fn get<K>(
        &self,
        selection: &str,
        api: impl FnOnce(&Context) -> Api<K>,
        config: impl FnOnce() -> WatchConfig,
        project: fn(K) -> V,
    ) -> Result<Cache<V>, Failure>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let (cache, opened) = self.get_or_open(selection, api, config, project);
        match timeout_at(opened + SYNC_TIMEOUT, cache.ready()).await {
            Ok(()) => Ok(cache),
            Err(_) => Err(Failure::transient(
                reason::API_SERVER_UNREACHABLE,
                format!("{selection} not listed within {SYNC_TIMEOUT:?}; the operator retries automatically"),
            )),
        }
    }

    fn get_or_open<K>(
        &self,
        selection: &str,
        api: impl FnOnce(&Context) -> Api<K>,
        config: impl FnOnce() -> WatchConfig,
        project: fn(K) -> V,
    ) -> (Cache<V>, Instant)
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut running = self.running.lock();
        if let Some(running) = running.as_ref().filter(|running| running.selection == selection) {
            return (running.cache.clone(), running.opened);
        }
        close(&mut running);
        let stop = self.context.shutdown.child_token();
        let (cache, watching) = watch(api(&self.context), config(), &[], project, stop.clone());
        cache.subscribe(self.router.handler(EventRouter::dependency_changed));
        self.context.spawn("a lazy watch", watching);
        let opened = Instant::now();
        *running = Some(RunningWatch { selection: selection.to_owned(), cache: cache.clone(), opened, stop });
        (cache, opened)
    }

    pub(crate) fn close(&self) {
        close(&mut self.running.lock());
    }
}

fn close<V>(running: &mut Option<RunningWatch<V>>) {
    if let Some(running) = running.take() {
        running.stop.cancel();
    }
}
