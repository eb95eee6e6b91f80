//! A watch that never gives up: the simulators outlive restarts of the API server.

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

/// The API server is local; waiting longer would only slow down tests that restart it.
const RETRY: Duration = Duration::from_millis(200);

/// A kind that does not exist (yet) is asked for less often.
const ABSENT: Duration = Duration::from_secs(1);

/// A list or a watch answers 404 only when there is no such kind.
fn is_absent(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => status.is_not_found(),
        _ => false,
    }
}

/// Calls `react` with every event, for ever.
pub(crate) async fn watch_events<K>(api: Api<K>, config: watcher::Config, mut react: impl FnMut(Event<K>))
where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut events = std::pin::pin!(watcher(api, config));
    loop {
        match events.try_next().await {
            Ok(Some(event)) => react(event),
            Ok(None) => return,
            Err(error) if is_absent(&error) => tokio::time::sleep(ABSENT).await,
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    }
}

/// One task per object, which hears of every change of it and of its end (`None`). `note` hears of everything first.
/// The tasks end with this future.
pub(crate) async fn run_per_object<K, T>(
    api: Api<K>,
    config: watcher::Config,
    mut note: impl FnMut(&str, Option<&K>),
    mut look_after: impl FnMut(watch::Receiver<Option<K>>) -> T,
) where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    T: Future<Output = ()> + Send + 'static,
{
    let mut known: HashMap<String, watch::Sender<Option<K>>> = HashMap::new();
    let mut unseen: HashSet<String> = HashSet::new();
    let mut tasks = JoinSet::new();
    watch_events(api, config, |event| {
        let gone = match event {
            Event::Init => {
                unseen = known.keys().cloned().collect();
                HashSet::new()
            }
            Event::InitApply(object) | Event::Apply(object) => {
                let uid = object.uid().unwrap_or_default();
                unseen.remove(&uid);
                note(&uid, Some(&object));
                known
                    .entry(uid)
                    .or_insert_with(|| {
                        let (sender, receiver) = watch::channel(Some(object.clone()));
                        tasks.spawn(look_after(receiver));
                        sender
                    })
                    .send_replace(Some(object));
                HashSet::new()
            }
            Event::Delete(object) => object.uid().into_iter().collect(),
            Event::InitDone => std::mem::take(&mut unseen),
        };
        for uid in gone {
            note(&uid, None);
            if let Some(sender) = known.remove(&uid) {
                sender.send_replace(None);
            }
        }
        while tasks.try_join_next().is_some() {}
    })
    .await;
}
