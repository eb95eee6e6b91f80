//! How long a program that ended has to wait before it is started again: a little at first, longer if it keeps ending.

use std::time::Duration;

const SHORTEST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct RestartBackoff {
    last: Option<Duration>,
}

impl RestartBackoff {
    /// The pause after a run of this length. One that outlasted the longest pause was no crash loop.
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
    fn the_pause_doubles_up_to_a_limit_and_starts_afresh_after_a_long_run() {
        let mut backoff = RestartBackoff::default();
        let pauses: Vec<u128> = (0..7).map(|_| backoff.after(Duration::ZERO).as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
        assert_eq!(backoff.after(Duration::from_secs(11)), SHORTEST);
    }
}
