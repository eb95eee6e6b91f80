//! Watches for the simulators. They retry forever, because tests stop and restart the API server.

use std::{
    collections::{HashMap, HashSet},
    fmt::Debug,
    time::Duration,
};

use futures::TryStreamExt;
use kube::{
    Api, ResourceExt,
    runtime::watcher::{self, Event, watcher},
};
use serde::de::DeserializeOwned;
use tokio::{sync::watch, task::JoinSet};

/// The API server is local. A longer delay would only slow down tests that restart it.
const RETRY: Duration = Duration::from_millis(200);

/// A kind that the API server does not serve (yet) is retried less often.
const RETRY_UNSERVED: Duration = Duration::from_secs(1);

/// A list or watch request returns 404 only if the API server does not serve the kind.
fn is_unserved(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => status.is_not_found(),
        _ => false,
    }
}

/// Calls `react` with every event, until the future is dropped.
pub(crate) async fn watch_events<K>(api: Api<K>, config: watcher::Config, mut react: impl FnMut(Event<K>))
where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut events = std::pin::pin!(watcher(api, config));
    loop {
        match events.try_next().await {
            Ok(Some(event)) => react(event),
            Ok(None) => return,
            Err(error) if is_unserved(&error) => tokio::time::sleep(RETRY_UNSERVED).await,
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    }
}

/// Runs one task per object. The task receives every change of its object, and `None` when the object is deleted.
/// `observe` is called before the task receives a change. The tasks are aborted when this future is dropped.
pub(crate) async fn run_per_object<K, T>(
    api: Api<K>,
    config: watcher::Config,
    mut observe: impl FnMut(&str, Option<&K>),
    mut run_task: impl FnMut(watch::Receiver<Option<K>>) -> T,
) where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    T: Future<Output = ()> + Send + 'static,
{
    let mut senders: HashMap<String, watch::Sender<Option<K>>> = HashMap::new();
    let mut unlisted: HashSet<String> = HashSet::new();
    let mut tasks = JoinSet::new();
    watch_events(api, config, |event| {
        let deleted = match event {
            Event::Init => {
                unlisted = senders.keys().cloned().collect();
                HashSet::new()
            }
            Event::InitApply(object) | Event::Apply(object) => {
                let uid = object.uid().unwrap_or_default();
                unlisted.remove(&uid);
                observe(&uid, Some(&object));
                senders
                    .entry(uid)
                    .or_insert_with(|| {
                        let (sender, receiver) = watch::channel(Some(object.clone()));
                        tasks.spawn(run_task(receiver));
                        sender
                    })
                    .send_replace(Some(object));
                HashSet::new()
            }
            Event::Delete(object) => object.uid().into_iter().collect(),
            Event::InitDone => std::mem::take(&mut unlisted),
        };
        for uid in deleted {
            observe(&uid, None);
            if let Some(sender) = senders.remove(&uid) {
                sender.send_replace(None);
            }
        }
        while tasks.try_join_next().is_some() {}
    })
    .await;
}
