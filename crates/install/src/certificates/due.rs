//! When a certificate is due. Seconds are what X.509 counts in, so all of this is right to the second.

use std::time::{Duration, SystemTime};

use super::lifetime::{Lifetime, go_duration};

/// Less than this is over before what was issued is in use.
pub const SHORTEST: Duration = Duration::from_secs(10);

/// Two replicas may disagree about the time by this much, and still neither replaces what the other has just issued.
const CLOCKS_DIFFER: Duration = Duration::from_secs(5 * 60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    pub not_before: SystemTime,
    pub not_after: SystemTime,
}

impl Lifetime {
    /// What the annotation `kubevirt.io/duration` says of a certificate with this lifetime.
    pub fn annotation(self) -> String {
        format!("&Duration{{Duration:{},}}", go_duration(self.duration))
    }

    /// At least a tenth of a life is lived: where renewal is asked for earlier, each pass would renew.
    fn renewed_before(self) -> Duration {
        self.renew_before.min(self.duration - self.duration / 10)
    }
}

/// A certificate in its time, and the lifetime that is wanted of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    pub lifetime: Lifetime,
    pub validity: Validity,
}

impl Term {
    /// From when on it is renewed. What outlives its signer is renewed in the middle of the time in which both the
    /// signer and its successor are trusted.
    pub fn deadline(&self, signer: Option<&Self>) -> SystemTime {
        match signer {
            Some(signer) if signer.validity.not_after < self.validity.not_after => {
                before(signer.validity.not_after, signer.lifetime.renewed_before() / 2)
            }
            _ => before(self.validity.not_after, self.lifetime.renewed_before()),
        }
    }

    /// What becomes valid much later was issued by a clock that was wrong: nobody accepts it now.
    pub fn is_due(&self, signer: Option<&Self>, now: SystemTime) -> bool {
        self.deadline(signer) <= now || before(self.validity.not_before, CLOCKS_DIFFER) > now
    }

    /// Whether the dates are those of a certificate that was issued for this duration. Only an authority's are: a leaf
    /// is valid from when its signer is.
    pub fn fits(&self) -> bool {
        let Validity { not_before, not_after } = self.validity;
        let lived = not_after.duration_since(not_before).unwrap_or_default();
        lived.abs_diff(self.lifetime.duration) <= Duration::from_secs(1)
    }
}

fn before(time: SystemTime, duration: Duration) -> SystemTime {
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

    fn term(duration: u64, renew_before: u64, from: u64, to: u64) -> Term {
        Term {
            lifetime: Lifetime { duration: hours(duration), renew_before: hours(renew_before) },
            validity: Validity { not_before: at(from), not_after: at(to) },
        }
    }

    #[test]
    fn a_certificate_is_renewed_before_its_end() {
        let authority = term(100, 20, 0, 100);
        assert_eq!(authority.deadline(None), at(80));
        assert!(!authority.is_due(None, at(80) - Duration::from_secs(1)));
        assert!(authority.is_due(None, at(80)));
    }

    #[test]
    fn what_outlives_its_signer_is_renewed_in_the_middle_of_the_overlap() {
        let authority = term(100, 20, 0, 100);
        assert_eq!(term(24, 4, 0, 99).deadline(Some(&authority)), at(95));
        assert_eq!(term(24, 4, 0, 100).deadline(Some(&authority)), at(96));
        assert_eq!(term(24, 4, 0, 101).deadline(Some(&authority)), at(90));
    }

    #[test]
    fn a_tenth_of_a_life_is_lived_whatever_is_asked_for() {
        assert_eq!(term(100, 90, 0, 100).deadline(None), at(10));
        assert_eq!(term(100, 91, 0, 100).deadline(None), at(10));
        assert_eq!(term(100, 500, 0, 100).deadline(None), at(10));
        assert_eq!(term(24, 4, 0, 200).deadline(Some(&term(100, 500, 0, 100))), at(55));
    }

    #[test]
    fn clocks_may_differ_a_little() {
        let authority = term(100, 20, 1, 101);
        assert!(!authority.is_due(None, at(1) - CLOCKS_DIFFER));
        assert!(authority.is_due(None, at(1) - CLOCKS_DIFFER - Duration::from_secs(1)));
    }

    #[test]
    fn dates_tell_the_duration_of_an_authority() {
        let mut authority = term(100, 20, 0, 100);
        assert!(authority.fits());
        authority.validity.not_after += Duration::from_secs(1);
        assert!(authority.fits(), "rounded");
        authority.validity.not_after += Duration::from_secs(1);
        assert!(!authority.fits());
        assert!(!term(100, 20, 100, 0).fits());
    }

    #[test]
    fn the_annotation_is_as_the_reference_writes_it() {
        assert_eq!(term(168, 1, 0, 1).lifetime.annotation(), "&Duration{Duration:168h0m0s,}");
    }
}
