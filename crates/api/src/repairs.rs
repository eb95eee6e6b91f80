//! How often an operator writes one object while the desired state of the object does not change.
//!
//! Another client may undo each repair: an autoscaler, a policy engine, a second operator. Without a limit both would
//! write as fast as they can.

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::Target;

/// The writes that are not delayed. One more is allowed after each interval.
const BURST: i32 = 10;
const INTERVAL: SignedDuration = SignedDuration::from_mins(1);

/// The recent writes of one object. `D` is a digest of what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentWrites<D> {
    written: D,
    /// Each write moves this time by one interval into the future.
    spent_until: Timestamp,
}

impl<D: Copy + PartialEq> RecentWrites<D> {
    /// `before`: the writes that this one repeats.
    #[must_use]
    pub fn after(before: Option<&Self>, written: D, now: Timestamp) -> Self {
        let spent_until = before.map_or(now, |before| before.spent_until.max(now)) + INTERVAL;
        Self { written, spent_until }
    }

    pub fn written(&self) -> D {
        self.written
    }

    /// When the next write is allowed.
    pub fn next_write(&self) -> Timestamp {
        self.spent_until - INTERVAL * (BURST - 1)
    }

    /// Whether the object was written too often a moment ago.
    pub fn is_exhausted(&self, now: Timestamp) -> bool {
        self.next_write() > now
    }

    /// Whether one more write exhausts the limit.
    pub fn exhausts_with_next(&self, now: Timestamp) -> bool {
        self.next_write() + INTERVAL > now
    }

    /// Whether they no longer delay anything.
    pub fn is_old(&self, now: Timestamp) -> bool {
        self.spent_until <= now
    }
}

/// The message about an object that another client changes again and again. `managers`: the other clients, as
/// `managedFields` name them.
pub fn repeated_drift_message(target: &Target, managers: &[String], remedy: &str) -> String {
    let managers = match managers {
        [] => "another client".to_owned(),
        managers => format!("another client ({})", managers.join(", ")),
    };
    format!(
        "{target} is changed by {managers} after each repair; the operator now repairs it once a minute; stop that \
         client, or {remedy}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + seconds).unwrap()
    }

    /// The other client undoes each repair at once, for five minutes.
    #[test]
    fn a_fight_costs_ten_writes_in_the_first_minute_and_then_one_per_minute() {
        let mut recent: Option<RecentWrites<u64>> = None;
        let mut writes = Vec::new();
        for second in 0..300 {
            for _ in 0..20 {
                if !recent.is_some_and(|recent| recent.is_exhausted(at(second))) {
                    recent = Some(RecentWrites::after(recent.as_ref(), 1, at(second)));
                    writes.push(second);
                }
            }
        }
        assert_eq!(writes.iter().filter(|second| **second < 60).count(), 10);
        assert_eq!(writes.split_off(10), [60, 120, 180, 240]);
        assert_eq!(recent.map(|recent| recent.next_write()), Some(at(300)), "it ends within a minute");
    }

    #[test]
    fn rare_repairs_are_never_delayed() {
        let mut recent: Option<RecentWrites<u64>> = None;
        for repair in 0..100 {
            assert!(!recent.is_some_and(|recent| recent.is_exhausted(at(60 * repair))));
            recent = Some(RecentWrites::after(recent.as_ref(), 1, at(60 * repair)));
        }
    }
}
