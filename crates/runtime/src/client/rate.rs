//! A rate of requests that follows the API server. It grows while requests wait for it and the server responds quickly.
//! It shrinks when the server refuses requests with 429, or when even its fastest response is slow. One slow webhook is
//! not a reason: the other responses are fast.
//!
//! Pure: the caller has the clock.

use std::time::Duration;

use tokio::time::Instant;

/// The rate changes at most once in this time.
const WINDOW: Duration = Duration::from_secs(1);
/// A server that needs this long for every request has too many of them.
const SLOW: Duration = Duration::from_millis(500);
const GROWTH: f64 = 1.25;
const SLOWDOWN: f64 = 0.8;
const REFUSAL: f64 = 0.5;
const TOO_MANY_REQUESTS: u16 = 429;

#[derive(Debug)]
pub(super) struct ServerRate {
    per_second: f64,
    min: f64,
    max: f64,
    window: Window,
}

/// What happened since the last decision.
#[derive(Debug)]
struct Window {
    begin: Instant,
    fastest: Option<Duration>,
    refused: bool,
    /// A request had to wait for the rate.
    waited: bool,
}

impl Window {
    fn new(begin: Instant) -> Self {
        Self { begin, fastest: None, refused: false, waited: false }
    }
}

impl ServerRate {
    pub(super) fn new(per_second: f64, max: f64, now: Instant) -> Self {
        Self { per_second, min: per_second / 10.0, max: max.max(per_second), window: Window::new(now) }
    }

    /// A response arrived. `waited`: the request had waited for the rate. Returns the rate if it changed.
    pub(super) fn on_response(&mut self, now: Instant, code: u16, latency: Duration, waited: bool) -> Option<f64> {
        let window = &mut self.window;
        window.refused |= code == TOO_MANY_REQUESTS;
        window.waited |= waited;
        window.fastest = Some(window.fastest.map_or(latency, |fastest| fastest.min(latency)));
        if now.duration_since(window.begin) < WINDOW {
            return None;
        }
        let Window { fastest, refused, waited, .. } = std::mem::replace(window, Window::new(now));
        let factor = match (refused, fastest.is_some_and(|fastest| fastest > SLOW), waited) {
            (true, ..) => REFUSAL,
            (false, true, _) => SLOWDOWN,
            (false, false, true) => GROWTH,
            (false, false, false) => return None,
        };
        let next = (self.per_second * factor).clamp(self.min, self.max);
        let changed = (next - self.per_second).abs() > f64::EPSILON;
        self.per_second = next;
        changed.then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Duration = Duration::from_millis(5);

    /// One response per 100 ms for so many seconds. Returns the last rate.
    fn run(rate: &mut ServerRate, now: &mut Instant, seconds: u32, code: u16, latency: Duration, waited: bool) -> f64 {
        for _ in 0..seconds * 10 {
            *now += Duration::from_millis(100);
            rate.on_response(*now, code, latency, waited);
        }
        rate.per_second
    }

    fn rate() -> (ServerRate, Instant) {
        let now = Instant::now();
        (ServerRate::new(200.0, 1000.0, now), now)
    }

    #[test]
    fn the_rate_grows_only_while_requests_wait_for_it() {
        let (mut rate, mut now) = rate();
        assert!((run(&mut rate, &mut now, 60, 200, FAST, false) - 200.0).abs() < 0.1);
        assert!(run(&mut rate, &mut now, 3, 200, FAST, true) > 300.0);
        assert!((run(&mut rate, &mut now, 60, 200, FAST, true) - 1000.0).abs() < 0.1);
    }

    #[test]
    fn a_refusal_halves_the_rate_once_a_second_and_it_recovers() {
        let (mut rate, mut now) = rate();
        let refused = run(&mut rate, &mut now, 2, 429, FAST, true);
        assert!((45.0..=100.0).contains(&refused), "{refused}");
        assert!((run(&mut rate, &mut now, 60, 429, FAST, true) - 20.0).abs() < 0.1, "it does not stop");
        assert!(run(&mut rate, &mut now, 60, 200, FAST, true) > 900.0);
    }

    #[test]
    fn a_slow_server_gets_fewer_requests_and_one_slow_webhook_changes_nothing() {
        let (mut rate, mut now) = rate();
        assert!(run(&mut rate, &mut now, 5, 200, Duration::from_secs(1), true) < 100.0);
        let (mut rate, mut now) = self::rate();
        for _ in 0..20 {
            run(&mut rate, &mut now, 1, 200, FAST, true);
            rate.on_response(now, 200, Duration::from_secs(10), true);
            rate.on_response(now, 0, Duration::from_secs(15), true);
        }
        assert!(rate.per_second > 900.0, "{}", rate.per_second);
    }
}
