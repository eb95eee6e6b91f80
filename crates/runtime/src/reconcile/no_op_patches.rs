//! Patches that the API server accepted without changing the object. Another client undoes such a patch in the same
//! request (a webhook that sets what the patch removes, a field manager that keeps a field), and would undo it in every
//! reconcile. While the object does not change, the executor sends the same patch again only after a time, because the
//! other client may be gone by then.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;
use vitivirt_api::Target;

/// No-op patches are rare. With more of them the map is cleared: patches are sent again, but memory does not grow.
const MAX_REMEMBERED: usize = 4096;

pub(super) struct NoOpPatches {
    /// How long a patch is assumed to have no effect.
    ttl: Duration,
    attempts: Mutex<HashMap<Target, (Attempt, Instant)>>,
}

/// A patch of an object at a version, if one is known. It keeps a hash of the patch, which may contain secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attempt {
    version: Option<String>,
    patch: u64,
}

impl Attempt {
    pub(super) fn new(version: Option<String>, patch: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        patch.hash(&mut hasher);
        Self { version, patch: hasher.finish() }
    }
}

impl NoOpPatches {
    pub(super) fn new(ttl: Duration) -> Self {
        Self { ttl, attempts: Mutex::default() }
    }

    pub(super) fn contains(&self, target: &Target, attempt: &Attempt) -> bool {
        let attempts = self.attempts.lock();
        let same = attempts.get(target).filter(|(earlier, _)| attempt.version.is_some() && earlier == attempt);
        same.is_some_and(|(_, since)| since.elapsed() < self.ttl)
    }

    /// `after` is the resource version in the server's response.
    pub(super) fn record(&self, target: &Target, attempt: Attempt, after: &str) {
        let mut attempts = self.attempts.lock();
        if attempt.version.as_deref() != Some(after) {
            attempts.remove(target);
            return;
        }
        if attempts.len() >= MAX_REMEMBERED {
            attempts.clear();
        }
        attempts.insert(target.clone(), (attempt, Instant::now()));
    }
}
