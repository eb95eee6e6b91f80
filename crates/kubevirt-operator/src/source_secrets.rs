//! The Secrets that Machines refer to. Each is followed by name and by its metadata alone, from its first mention to the
//! last, so that nothing is ever known of any other Secret of the cluster; and its data is read only when a cloud-init
//! Secret has to be written anew.
//!
//! The first look is that read: it tells the version with the data. A watch without a list goes on from there, so a
//! Machine that refers to a Secret costs one read, and one more for each change of the Secret.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, TryStreamExt};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{WatchEvent, WatchParams};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, Error};
use parking_lot::Mutex;
use rand::{SeedableRng, rngs::SmallRng};
use tokio_util::sync::CancellationToken;
use vitivirt_api::{Failure, ObjectKey, Target};
use vitivirt_machine::{SecretBytes, resolve::SecretSource};
use vitivirt_runtime::reconcile::{Backoff, classify};

use crate::router::EventRouter;

/// The server ends a watch by then.
const WATCH_SECONDS: u32 = 290;
/// Between tries to watch. Until one succeeds every pass reads.
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
/// The version of a watch that begins with what there is.
const FROM_NOW: &str = "";
const GONE: u16 = 410;

pub(crate) struct SourceSecrets {
    client: Client,
    router: Arc<EventRouter>,
    stop: CancellationToken,
    followed: Mutex<HashMap<ObjectKey, WatchHandle>>,
}

struct WatchHandle {
    seen: Arc<Mutex<SecretState>>,
    stop: CancellationToken,
}

/// What is known of a Secret without reading it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SecretState {
    /// Nothing yet, or the watch lost track.
    Unknown,
    Missing,
    ResourceVersion(Box<str>),
}

/// What a read of a Secret's key gave, and of which version.
pub(crate) struct Read {
    pub(crate) version: Box<str>,
    /// None: there is no such key.
    pub(crate) bytes: Option<SecretBytes>,
}

impl SourceSecrets {
    pub(crate) fn new(client: Client, router: &Arc<EventRouter>, stop: CancellationToken) -> Arc<Self> {
        let sources = Arc::new(Self { client, router: router.clone(), stop, followed: Mutex::default() });
        router.know_sources(sources.clone());
        sources
    }

    /// What was last seen of a Secret, which is followed from now on.
    pub(crate) fn seen(&self, key: &ObjectKey) -> SecretState {
        let mut followed = self.followed.lock();
        if let Some(known) = followed.get(key) {
            return known.seen.lock().clone();
        }
        let known = WatchHandle { seen: Arc::new(Mutex::new(SecretState::Unknown)), stop: self.stop.child_token() };
        let watch = Watch {
            api: Api::namespaced(self.client.clone(), key.namespace().unwrap_or_default()),
            key: key.clone(),
            seen: known.seen.clone(),
            router: self.router.clone(),
        };
        let stop = known.stop.clone();
        tokio::spawn(async move { stop.run_until_cancelled(watch.run()).await });
        followed.insert(key.clone(), known);
        SecretState::Unknown
    }

    /// No Machine refers to it any more.
    pub(crate) fn end(&self, key: &ObjectKey) {
        if let Some(followed) = self.followed.lock().remove(key) {
            followed.stop.cancel();
        }
    }

    /// One key of a Secret, from the server. None: there is no such Secret.
    pub(crate) async fn read(&self, namespace: &str, source: &SecretSource) -> Result<Option<Read>, Failure> {
        let key = ObjectKey::namespaced(namespace, &source.name);
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let target = Target::of::<Secret>(key.clone());
        let secret = api.get_opt(&source.name).await.map_err(|error| classify(&error, "get", &target))?;
        let read = secret.map(|secret| Read {
            version: secret.metadata.resource_version.unwrap_or_default().into(),
            bytes: secret.data.and_then(|mut data| data.remove(&source.key)).map(|bytes| SecretBytes(bytes.0)),
        });
        self.looked(
            &key,
            read.as_ref().map_or(SecretState::Missing, |read| SecretState::ResourceVersion(read.version.clone())),
        );
        Ok(read)
    }

    /// What a read told, unless the watch tells already.
    fn looked(&self, key: &ObjectKey, found: SecretState) {
        if let Some(known) = self.followed.lock().get(key) {
            let mut seen = known.seen.lock();
            if *seen == SecretState::Unknown {
                *seen = found;
            }
        }
    }
}

/// Follows one Secret.
struct Watch {
    api: Api<Secret>,
    key: ObjectKey,
    seen: Arc<Mutex<SecretState>>,
    router: Arc<EventRouter>,
}

impl Watch {
    async fn run(self) {
        let parameters =
            WatchParams::default().fields(&format!("metadata.name={}", self.key.name())).timeout(WATCH_SECONDS);
        let (mut version, mut failures) = (FROM_NOW.to_owned(), 0);
        let mut jitter = SmallRng::from_os_rng();
        loop {
            let watched = match self.api.watch_metadata(&parameters, &version).await {
                Ok(events) => self.watch(events, &mut version, &mut failures).await,
                Err(error) => Err(error),
            };
            let Err(error) = watched else { continue };
            if version == FROM_NOW || matches!(&error, Error::Api(status) if status.code == GONE) {
                // What happens until the next watch begins, nobody tells.
                FROM_NOW.clone_into(&mut version);
                self.saw(SecretState::Unknown);
            }
            let failure = classify(&error, "watch", &Target::of::<Secret>(self.key.clone()));
            tracing::warn!(
                reason = failure.reason,
                error = failure.message,
                "a Secret that Machines refer to is not followed"
            );
            tokio::time::sleep(RETRY.delay(failures, &mut jitter)).await;
            failures += 1;
        }
    }

    /// Until the server ends the watch, which is no error.
    async fn watch(
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
                    self.saw(SecretState::ResourceVersion(version.as_str().into()));
                }
                WatchEvent::Deleted(secret) => {
                    *version = secret.metadata.resource_version.unwrap_or_default();
                    self.saw(SecretState::Missing);
                }
                WatchEvent::Bookmark(mark) => *version = mark.metadata.resource_version,
                WatchEvent::Error(status) => return Err(Error::Api(status)),
            }
        }
        Ok(())
    }

    fn saw(&self, now: SecretState) {
        let news = *self.seen.lock() != now;
        *self.seen.lock() = now;
        if news {
            self.router.source_changed(&self.key);
        }
    }
}
