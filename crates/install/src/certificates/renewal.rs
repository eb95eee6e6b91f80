//! When a certificate must be renewed. All times have the resolution of X.509, which is one second. The durations come
//! from `lifetime`.

use std::time::{Duration, SystemTime};

use super::lifetime::Lifetime;

/// A shorter certificate expires before it is in use.
pub const MIN_LIFETIME: Duration = Duration::from_secs(10);

/// The clocks of two machines may differ by this much. A replica does not replace what another has just issued, and a
/// certificate is valid on a node whose clock is late.
const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);

/// How long every API server and component needs to learn of a new CA: their watches may lag.
const PROPAGATION: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    pub not_before: SystemTime,
    pub not_after: SystemTime,
}

impl Validity {
    /// Whether clients accept a certificate with these dates. The clock that issued it may differ from this one.
    pub fn is_acceptable(&self, now: SystemTime) -> bool {
        self.not_after > now && saturating_sub(self.not_before, CLOCK_SKEW) <= now
    }
}

impl Lifetime {
    /// How long before it is issued a certificate is already valid. Short lifetimes leave room for less.
    pub fn backdating(self) -> Duration {
        CLOCK_SKEW.min(self.renew_before_expiry() / 4)
    }

    /// How long a new CA is only trusted before it signs certificates. Short lifetimes leave room for less.
    pub fn propagation(self) -> Duration {
        PROPAGATION.min(self.renew_before_expiry() / 4)
    }

    /// A certificate is kept for at least a tenth of its duration. Otherwise a long `renewBefore` would renew it in
    /// every reconcile.
    fn renew_before_expiry(self) -> Duration {
        self.renew_before.min(self.duration - self.duration / 10)
    }
}

/// The validity of a certificate and its desired lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValidityWindow {
    pub lifetime: Lifetime,
    pub validity: Validity,
}

impl ValidityWindow {
    /// When it is renewed. A certificate that outlives its signer is renewed in the middle of the time in which both
    /// the signer and its successor are trusted.
    pub fn deadline(&self, signer: Option<&Self>) -> SystemTime {
        match signer {
            Some(signer) if signer.validity.not_after < self.validity.not_after => {
                saturating_sub(signer.validity.not_after, signer.lifetime.renew_before_expiry() / 2)
            }
            _ => saturating_sub(self.validity.not_after, self.lifetime.renew_before_expiry()),
        }
    }

    /// A certificate that becomes valid much later was issued with a wrong clock. No client accepts it now.
    pub fn is_due(&self, signer: Option<&Self>, now: SystemTime) -> bool {
        self.deadline(signer) <= now || saturating_sub(self.validity.not_before, CLOCK_SKEW) > now
    }

    /// When the certificate is renewed although its CA may not be trusted everywhere yet: an expired one is not trusted
    /// anywhere.
    pub fn last_renewal(&self) -> SystemTime {
        saturating_sub(self.validity.not_after, self.lifetime.renew_before_expiry() / 4)
    }

    /// Whether the validity matches the desired duration, with or without backdating. This holds only for CAs: a leaf
    /// certificate becomes valid together with its signer.
    pub fn matches_lifetime(&self) -> bool {
        let Validity { not_before, not_after } = self.validity;
        let actual = not_after.duration_since(not_before).unwrap_or_default();
        let Lifetime { duration, .. } = self.lifetime;
        let candidates = [duration, duration + self.lifetime.backdating()];
        candidates.into_iter().any(|expected| actual.abs_diff(expected) <= Duration::from_secs(1))
    }
}

fn saturating_sub(time: SystemTime, duration: Duration) -> SystemTime {
    time.checked_sub(duration).unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(hour: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + hours(1_000_000 + hour)
    }

    fn hours(hours: u64) -> Duration {
        Duration::from_secs(hours * 3600)
    }

    fn window(duration: u64, renew_before: u64, from: u64, to: u64) -> ValidityWindow {
        ValidityWindow {
            lifetime: Lifetime { duration: hours(duration), renew_before: hours(renew_before) },
            validity: Validity { not_before: at(from), not_after: at(to) },
        }
    }

    #[test]
    fn a_certificate_is_renewed_before_it_expires() {
        let ca = window(100, 20, 0, 100);
        assert_eq!(ca.deadline(None), at(80));
        assert!(!ca.is_due(None, at(80) - Duration::from_secs(1)));
        assert!(ca.is_due(None, at(80)));
    }

    #[test]
    fn a_certificate_that_outlives_its_signer_is_renewed_in_the_middle_of_the_overlap() {
        let ca = window(100, 20, 0, 100);
        assert_eq!(window(24, 4, 0, 99).deadline(Some(&ca)), at(95));
        assert_eq!(window(24, 4, 0, 100).deadline(Some(&ca)), at(96));
        assert_eq!(window(24, 4, 0, 101).deadline(Some(&ca)), at(90));
    }

    #[test]
    fn a_certificate_is_kept_for_a_tenth_of_its_duration() {
        assert_eq!(window(100, 90, 0, 100).deadline(None), at(10));
        assert_eq!(window(100, 91, 0, 100).deadline(None), at(10));
        assert_eq!(window(100, 500, 0, 100).deadline(None), at(10));
        assert_eq!(window(24, 4, 0, 200).deadline(Some(&window(100, 500, 0, 100))), at(55));
    }

    #[test]
    fn a_small_clock_skew_renews_nothing() {
        let ca = window(100, 20, 1, 101);
        assert!(!ca.is_due(None, at(1) - CLOCK_SKEW));
        assert!(ca.is_due(None, at(1) - CLOCK_SKEW - Duration::from_secs(1)));
    }

    #[test]
    fn the_validity_of_a_ca_shows_its_duration() {
        let mut ca = window(100, 20, 0, 100);
        assert!(ca.matches_lifetime());
        ca.validity.not_after += Duration::from_secs(1);
        assert!(ca.matches_lifetime(), "rounded");
        ca.validity.not_after += Duration::from_secs(1);
        assert!(!ca.matches_lifetime());
        assert!(!window(100, 20, 100, 0).matches_lifetime());
    }

    #[test]
    fn the_annotation_has_the_format_of_upstream() {
        assert_eq!(window(168, 1, 0, 1).lifetime.annotation(), "&Duration{Duration:168h0m0s,}");
    }
}
