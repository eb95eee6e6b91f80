//! The Secrets that `cloudInit.secretRef` of Machines names. Each has a watch of its metadata, by name, as long as a
//! Machine names it; so the operator holds nothing of any other Secret of the cluster. Its data is read only when a
//! cloud-init Secret must be written.
//!
//! The first read returns the data with its resource version, and a watch without a list continues from there. So a
//! Machine with a secretRef costs one read, and one more for each change of the Secret.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::{Stream, TryStreamExt};
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client, Error,
    api::{WatchEvent, WatchParams},
    core::PartialObjectMeta,
};
use parking_lot::Mutex;
use rand::{SeedableRng, rngs::SmallRng};
use tokio_util::sync::CancellationToken;
use vitivirt_api::{Failure, ObjectKey, Target};
use vitivirt_machine::{SecretBytes, resolve::SecretSource};
use vitivirt_runtime::{backoff::Backoff, reconcile::classify, watch::Subscribers};

/// After how many seconds the API server ends a watch.
const WATCH_SECONDS: u32 = 290;
/// Between attempts to watch. Until one succeeds, every reconcile reads the Secret.
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
/// The resource version of a watch that starts with the present objects.
const FROM_NOW: &str = "";
const GONE: u16 = 410;

pub(crate) struct SourceSecrets {
    client: Client,
    changes: Arc<Subscribers<ObjectKey>>,
    stop: CancellationToken,
    watches: Mutex<HashMap<ObjectKey, WatchHandle>>,
}

struct WatchHandle {
    state: Arc<Mutex<SecretState>>,
    stop: CancellationToken,
}

/// What the watch knows about a Secret.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SecretState {
    /// The watch has not reported it yet, or was interrupted.
    Unknown,
    Missing,
    Version(Box<str>),
}

/// One key of a Secret, and the resource version of the Secret.
pub(crate) struct SecretRead {
    pub(crate) version: Box<str>,
    /// None: the Secret has no such key.
    pub(crate) bytes: Option<SecretBytes>,
}

impl SourceSecrets {
    pub(crate) fn new(client: Client, stop: CancellationToken) -> Arc<Self> {
        Arc::new(Self { client, changes: Arc::default(), stop, watches: Mutex::default() })
    }

    /// Calls `handler` with the key of a Secret whenever its state changes.
    pub(crate) fn subscribe(&self, handler: impl Fn(&ObjectKey) + Send + Sync + 'static) {
        self.changes.subscribe(handler);
    }

    /// The state of a Secret. The first call starts a watch of it.
    pub(crate) fn state(&self, key: &ObjectKey) -> SecretState {
        let mut watches = self.watches.lock();
        if let Some(handle) = watches.get(key) {
            return handle.state.lock().clone();
        }
        let handle = WatchHandle { state: Arc::new(Mutex::new(SecretState::Unknown)), stop: self.stop.child_token() };
        let watch = SecretWatch {
            api: Api::namespaced(self.client.clone(), key.namespace().unwrap_or_default()),
            key: key.clone(),
            state: handle.state.clone(),
            changes: self.changes.clone(),
        };
        let stop = handle.stop.clone();
        tokio::spawn(async move { stop.run_until_cancelled(watch.run()).await });
        watches.insert(key.clone(), handle);
        SecretState::Unknown
    }

    /// Stops the watch of a Secret that no Machine names any more.
    pub(crate) fn stop(&self, key: &ObjectKey) {
        if let Some(handle) = self.watches.lock().remove(key) {
            handle.stop.cancel();
        }
    }

    /// Reads one key of a Secret from the API server. None: the Secret does not exist.
    pub(crate) async fn read(&self, namespace: &str, source: &SecretSource) -> Result<Option<SecretRead>, Failure> {
        let key = ObjectKey::namespaced(namespace, &source.name);
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let target = Target::of::<Secret>(key.clone());
        let secret = api.get_opt(&source.name).await.map_err(|error| classify(&error, "get", &target))?;
        let read = secret.map(|secret| SecretRead {
            version: secret.metadata.resource_version.unwrap_or_default().into(),
            bytes: secret.data.and_then(|mut data| data.remove(&source.key)).map(|bytes| SecretBytes(bytes.0)),
        });
        let found = read.as_ref().map(|read| SecretState::Version(read.version.clone()));
        self.record_read(&key, found.unwrap_or(SecretState::Missing));
        Ok(read)
    }

    /// Records the result of a read, unless the watch already knows the Secret.
    fn record_read(&self, key: &ObjectKey, found: SecretState) {
        if let Some(handle) = self.watches.lock().get(key) {
            let mut state = handle.state.lock();
            if *state == SecretState::Unknown {
                *state = found;
            }
        }
    }
}

/// The watch of one Secret.
struct SecretWatch {
    api: Api<Secret>,
    key: ObjectKey,
    state: Arc<Mutex<SecretState>>,
    changes: Arc<Subscribers<ObjectKey>>,
}

impl SecretWatch {
    async fn run(self) {
        let parameters =
            WatchParams::default().fields(&format!("metadata.name={}", self.key.name())).timeout(WATCH_SECONDS);
        let (mut version, mut failures) = (FROM_NOW.to_owned(), 0);
        #[expect(clippy::disallowed_methods, reason = "the jitter of retries is random")]
        let mut jitter = SmallRng::from_os_rng();
        loop {
            let watched = match self.api.watch_metadata(&parameters, &version).await {
                Ok(events) => self.handle_events(events, &mut version, &mut failures).await,
                Err(error) => Err(error),
            };
            let Err(error) = watched else { continue };
            if version == FROM_NOW || matches!(&error, Error::Api(status) if status.code == GONE) {
                // Changes until the next watch starts are not reported.
                FROM_NOW.clone_into(&mut version);
                self.set_state(SecretState::Unknown);
            }
            let failure = classify(&error, "watch", &Target::of::<Secret>(self.key.clone()));
            tracing::warn!(reason = failure.reason, error = failure.message, "watch of a referenced Secret failed");
            tokio::time::sleep(RETRY.delay(failures, &mut jitter)).await;
            failures += 1;
        }
    }

    /// Returns when the API server ends the watch, which is not an error.
    async fn handle_events(
        &self,
        events: impl Stream<Item = Result<WatchEvent<PartialObjectMeta<Secret>>, Error>>,
        version: &mut String,
        failures: &mut u32,
    ) -> Result<(), Error> {
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.try_next().await? {
            *failures = 0;
            match event {
                WatchEvent::Added(secret) | WatchEvent::Modified(secret) => {
                    *version = secret.metadata.resource_version.unwrap_or_default();
                    self.set_state(SecretState::Version(version.as_str().into()));
                }
                WatchEvent::Deleted(secret) => {
                    *version = secret.metadata.resource_version.unwrap_or_default();
                    self.set_state(SecretState::Missing);
                }
                WatchEvent::Bookmark(mark) => *version = mark.metadata.resource_version,
                WatchEvent::Error(status) => return Err(Error::Api(status)),
            }
        }
        Ok(())
    }

    fn set_state(&self, state: SecretState) {
        let changed = *self.state.lock() != state;
        *self.state.lock() = state;
        if changed {
            self.changes.notify(&self.key);
        }
    }
}
