//! Keeps a cache in step with the cluster: list, watch, and what to do when either fails.

use std::{fmt::Debug, time::Duration};

use futures::{StreamExt, stream::BoxStream};
use kube::{
    Api, Resource, ResourceExt,
    runtime::watcher::{self, Event, watcher},
};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use vitivirt_api::ObjectKey;

use super::{Cache, IndexFn, Scope, SyncState, entry};
use crate::{client::REQUEST_DEADLINE, reconcile::Backoff};

/// Which objects of a kind are followed, and how.
#[derive(Clone, Debug)]
pub struct WatchConfig {
    pub labels: Option<String>,
    pub fields: Option<String>,
    /// Objects per page of a list: the peak of memory at start is one page of whole objects.
    pub page_size: u32,
    /// How long the server is asked to keep a watch open. A connection that is silent for longer is dead.
    pub watch_timeout: Duration,
    /// How often an absent kind is looked for.
    pub absent_retry: Backoff,
    pub error_retry: Backoff,
}

impl Default for WatchConfig {
    fn default() -> Self {
        Self {
            labels: None,
            fields: None,
            page_size: 100,
            watch_timeout: Duration::from_secs(290),
            absent_retry: Backoff::new(Duration::from_secs(1), Duration::from_secs(60)),
            error_retry: Backoff::new(Duration::from_millis(500), Duration::from_secs(30)),
        }
    }
}

impl WatchConfig {
    pub fn labels(selector: &str) -> Self {
        Self { labels: Some(selector.to_owned()), ..Self::default() }
    }

    /// Lists are paged and ask for the most recent state, so every page is of one consistent version. Streaming lists
    /// are not used: they may begin at an old one.
    fn config(&self) -> watcher::Config {
        let seconds = u32::try_from(self.watch_timeout.as_secs()).unwrap_or(290);
        let mut config = watcher::Config::default().page_size(self.page_size).timeout(seconds);
        config.label_selector.clone_from(&self.labels);
        config.field_selector.clone_from(&self.fields);
        config
    }

    /// After an error, the next one comes at most a pause and the opening of a watch later. Twice that without another
    /// means that the watch works.
    fn settling(&self) -> Duration {
        (self.error_retry.longest() + REQUEST_DEADLINE) * 2
    }
}

/// A cache of a kind's objects, pruned by `prune` to what will be read, and the future that keeps it in step until
/// `stop`. `on_change` maps changes to keys of a queue; it must not block. With `Api<PartialObjectMeta<K>>` only
/// metadata is asked for.
pub fn watch<K, V>(
    api: Api<K>,
    selection: WatchConfig,
    indexes: &[(&'static str, IndexFn<V>)],
    project: fn(K) -> V,
    stop: CancellationToken,
) -> (Cache<V>, impl Future<Output = ()> + Send + use<K, V>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    V: PartialEq + Send + Sync + 'static,
{
    let scope = Scope::new(api.namespace(), selection.labels.as_deref(), selection.fields.as_deref());
    let cache = Cache::new(indexes, project, scope, selection.settling());
    let config = selection.config();
    let kind = api.resource_url().to_owned();
    let open = move || watcher(api.clone(), config.clone()).boxed();
    (cache.clone(), run(cache, kind, selection, project, open, stop))
}

type Events<T> = BoxStream<'static, Result<Event<T>, watcher::Error>>;

async fn run<T, V>(
    cache: Cache<V>,
    kind: String,
    selection: WatchConfig,
    project: fn(T) -> V,
    open: impl Fn() -> Events<T> + Send,
    stop: CancellationToken,
) where
    T: Resource + Send + 'static,
    V: PartialEq + Send + Sync + 'static,
{
    let mut jitter = SmallRng::from_os_rng();
    let mut events = open();
    let mut failures = 0;
    let mut expected = 0;
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.next() => event,
        };
        let error = match event {
            Some(Ok(event)) => {
                if !matches!(event, Event::Init) {
                    failures = 0;
                }
                apply(&cache, event, project);
                continue;
            }
            Some(Err(error)) => error,
            None => {
                events = open();
                continue;
            }
        };
        let absent = is_absent(&error);
        let delay = if absent {
            if cache.sync_state() != SyncState::KindNotServed {
                tracing::info!(kind, "the API server does not know this kind; waiting for it");
            }
            become_absent(&cache);
            // A watcher that failed to resume would try to resume for ever: the kind is listed anew when it is back.
            events = open();
            match expected {
                0 => selection.absent_retry.delay(failures, &mut jitter),
                tries => EXPECTED_RETRY.delay(EXPECTED_TRIES - tries, &mut jitter),
            }
        } else {
            tracing::warn!(kind, error = describe(&error), "watch failed");
            cache.0.health.write().last_error = Some(Instant::now());
            if unreadable(&error) {
                // The watcher would go on with the next event and never tell what this one said.
                events = open();
            }
            selection.error_retry.delay(failures, &mut jitter)
        };
        failures += 1;
        match pause(&cache, delay, absent, &mut jitter, &stop).await {
            Pause::Over => expected = expected.saturating_sub(1),
            Pause::LookAgain => expected = EXPECTED_TRIES,
            Pause::Stop => return,
        }
    }
}

/// A kind is served a moment after its CRD is stored, then established, then published, and its store is opened: nobody
/// is in such a hurry that it should be asked for in vain. It is asked for a few times.
const EXPECTED_TRIES: u32 = 6;
const EXPECTED_RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(4));
const EXPECTED_AFTER: std::ops::Range<u64> = 1000..1500;

enum Pause {
    Over,
    /// Somebody knows that an absent kind has come.
    LookAgain,
    Stop,
}

async fn pause<V>(
    cache: &Cache<V>,
    delay: Duration,
    absent: bool,
    jitter: &mut impl Rng,
    stop: &CancellationToken,
) -> Pause {
    tokio::select! {
        () = stop.cancelled() => Pause::Stop,
        () = sleep(delay) => Pause::Over,
        () = cache.0.retry_now.notified(), if absent => {
            sleep(Duration::from_millis(jitter.random_range(EXPECTED_AFTER))).await;
            Pause::LookAgain
        }
    }
}

fn apply<T: Resource, V: PartialEq + Send + Sync + 'static>(cache: &Cache<V>, event: Event<T>, project: fn(T) -> V) {
    match event {
        Event::Init => {
            cache.0.health.write().listing = true;
            cache.0.store.write().begin_list();
        }
        Event::InitApply(object) => {
            let key = ObjectKey::of(object.meta());
            let entry = entry(object, project);
            let change = cache.0.store.write().listed(key, entry);
            cache.notify(&change);
        }
        Event::Apply(object) => {
            let key = ObjectKey::of(object.meta());
            let entry = entry(object, project);
            let change = cache.0.store.write().seen(key, entry);
            cache.notify(&change);
        }
        Event::Delete(object) => {
            let key = ObjectKey::of(object.meta());
            let version = object.resource_version().unwrap_or_default().as_str().into();
            let change = cache.0.store.write().seen_deleted(key, &version);
            cache.notify(&change);
        }
        Event::InitDone => {
            let gone = cache.0.store.write().end_list();
            *cache.0.health.write() = super::Health::default();
            cache.0.sync.send_if_modified(|sync| std::mem::replace(sync, SyncState::Synced) != SyncState::Synced);
            cache.notify_all(&gone);
        }
    }
}

fn become_absent<V: PartialEq + Send + Sync + 'static>(cache: &Cache<V>) {
    let gone = cache.0.store.write().clear();
    *cache.0.health.write() = super::Health::default();
    cache.0.sync.send_if_modified(|sync| std::mem::replace(sync, SyncState::KindNotServed) != SyncState::KindNotServed);
    cache.notify_all(&gone);
}

fn unreadable(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => match error {
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => true,
            // Whatever is an object at all can be read as a Status, one without a code.
            kube::Error::Api(status) => status.code == 0,
            _ => false,
        },
        watcher::Error::WatchError(_) | watcher::Error::NoResourceVersion => false,
    }
}

/// What went wrong, in words that may be logged: an error of reading quotes what it could not read, and that may be of a
/// Secret.
fn describe(error: &watcher::Error) -> String {
    if unreadable(error) {
        return "an object could not be read".to_owned();
    }
    error.to_string()
}

/// A list or a watch of a kind answers 404 only when there is no such kind.
fn is_absent(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => status.code == 404,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_not_quoted() {
        for wrap in [watcher::Error::InitialListFailed, watcher::Error::WatchStartFailed, watcher::Error::WatchFailed] {
            let error = serde_json::from_str::<u8>("\"secret canary\"").unwrap_err();
            assert!(error.to_string().contains("canary"));
            let error = wrap(kube::Error::SerdeError(error));
            assert!(unreadable(&error) && !describe(&error).contains("canary"));
        }
        assert!(describe(&watcher::Error::NoResourceVersion).contains("resourceVersion"));
    }

    #[test]
    fn an_error_is_not_forgotten_before_the_next_one_can_have_come() {
        let selection = WatchConfig::default();
        assert_eq!(selection.settling(), Duration::from_secs(90));
        assert!(selection.settling() > selection.error_retry.longest() + REQUEST_DEADLINE);
    }
}
