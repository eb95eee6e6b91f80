//! The Secrets that Machines refer to. Each is followed by name and by its metadata alone, from its first mention to the
//! last, so that nothing is ever known of any other Secret of the cluster; and its data is read only when a cloud-init
//! Secret has to be written anew.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use api::{Failure, ObjectKey, Target};
use k8s_openapi::api::core::v1::Secret;
use kube::core::PartialObjectMeta;
use kube::{Api, Client};
use machine::render::cloud_init::SecretBytes;
use machine::resolve::SecretSource;
use parking_lot::Mutex;
use runtime::pass::classify;
use runtime::watch::{Cache, Selection, follow};
use tokio_util::sync::CancellationToken;

use crate::wake::Wake;

/// How long a pass waits for the first look at a Secret; it is tried again after that.
const FIRST_LOOK: Duration = Duration::from_secs(2);

pub(crate) struct Sources {
    client: Client,
    wake: Arc<Wake>,
    stop: CancellationToken,
    followed: Mutex<HashMap<ObjectKey, Followed>>,
}

struct Followed {
    /// Its resource version.
    cache: Cache<Box<str>>,
    stop: CancellationToken,
}

/// What a read of a Secret's key gave, and of which version.
pub(crate) struct Read {
    pub(crate) version: Box<str>,
    /// None: there is no such key.
    pub(crate) bytes: Option<SecretBytes>,
}

impl Sources {
    pub(crate) fn new(client: Client, wake: &Arc<Wake>, stop: CancellationToken) -> Arc<Self> {
        let sources = Arc::new(Self { client, wake: wake.clone(), stop, followed: Mutex::default() });
        wake.know_sources(sources.clone());
        sources
    }

    /// The version of a Secret as it was last seen, or that there is none.
    pub(crate) async fn version(&self, key: &ObjectKey) -> Result<Option<Box<str>>, Failure> {
        let cache = self.follow(key);
        if tokio::time::timeout(FIRST_LOOK, cache.ready()).await.is_err() {
            let words = format!("the Secret {key} could not be looked at within {FIRST_LOOK:?}");
            return Err(Failure::transient(api::reason::DEADLINE_EXCEEDED, words));
        }
        Ok(cache.get(key).map(|version| (*version).clone()))
    }

    fn follow(&self, key: &ObjectKey) -> Cache<Box<str>> {
        let mut followed = self.followed.lock();
        if let Some(known) = followed.get(key) {
            return known.cache.clone();
        }
        let api: Api<PartialObjectMeta<Secret>> =
            Api::namespaced(self.client.clone(), key.namespace().unwrap_or_default());
        let fields = Some(format!("metadata.name={}", key.name()));
        let stop = self.stop.child_token();
        let wake = self.wake.clone();
        let (cache, following) = follow(
            api,
            Selection { fields, ..Selection::default() },
            &[],
            |secret: PartialObjectMeta<Secret>| secret.metadata.resource_version.unwrap_or_default().into_boxed_str(),
            move |change| wake.source_changed(&change.key),
            stop.clone(),
        );
        tokio::spawn(following);
        followed.insert(key.clone(), Followed { cache: cache.clone(), stop });
        cache
    }

    /// No Machine refers to it any more.
    pub(crate) fn end(&self, key: &ObjectKey) {
        if let Some(followed) = self.followed.lock().remove(key) {
            followed.stop.cancel();
        }
    }

    /// One key of a Secret, from the server. None: there is no such Secret.
    pub(crate) async fn read(&self, namespace: &str, source: &SecretSource) -> Result<Option<Read>, Failure> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let target = Target::of::<Secret>(ObjectKey::namespaced(namespace, &source.name));
        let secret = api.get_opt(&source.name).await.map_err(|error| classify(&error, "get", &target))?;
        Ok(secret.map(|secret| Read {
            version: secret.metadata.resource_version.unwrap_or_default().into(),
            bytes: secret.data.and_then(|mut data| data.remove(&source.key)).map(|bytes| SecretBytes(bytes.0)),
        }))
    }
}
