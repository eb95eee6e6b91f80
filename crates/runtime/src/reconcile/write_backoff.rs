//! Writes that failed, and when each may be sent again. Pure: the caller supplies the clock and the random numbers.
//!
//! The delay belongs to the write and not to the reconcile. A watch event may start a reconcile at any time: its other
//! writes are sent, and the failed one is not repeated before its time. Only attempts lengthen the delay.

use std::{
    collections::HashMap,
    mem::{Discriminant, discriminant},
    time::Duration,
};

use rand::Rng;
use serde_json::Value;
use tokio::time::Instant;
use vitivirt_api::{ErrorClass, Failure, Target, Write, reason};

use super::retry::RetryState;

const SWEEP_EVERY: Duration = Duration::from_secs(60);

/// Why a write has no effect.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum WriteError {
    Failed(Failure),
    /// The name belongs to an object that this operator does not manage. A remembered one has metadata only.
    NameConflict(Value),
}

/// A write that the server did not accept.
#[derive(Debug, PartialEq)]
pub(super) struct FailedWrite {
    pub(super) error: WriteError,
    /// When the executor sends it again. `None`: it remembers nothing, and sends it with the next reconcile.
    pub(super) retry_after: Option<Duration>,
    /// It was sent. Otherwise the error is that of an earlier attempt.
    pub(super) sent: bool,
}

/// At most one entry for each object and kind of write. Entries that no plan uses any more expire.
#[derive(Default)]
pub(super) struct WriteBackoff {
    entries: HashMap<(Target, Discriminant<Write>), RememberedFailure>,
    /// The longest delay after an `Invalid` failure.
    pub(super) invalid_max: Option<Duration>,
    next_sweep: Option<Instant>,
}

struct RememberedFailure {
    digest: u64,
    state: RetryState,
    error: WriteError,
    last_use: Instant,
}

impl WriteBackoff {
    /// The remembered error of a write that is not sent again yet. A write with another content is sent at once.
    pub(super) fn held(&mut self, write: &Write, now: Instant) -> Option<FailedWrite> {
        if self.entries.is_empty() {
            return None;
        }
        let entry = self.entries.get_mut(&key(write))?;
        entry.last_use = now;
        let same = entry.digest == write.digest();
        let not_before = if same { entry.state.not_before() } else { entry.state.not_before_with_change() };
        let mut error = entry.error.clone();
        if let WriteError::Failed(failure) = &mut error {
            failure.failing_for = entry.state.failing_for(now);
        }
        (now < not_before).then(|| FailedWrite { error, retry_after: Some(not_before - now), sent: false })
    }

    pub(super) fn succeeded(&mut self, write: &Write) {
        if !self.entries.is_empty() {
            self.entries.remove(&key(write));
        }
    }

    pub(super) fn failed(
        &mut self,
        write: &Write,
        mut error: WriteError,
        now: Instant,
        jitter: &mut impl Rng,
    ) -> FailedWrite {
        self.sweep(now);
        let mut name_taken = Failure::invalid(reason::NAME_TAKEN, String::new());
        let failure = match &mut error {
            WriteError::Failed(failure) => failure,
            WriteError::NameConflict(_) => &mut name_taken,
        };
        // These say nothing about the next attempt: a conflict asks for a new observation, and a replica that does not
        // lead sends nothing.
        if failure.class == ErrorClass::Conflict {
            self.succeeded(write);
            return FailedWrite { error, retry_after: None, sent: true };
        }
        if failure.reason == reason::NOT_LEADING {
            return FailedWrite { error, retry_after: None, sent: false };
        }
        let key = key(write);
        let earlier = self.entries.get(&key).map(|entry| &entry.state);
        let mut state = RetryState::after_failure(earlier, failure, now, jitter);
        if let (ErrorClass::Invalid, Some(max)) = (failure.class, self.invalid_max) {
            state.limit(max);
        }
        let retry_after = state.not_before() - now;
        let entry = RememberedFailure { digest: write.digest(), state, error: remembered(&error), last_use: now };
        self.entries.insert(key, entry);
        FailedWrite { error, retry_after: Some(retry_after), sent: true }
    }

    fn sweep(&mut self, now: Instant) {
        if self.next_sweep.is_none_or(|at| at <= now) {
            self.entries.retain(|_, entry| now < entry.state.expires(entry.last_use));
            self.next_sweep = Some(now + SWEEP_EVERY);
        }
    }
}

fn key(write: &Write) -> (Target, Discriminant<Write>) {
    (write.target().clone(), discriminant(write))
}

/// The object of another client may be large, and may be a Secret.
fn remembered(error: &WriteError) -> WriteError {
    match error {
        WriteError::Failed(failure) => WriteError::Failed(failure.clone()),
        WriteError::NameConflict(live) => {
            let kept = ["apiVersion", "kind", "metadata"].into_iter();
            let kept = kept.filter_map(|field| Some((field.to_owned(), live.get(field)?.clone())));
            WriteError::NameConflict(Value::Object(kept.collect()))
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Secret;
    use rand::{SeedableRng, rngs::SmallRng};
    use serde_json::json;
    use vitivirt_api::ObjectKey;

    use super::*;

    fn create(content: &str) -> Write {
        let target = Target::of_kind::<Secret>(ObjectKey::namespaced("ns", "a"));
        Write::Create { target, body: json!({ "data": { "content": content } }).into() }
    }

    fn failed(backoff: &mut WriteBackoff, write: &Write, failure: Failure, now: Instant) -> Duration {
        let failed = backoff.failed(write, WriteError::Failed(failure), now, &mut SmallRng::seed_from_u64(1));
        failed.retry_after.unwrap_or_default()
    }

    #[test]
    fn a_write_whose_content_changes_every_time_is_limited_too() {
        let (mut backoff, begin) = (WriteBackoff::default(), Instant::now());
        let mut attempts = 0;
        for millisecond in (0..120_000).step_by(20) {
            let (write, now) = (create(&millisecond.to_string()), begin + Duration::from_millis(millisecond));
            if backoff.held(&write, now).is_none() {
                attempts += 1;
                failed(&mut backoff, &write, Failure::invalid(reason::INVALID_OBJECT, "no"), now);
            }
        }
        assert!((5..=30).contains(&attempts), "{attempts}");
    }

    #[test]
    fn a_conflict_and_a_success_leave_nothing_behind() {
        let (mut backoff, now) = (WriteBackoff::default(), Instant::now());
        let forbidden = || Failure::forbidden(reason::PERMISSION_MISSING, "no");
        assert!(failed(&mut backoff, &create("x"), forbidden(), now) > Duration::ZERO);
        assert!(backoff.held(&create("x"), now).is_some());
        let delete =
            Write::Delete { target: create("x").target().clone(), uid: "u".to_owned(), resource_version: None };
        assert!(backoff.held(&delete, now).is_none(), "another write of the same object is independent");
        assert_eq!(
            failed(&mut backoff, &create("x"), Failure::conflict(reason::OBJECT_CHANGED, "no"), now),
            Duration::ZERO
        );
        assert!(backoff.held(&create("x"), now).is_none());
        failed(&mut backoff, &create("x"), forbidden(), now);
        backoff.succeeded(&create("x"));
        assert!(backoff.entries.is_empty());
    }

    #[test]
    fn a_remembered_name_conflict_has_no_content_of_the_other_object() {
        let (mut backoff, now) = (WriteBackoff::default(), Instant::now());
        let live = json!({ "kind": "Secret", "metadata": { "name": "a" }, "data": { "password": "x" } });
        backoff.failed(&create("x"), WriteError::NameConflict(live), now, &mut SmallRng::seed_from_u64(1));
        let held = backoff.held(&create("x"), now).unwrap();
        assert_eq!(held.error, WriteError::NameConflict(json!({ "kind": "Secret", "metadata": { "name": "a" } })));
    }

    #[test]
    fn entries_that_no_plan_uses_any_more_expire() {
        let (mut backoff, now) = (WriteBackoff::default(), Instant::now());
        failed(&mut backoff, &create("x"), Failure::transient(reason::API_SERVER_ERROR, "no"), now);
        let target = Target::of_kind::<Secret>(ObjectKey::namespaced("ns", "other"));
        let other = Write::Create { target, body: json!({}).into() };
        failed(&mut backoff, &other, Failure::transient(reason::API_SERVER_ERROR, "no"), now + SWEEP_EVERY * 3);
        assert!(backoff.entries.keys().all(|(target, _)| target.key.name() == "other"));
    }
}
