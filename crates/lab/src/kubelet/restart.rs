//! The delay before a process is restarted: short at first, longer if it keeps exiting.

use std::time::Duration;

const SHORTEST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct RestartBackoff {
    last: Option<Duration>,
}

impl RestartBackoff {
    /// The delay after a run of this length. A run longer than the longest delay resets the backoff.
    pub(super) fn after(&mut self, run: Duration) -> Duration {
        let pause = match self.last {
            Some(last) if run <= LONGEST => (last * 2).min(LONGEST),
            _ => SHORTEST,
        };
        self.last = Some(pause);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_a_limit_and_is_reset_after_a_long_run() {
        let mut backoff = RestartBackoff::default();
        let pauses: Vec<u128> = (0..7).map(|_| backoff.after(Duration::ZERO).as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
        assert_eq!(backoff.after(Duration::from_secs(11)), SHORTEST);
    }
}
