//! A token bucket that serves callers in the order of their arrival.
//!
//! Each caller reserves the next free moment under a lock and then sleeps until it, once. There is no queue and no
//! polling, and a later caller cannot overtake an earlier one. A caller that gives up while it waits loses its
//! reservation: that wastes one token and never exceeds the rate.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use super::rate::ServerRate;

#[derive(Debug)]
pub struct Bucket {
    burst: u32,
    schedule: Mutex<Schedule>,
    /// Changes the rate, if it follows the server.
    server_rate: Option<Mutex<ServerRate>>,
}

#[derive(Debug)]
struct Schedule {
    /// The time between two tokens.
    interval: Duration,
    next: Option<Instant>,
}

impl Bucket {
    /// `per_second` requests on average, and `burst` at once after an idle time.
    pub fn new(per_second: f64, burst: u32) -> Self {
        let schedule = Schedule { interval: interval(per_second), next: None };
        Self { burst, schedule: Mutex::new(schedule), server_rate: None }
    }

    /// The rate begins with `per_second`, and follows the server up to `max`.
    #[must_use]
    pub(crate) fn following_the_server(self, per_second: f64, max: f64) -> Self {
        Self { server_rate: Some(Mutex::new(ServerRate::new(per_second, max, Instant::now()))), ..self }
    }

    /// Returns whether the caller had to wait.
    pub async fn wait(&self) -> bool {
        let at = self.reserve(Instant::now());
        // Even a sleep of no time would yield to the timer.
        let waits = at > Instant::now();
        if waits {
            sleep_until(at).await;
        }
        waits
    }

    /// The server responded to a request that has waited here.
    pub(crate) fn on_response(&self, code: u16, latency: Duration, waited: bool) {
        let Some(server_rate) = &self.server_rate else { return };
        let changed = server_rate.lock().on_response(Instant::now(), code, latency, waited);
        if let Some(per_second) = changed {
            tracing::debug!(per_second, "the rate of requests follows the API server");
            self.schedule.lock().interval = interval(per_second);
        }
    }

    fn reserve(&self, now: Instant) -> Instant {
        let mut schedule = self.schedule.lock();
        // How far the schedule may lag behind the clock. It holds the burst of an idle bucket.
        let slack = schedule.interval * self.burst.saturating_sub(1);
        let earliest = now.checked_sub(slack).unwrap_or(now);
        let slot = schedule.next.map_or(earliest, |next| next.max(earliest));
        schedule.next = Some(slot + schedule.interval);
        slot
    }
}

fn interval(per_second: f64) -> Duration {
    Duration::try_from_secs_f64(1.0 / per_second).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_served_at_once_and_the_rest_at_the_rate() {
        tokio::time::advance(Duration::from_secs(60)).await;
        let bucket = Bucket::new(10.0, 5);
        let begin = Instant::now();
        for _ in 0..5 {
            bucket.wait().await;
        }
        assert_eq!(begin.elapsed(), Duration::ZERO);
        for _ in 0..20 {
            bucket.wait().await;
        }
        let result = begin.elapsed();
        assert!(result >= Duration::from_millis(2000) && result < Duration::from_millis(2050), "{result:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn callers_are_served_in_the_order_of_arrival() {
        tokio::time::advance(Duration::from_secs(60)).await;
        let bucket = std::sync::Arc::new(Bucket::new(100.0, 1));
        bucket.wait().await;
        let order = std::sync::Arc::new(Mutex::new(Vec::new()));
        let mut waiters = Vec::new();
        for n in 0..20 {
            let (bucket, order) = (bucket.clone(), order.clone());
            let mut waiter = Box::pin(async move {
                bucket.wait().await;
                order.lock().push(n);
            });
            // Each is polled once, in order, which reserves its slot.
            let _ = futures::poll!(&mut waiter);
            waiters.push(waiter);
        }
        // They are awaited in reverse, so that the order can only come from the bucket.
        futures::future::join_all(waiters.into_iter().rev()).await;
        assert_eq!(*order.lock(), (0..20).collect::<Vec<_>>());
    }
}
