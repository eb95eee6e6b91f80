//! Keeps a cache up to date: list, watch, and the handling of their errors.

use std::{
    fmt::{self, Debug},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream::BoxStream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api, Resource, ResourceExt,
    core::Selector,
    runtime::watcher::{self, Event, watcher},
};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use vitivirt_api::ObjectKey;

use super::{
    Cache, IndexFn, ResourceVersion, Scope, SyncState, UnreadableObjects, WatchStatus, entry,
    parsed::{Parsed, parsed_api},
};
use crate::{
    backoff::Backoff,
    client::{REQUEST_DEADLINE, SilentWatch, WATCH_IDLE_TIMEOUT, is_caused_by},
};

/// Which objects of a kind are watched, and how.
#[derive(Clone, Debug)]
pub struct WatchConfig {
    /// The default selects all objects.
    pub labels: Selector,
    pub fields: Option<String>,
    /// Objects per page of a list. The peak of memory at start is one page of complete objects.
    pub page_size: u32,
    /// How long the server is asked to keep a watch open. A connection that is silent for longer is dead.
    pub watch_timeout: Duration,
    /// How often a kind that is not served is listed again.
    pub absent_retry: Backoff,
    /// Whether another watch shows that the kind does not exist, and will show when it does.
    pub known_absent: Option<KnownAbsent>,
    pub error_retry: Backoff,
}

/// Answers from memory whether a kind does not exist, for example because it has no CRD.
#[derive(Clone)]
pub struct KnownAbsent(Arc<dyn Fn() -> bool + Send + Sync>);

impl KnownAbsent {
    pub fn new(check: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(check))
    }
}

impl Debug for KnownAbsent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KnownAbsent")
    }
}

impl Default for WatchConfig {
    fn default() -> Self {
        Self {
            labels: Selector::default(),
            fields: None,
            page_size: 100,
            watch_timeout: Duration::from_secs(290),
            absent_retry: Backoff::new(Duration::from_secs(1), Duration::from_secs(60)),
            known_absent: None,
            error_retry: Backoff::new(Duration::from_millis(500), Duration::from_secs(30)),
        }
    }
}

impl WatchConfig {
    pub fn labels(selector: impl Into<Selector>) -> Self {
        Self { labels: selector.into(), ..Self::default() }
    }

    /// Lists are paged and request the most recent state, so all pages have one consistent version. Streaming lists are
    /// not used, because they may begin at an old version.
    fn watcher_config(&self) -> watcher::Config {
        let seconds = u32::try_from(self.watch_timeout.as_secs()).unwrap_or(290);
        let mut config = watcher::Config::default().page_size(self.page_size).timeout(seconds);
        config.label_selector = (!self.labels.selects_all()).then(|| self.labels.to_string());
        config.field_selector.clone_from(&self.fields);
        config
    }

    /// After an error, the next one follows at the latest after a pause and the opening of a watch. If none follows for
    /// twice that time, the watch works.
    fn error_cooldown(&self) -> Duration {
        (self.error_retry.max() + REQUEST_DEADLINE) * 2
    }
}

/// Returns a cache of a kind's objects, and the future that keeps the cache up to date until `stop`. `project` reduces
/// each object to the fields that are read. Handlers [subscribe](Cache::subscribe) before the future runs. With
/// `Api<PartialObjectMeta<K>>` the server sends only metadata.
pub fn watch<K, V>(
    api: Api<K>,
    config: WatchConfig,
    indexes: &[(&'static str, IndexFn<V>)],
    project: fn(K) -> V,
    stop: CancellationToken,
) -> (Cache<V>, impl Future<Output = ()> + Send + use<K, V>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    V: PartialEq + Send + Sync + 'static,
{
    let scope = Scope::new(api.namespace(), config.labels.clone(), config.fields.as_deref());
    let cache = Cache::new(indexes, project, scope, config.error_cooldown());
    let watcher_config = config.watcher_config();
    let kind = api.resource_url().to_owned();
    let api = parsed_api(api);
    let open = move || watcher(api.clone(), watcher_config.clone()).boxed();
    (cache.clone(), run(cache, kind, config, project, open, stop))
}

type WatchEventStream<T> = BoxStream<'static, Result<Event<T>, watcher::Error>>;

async fn run<T, V>(
    cache: Cache<V>,
    kind: String,
    config: WatchConfig,
    project: fn(T) -> V,
    open: impl Fn() -> WatchEventStream<Parsed<T>> + Send,
    stop: CancellationToken,
) where
    T: Resource + Send + 'static,
    V: PartialEq + Send + Sync + 'static,
{
    #[expect(clippy::disallowed_methods, reason = "the jitter of retries is random")]
    let mut jitter = SmallRng::from_os_rng();
    let mut events = open();
    let mut failures = 0;
    let mut last_failure: Option<Instant> = None;
    // The watches in a row that the server refused to resume.
    let mut refused = 0;
    let mut last_silence: Option<Instant> = None;
    // The remaining quick retries after `Cache::retry_now`.
    let mut quick_retries = 0;
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.next() => event,
        };
        let error = match event {
            Some(Ok(event)) => {
                if !matches!(event, Event::Init) {
                    (failures, refused) = (0, 0);
                }
                apply(&cache, &kind, event, project);
                continue;
            }
            Some(Err(error)) if is_caused_by::<SilentWatch>(&error) => {
                // The connection may be dead, so kube's watcher resumes the watch. A server that was restored from a
                // backup accepts a version of the future and then sends nothing until it has reached that version.
                if last_silence.replace(Instant::now()).is_some_and(|at| at.elapsed() < SILENT_AGAIN) {
                    tracing::warn!(kind, "watch was silent again after it was resumed; listing the kind");
                    last_silence = None;
                    events = open();
                }
                continue;
            }
            Some(Err(error)) => error,
            None => {
                events = open();
                continue;
            }
        };
        // An idle kind has no events that show that the watch works.
        if last_failure.is_some_and(|at| at.elapsed() > config.error_cooldown()) {
            (failures, refused) = (0, 0);
        }
        let not_served = is_not_served(&error);
        let delay = if not_served {
            if cache.sync_state() != SyncState::KindNotServed {
                tracing::info!(kind, "kind is not served; waiting for it");
            }
            mark_not_served(&cache);
            // A watcher that cannot resume would try to resume forever. A new one lists the kind when it is served
            // again.
            events = open();
            let is_known_absent = config.known_absent.as_ref().is_some_and(|known_absent| (known_absent.0)());
            match quick_retries {
                _ if is_known_absent => KNOWN_ABSENT_RETRY,
                0 => config.absent_retry.delay(failures, &mut jitter),
                left => QUICK_RETRY.delay(QUICK_RETRIES - left, &mut jitter),
            }
        } else {
            tracing::warn!(kind, error = describe(&error), "watch failed");
            cache.0.status.write().last_error = Some(Instant::now());
            refused += u32::from(is_refused(&error));
            // After an unreadable event the watcher would continue with the next one and lose the change. A server that
            // was restored to an older state may never accept the version to resume from. A new watcher lists the kind.
            if is_unreadable(&error) || refused >= LIST_AFTER_REFUSALS {
                refused = 0;
                events = open();
            }
            config.error_retry.delay(failures, &mut jitter)
        };
        failures += 1;
        match pause(&cache, delay, not_served, &mut jitter, &stop).await {
            PauseEnd::Elapsed => quick_retries = quick_retries.saturating_sub(1),
            PauseEnd::RetryNow => quick_retries = QUICK_RETRIES,
            PauseEnd::Stop => return,
        }
        last_failure = Some(Instant::now());
    }
}

/// The watches in a row that a server refuses before the kind is listed again.
const LIST_AFTER_REFUSALS: u32 = 5;

/// A watch that was resumed and is silent again ends after this time at the latest.
const SILENT_AGAIN: Duration = WATCH_IDLE_TIMEOUT.saturating_add(REQUEST_DEADLINE);

/// The API server serves a kind some time after its CRD is created: the CRD must become established, its API must be
/// published and its storage opened. The first list therefore waits a little, and fails a few times at most.
const QUICK_RETRIES: u32 = 6;
const QUICK_RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(4));
const QUICK_RETRY_FIRST_MS: std::ops::Range<u64> = 1000..1500;

/// A kind that is known not to exist is listed when that changes: see `Cache::retry_now`.
const KNOWN_ABSENT_RETRY: Duration = Duration::from_secs(3600);

enum PauseEnd {
    Elapsed,
    /// `Cache::retry_now` was called.
    RetryNow,
    Stop,
}

async fn pause<V>(
    cache: &Cache<V>,
    delay: Duration,
    not_served: bool,
    jitter: &mut impl Rng,
    stop: &CancellationToken,
) -> PauseEnd {
    tokio::select! {
        () = stop.cancelled() => PauseEnd::Stop,
        () = sleep(delay) => PauseEnd::Elapsed,
        () = cache.0.retry_now.notified(), if not_served => {
            sleep(Duration::from_millis(jitter.random_range(QUICK_RETRY_FIRST_MS))).await;
            PauseEnd::RetryNow
        }
    }
}

fn apply<T, V>(cache: &Cache<V>, kind: &str, event: Event<Parsed<T>>, project: fn(T) -> V)
where
    T: Resource + 'static,
    V: PartialEq + Send + Sync + 'static,
{
    let _order = cache.0.order.lock();
    match event {
        Event::Init => {
            cache.0.status.write().listing = true;
            cache.0.unreadable.write().listed.clear();
            cache.0.store.write().begin_list();
        }
        Event::InitApply(Parsed::Readable(object)) => {
            let key = ObjectKey::from_metadata(object.meta());
            let entry = entry(object, project);
            let change = cache.0.store.write().apply_listed(key, entry);
            cache.notify(&change);
        }
        Event::InitApply(Parsed::Unreadable(metadata)) => {
            let (key, version) = skip(cache, kind, &metadata);
            cache.0.store.write().skip_listed(&key, &version);
            cache.0.unreadable.write().listed.insert(key, version);
        }
        Event::Apply(Parsed::Readable(object)) => {
            let key = ObjectKey::from_metadata(object.meta());
            let was_unreadable = cache.0.unreadable.write().objects.remove(&key).is_some();
            let entry = entry(object, project);
            let change = cache.0.store.write().apply_watched(key, entry, !was_unreadable);
            cache.notify(&change);
        }
        Event::Apply(Parsed::Unreadable(metadata)) => {
            let (key, version) = skip(cache, kind, &metadata);
            cache.0.unreadable.write().objects.insert(key, version);
        }
        Event::Delete(object) => {
            let key = ObjectKey::from_metadata(object.meta());
            cache.0.unreadable.write().objects.remove(&key);
            let version = object.resource_version().unwrap_or_default().as_str().into();
            let change = cache.0.store.write().apply_watched_delete(key, &version);
            cache.notify(&change);
        }
        Event::InitDone => {
            let deleted = cache.0.store.write().end_list();
            let mut unreadable = cache.0.unreadable.write();
            unreadable.objects = std::mem::take(&mut unreadable.listed);
            drop(unreadable);
            *cache.0.status.write() = WatchStatus::default();
            cache.0.sync.send_if_modified(|sync| std::mem::replace(sync, SyncState::Synced) != SyncState::Synced);
            cache.notify_all(&deleted);
        }
    }
}

/// Logs an unreadable object, once for each of its versions.
fn skip<V>(cache: &Cache<V>, kind: &str, metadata: &ObjectMeta) -> (ObjectKey, ResourceVersion) {
    let key = ObjectKey::from_metadata(metadata);
    let version: ResourceVersion = metadata.resource_version.as_deref().unwrap_or_default().into();
    if cache.0.unreadable.read().objects.get(&key) != Some(&version) {
        let (namespace, name) = (key.namespace().unwrap_or_default(), key.name());
        tracing::warn!(kind, namespace, name, "object cannot be parsed and is ignored; correct or delete it");
    }
    (key, version)
}

fn mark_not_served<V: PartialEq + Send + Sync + 'static>(cache: &Cache<V>) {
    let _order = cache.0.order.lock();
    let deleted = cache.0.store.write().clear();
    *cache.0.unreadable.write() = UnreadableObjects::default();
    *cache.0.status.write() = WatchStatus::default();
    cache.0.sync.send_if_modified(|sync| std::mem::replace(sync, SyncState::KindNotServed) != SyncState::KindNotServed);
    cache.notify_all(&deleted);
}

fn is_unreadable(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => match error {
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => true,
            // Every JSON object parses as a Status. One that is not a Status has no code.
            kube::Error::Api(status) => status.code == 0,
            _ => false,
        },
        watcher::Error::WatchError(_) | watcher::Error::NoResourceVersion => false,
    }
}

/// The server does not accept the watch. A list does not help a server that is overloaded or starting, or a client
/// without permission.
fn is_refused(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if ![401, 403, 429, 503].contains(&status.code))
}

/// The error in a form that may be logged. A parse error quotes its input, which may be a Secret.
fn describe(error: &watcher::Error) -> String {
    if is_unreadable(error) {
        return "an object cannot be parsed".to_owned();
    }
    error.to_string()
}

/// The response to a list or a watch is a 404 only if the kind is not served.
fn is_not_served(error: &watcher::Error) -> bool {
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
    fn the_description_does_not_quote_an_unreadable_object() {
        for wrap in [watcher::Error::InitialListFailed, watcher::Error::WatchStartFailed, watcher::Error::WatchFailed] {
            let error = serde_json::from_str::<u8>("\"secret canary\"").unwrap_err();
            assert!(error.to_string().contains("canary"));
            let error = wrap(kube::Error::SerdeError(error));
            assert!(is_unreadable(&error) && !describe(&error).contains("canary"));
        }
        assert!(describe(&watcher::Error::NoResourceVersion).contains("resourceVersion"));
    }

    #[test]
    fn the_cooldown_after_an_error_is_longer_than_the_time_to_the_next_error() {
        let config = WatchConfig::default();
        assert_eq!(config.error_cooldown(), Duration::from_secs(90));
        assert!(config.error_cooldown() > config.error_retry.max() + REQUEST_DEADLINE);
    }
}
