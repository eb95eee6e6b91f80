//! Patches that the server took and made nothing of. Somebody undoes them (a webhook that sets what we remove, a manager
//! who keeps a field that we write with the same value), and would do so again at every look. As long as the object stays
//! as it is, the same patch is sent again only now and then: whoever undid it may be gone.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;
use vitivirt_api::Target;

/// They are few. Whoever makes many of them loses the benefit, not our memory.
const MOST: usize = 4096;

pub(super) struct NoOpPatches {
    /// How long a patch is believed to be vain.
    patience: Duration,
    noted: Mutex<HashMap<Target, (Attempt, Instant)>>,
}

/// A patch of an object at a version, if one is known. The patch itself is not kept: it may be secret.
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
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, noted: Mutex::default() }
    }

    pub(super) fn has(&self, target: &Target, attempt: &Attempt) -> bool {
        let noted = self.noted.lock();
        let same = noted.get(target).filter(|(earlier, _)| attempt.version.is_some() && earlier == attempt);
        same.is_some_and(|(_, since)| since.elapsed() < self.patience)
    }

    /// `after` is the version that the server answered with.
    pub(super) fn note(&self, target: &Target, attempt: Attempt, after: &str) {
        let mut no_op_patches = self.noted.lock();
        if attempt.version.as_deref() != Some(after) {
            no_op_patches.remove(target);
            return;
        }
        if no_op_patches.len() >= MOST {
            no_op_patches.clear();
        }
        no_op_patches.insert(target.clone(), (attempt, Instant::now()));
    }
}
