//! The delay before each retry. Pure: the caller supplies the random number generator.

use std::time::Duration;

use rand::Rng;

/// Doubles from `base` to `max`. Each delay is drawn from the upper half of the range: clients that failed together do
/// not retry together, and no client retries much earlier than the backoff asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    base: Duration,
    max: Duration,
}

impl Backoff {
    pub const fn new(base: Duration, max: Duration) -> Self {
        Self { base, max }
    }

    /// The upper limit of every delay.
    pub(crate) const fn max(&self) -> Duration {
        self.max
    }

    /// The delay after `failures` earlier failures in a row.
    pub fn delay(&self, failures: u32, jitter: &mut impl Rng) -> Duration {
        self.longest_delay(failures).mul_f64(jitter.random_range(0.5..=1.0))
    }

    /// The upper limit of the delay after `failures` earlier failures in a row.
    pub(crate) fn longest_delay(&self, failures: u32) -> Duration {
        self.base.saturating_mul(1_u32.checked_shl(failures).unwrap_or(u32::MAX)).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::SmallRng};

    use super::*;

    proptest! {
        #[test]
        fn a_delay_is_between_half_and_all_of_the_doubled_base_and_never_exceeds_the_maximum(
            failures in 0_u32..200, seed: u64, base in 1_u64..5_000, factor in 1_u64..1_000,
        ) {
            let (base, max) = (Duration::from_millis(base), Duration::from_millis(base * factor));
            let delay = Backoff::new(base, max).delay(failures, &mut SmallRng::seed_from_u64(seed));
            let full = base.checked_mul(1_u32.checked_shl(failures).unwrap_or(u32::MAX)).map_or(max, |d| d.min(max));
            prop_assert!(delay <= max);
            prop_assert!(delay >= full.mul_f64(0.499) && delay <= full.mul_f64(1.001), "{delay:?} of {full:?}");
        }
    }
}
