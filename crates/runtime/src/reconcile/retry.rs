//! When a failed attempt may be repeated. Pure: the caller supplies the clock and the random number generator.

use std::time::Duration;

use rand::Rng;
use tokio::time::Instant;
use vitivirt_api::{ErrorClass, Failure};

use crate::backoff::Backoff;

/// The delays before a server is tried again that may be starting: as long as it has been failing, within these limits.
const STARTING_DELAY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// The delays between attempts that changes bring forward. The first one has no delay.
const EARLY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(60));

/// The failures of one thing in a row, and when it may be tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RetryState {
    /// The number of failures that lengthened the delay.
    failures: u32,
    /// The number of attempts since the last scheduled one that a change brought forward.
    early: u32,
    cause: (ErrorClass, bool),
    /// Whether the failure usually ends without a change.
    is_passing: bool,
    /// The first failure of this cause, or the first of several that usually end without a change.
    since: Instant,
    last_attempt: Instant,
    not_before: Instant,
    /// The server asked for this time, so nothing brings the next attempt forward.
    server_not_before: Instant,
}

impl RetryState {
    /// The state after an attempt has failed at `now`. It sets how long `failure` has lasted.
    ///
    /// An attempt that a change brought forward does not lengthen the delay.
    pub(super) fn after_failure(
        earlier: Option<&Self>,
        failure: &mut Failure,
        now: Instant,
        jitter: &mut impl Rng,
    ) -> Self {
        let (cause, is_passing) = ((failure.class, failure.is_unreachable()), failure.is_passing());
        let same_cause = earlier.filter(|earlier| earlier.cause == cause);
        // A server that starts or is busy fails in different ways.
        let both_pass = earlier.filter(|earlier| earlier.is_passing && is_passing);
        let since = both_pass.or(same_cause).map_or(now, |earlier| earlier.since);
        failure.failing_for = now - since;
        let server_not_before = now + failure.retry_after.unwrap_or_default();
        let failures = earlier.map_or(0, |earlier| earlier.failures);
        let state = Self {
            failures,
            early: 0,
            cause,
            is_passing,
            since,
            last_attempt: now,
            not_before: now,
            server_not_before,
        };
        if let Some(earlier) = same_cause.filter(|earlier| now < earlier.not_before) {
            let not_before = earlier.not_before.max(server_not_before);
            return Self { early: earlier.early.saturating_add(1), not_before, ..state };
        }
        let not_before = now + retry_delay(failure, failures, jitter);
        // While a server starts, the delay depends on the time alone.
        let lengthens = !failure.is_not_reachable_yet();
        Self { failures: failures.saturating_add(u32::from(lengthens)), not_before, ..state }
    }

    pub(super) fn not_before(&self) -> Instant {
        self.not_before
    }

    /// When an attempt with a changed content may take place. The limit is for content that changes with every
    /// attempt, such as a new key: a user does not notice it.
    pub(super) fn not_before_with_change(&self) -> Instant {
        let delay = self.early.checked_sub(1).map_or(Duration::ZERO, |early| EARLY.longest_delay(early));
        self.not_before.min((self.last_attempt + delay).max(self.server_not_before))
    }

    pub(super) fn failing_for(&self, now: Instant) -> Duration {
        now - self.since
    }

    /// After this time without a use the state is not needed any more.
    pub(super) fn expires(&self, last_use: Instant) -> Instant {
        last_use.max(self.not_before) + class_backoff(self.cause.0).max()
    }

    /// Shortens the delay to at most `max`, unless the server asked for a longer one.
    pub(super) fn limit(&mut self, max: Duration) {
        self.not_before = self.not_before.min((self.last_attempt + max).max(self.server_not_before));
    }
}

const fn class_backoff(class: ErrorClass) -> Backoff {
    const fn backoff(base_ms: u64, max_seconds: u64) -> Backoff {
        Backoff::new(Duration::from_millis(base_ms), Duration::from_secs(max_seconds))
    }
    match class {
        ErrorClass::Transient => backoff(250, 60),
        // The watch usually delivers the missed change within milliseconds.
        ErrorClass::Conflict => backoff(20, 10),
        // A change of the object triggers a reconcile. A change of the policy or webhook that rejected it does not.
        ErrorClass::Invalid => backoff(30_000, 300),
        // Granting a permission triggers no reconcile.
        ErrorClass::Forbidden => backoff(5_000, 60),
        ErrorClass::Bug => backoff(1_000, 300),
    }
}

/// The delay before the next attempt, after `failures` failures in a row before this one.
fn retry_delay(failure: &Failure, failures: u32, jitter: &mut impl Rng) -> Duration {
    let delay = if failure.is_not_reachable_yet() {
        let full = failure.failing_for.clamp(STARTING_DELAY.0, STARTING_DELAY.1);
        Backoff::new(full, full).delay(0, jitter)
    } else {
        class_backoff(failure.class).delay(failures, jitter)
    };
    delay.max(failure.retry_after.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::SmallRng};
    use vitivirt_api::{STARTING, reason};

    use super::*;

    #[test]
    fn the_class_of_a_failure_determines_the_retry_delay() {
        let mut random = SmallRng::seed_from_u64(1);
        let mut delay = |class, failures| retry_delay(&Failure::new(class, "R", "m"), failures, &mut random);
        assert!(delay(ErrorClass::Transient, 0) <= Duration::from_millis(250));
        assert!(delay(ErrorClass::Transient, 50) <= Duration::from_secs(60));
        assert!(delay(ErrorClass::Conflict, 0) <= Duration::from_millis(20));
        assert!(
            delay(ErrorClass::Invalid, 0) >= Duration::from_secs(15)
                && delay(ErrorClass::Invalid, 50) <= Duration::from_secs(300)
        );
        assert!(delay(ErrorClass::Forbidden, 0) >= Duration::from_millis(2_500));
        assert!(delay(ErrorClass::Bug, 9) >= Duration::from_secs(150));
        let failure = Failure::transient("R", "m").retry_after(Duration::from_secs(7));
        assert_eq!(retry_delay(&failure, 0, &mut random), Duration::from_secs(7));
    }

    /// The causes that the attempts of a property test fail with.
    fn failure(cause: u8) -> Failure {
        match cause {
            0 => Failure::transient(reason::WEBHOOK_UNREACHABLE, "refused"),
            1 => Failure::transient(reason::API_UNAVAILABLE, "no endpoints"),
            2 => Failure::transient(reason::API_SERVER_ERROR, "500"),
            3 => Failure::invalid(reason::INVALID_OBJECT, "422"),
            4 => Failure::forbidden(reason::PERMISSION_MISSING, "403"),
            _ => Failure::transient(reason::TOO_MANY_REQUESTS, "429").retry_after(Duration::from_secs(7)),
        }
    }

    /// Otherwise a failure of a server that does so would never count as an error.
    #[test]
    fn a_server_that_is_unreachable_and_busy_in_turn_has_failed_since_the_first_failure() {
        let mut jitter = SmallRng::seed_from_u64(1);
        let (begin, mut state) = (Instant::now(), None);
        for (second, cause) in (0..40).zip([0, 2, 5, 1].into_iter().cycle()) {
            let (mut failed, after) = (failure(cause), Duration::from_secs(second));
            state = Some(RetryState::after_failure(state.as_ref(), &mut failed, begin + after, &mut jitter));
            assert_eq!((failed.failing_for, failed.may_end_soon()), (after, after < STARTING));
        }
    }

    proptest! {
        /// Attempts take place as soon as they are allowed, some of them brought forward by a change.
        #[test]
        fn attempts_are_bounded_whatever_fails_and_whatever_changes(
            seed: u64, attempts in prop::collection::vec((0..6_u8, any::<bool>()), 2..60),
        ) {
            let mut jitter = SmallRng::seed_from_u64(seed);
            let (begin, mut now) = (Instant::now(), Instant::now());
            let mut state: Option<RetryState> = None;
            let mut in_last_minute = Vec::new();
            for (cause, changed) in attempts {
                let mut failed = failure(cause);
                let earlier = state.clone();
                let next = RetryState::after_failure(earlier.as_ref(), &mut failed, now, &mut jitter);
                let delay = next.not_before() - now;
                prop_assert!(delay <= class_backoff(failed.class).max(), "{delay:?}");
                prop_assert!(delay >= failed.retry_after.unwrap_or_default());
                prop_assert_eq!(failed.failing_for, next.failing_for(now));
                if failed.is_not_reachable_yet() {
                    prop_assert!(delay <= Duration::from_secs(1), "{delay:?}");
                }
                // An attempt that was brought forward does not lengthen the delay.
                let same = earlier.filter(|earlier| earlier.cause == next.cause && now < earlier.not_before);
                if let Some(earlier) = same {
                    prop_assert_eq!(next.failures, earlier.failures);
                    prop_assert!(next.not_before == earlier.not_before || failed.retry_after.is_some());
                }
                prop_assert!(next.not_before_with_change() <= next.not_before());
                prop_assert!(next.not_before_with_change() >= now + failed.retry_after.unwrap_or_default());
                now = if changed { next.not_before_with_change() } else { next.not_before() };
                state = Some(next);
                in_last_minute.push(now);
                in_last_minute.retain(|at| now - *at < Duration::from_secs(60));
                prop_assert!(in_last_minute.len() <= 150, "{} after {:?}", in_last_minute.len(), now - begin);
            }
        }

        #[test]
        fn a_server_that_starts_is_tried_every_second_and_later_on_the_normal_schedule(seed: u64) {
            let mut jitter = SmallRng::seed_from_u64(seed);
            let begin = Instant::now();
            let (mut now, mut state, mut attempts) = (begin, None, 0);
            while now - begin < STARTING {
                state = Some(RetryState::after_failure(state.as_ref(), &mut failure(attempts % 2), now, &mut jitter));
                attempts += 1;
                now = state.as_ref().map_or(now, RetryState::not_before);
            }
            prop_assert!((30..=70).contains(&attempts), "{attempts}");
            for _ in 0..12 {
                let mut failed = failure(0);
                state = Some(RetryState::after_failure(state.as_ref(), &mut failed, now, &mut jitter));
                prop_assert!(!failed.is_not_reachable_yet());
                now = state.as_ref().map_or(now, RetryState::not_before);
            }
            prop_assert!(now - begin > Duration::from_secs(90));
        }
    }
}
