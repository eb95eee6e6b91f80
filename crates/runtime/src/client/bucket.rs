//! A token bucket that serves callers in the order of their arrival.
//!
//! Each caller reserves the next free moment under a lock and then sleeps until it, once. There is no queue and no
//! polling, and a later caller cannot overtake an earlier one. A caller that gives up while it waits loses its
//! reservation: that wastes one token and never exceeds the rate.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

#[derive(Debug)]
pub struct Bucket {
    /// The time between two tokens.
    interval: Duration,
    /// How far the schedule may lag behind the clock. It holds the burst of an idle bucket.
    slack: Duration,
    next: Mutex<Option<Instant>>,
}

impl Bucket {
    /// `per_second` requests on average, and `burst` at once after an idle time.
    pub fn new(per_second: f64, burst: u32) -> Self {
        let interval = Duration::try_from_secs_f64(1.0 / per_second).unwrap_or(Duration::ZERO);
        Self { interval, slack: interval * burst.saturating_sub(1), next: Mutex::new(None) }
    }

    pub async fn wait(&self) {
        let at = self.reserve(Instant::now());
        // Even a sleep of no time would yield to the timer.
        if at > Instant::now() {
            sleep_until(at).await;
        }
    }

    fn reserve(&self, now: Instant) -> Instant {
        let mut next = self.next.lock();
        let earliest = now.checked_sub(self.slack).unwrap_or(now);
        let slot = next.map_or(earliest, |next| next.max(earliest));
        *next = Some(slot + self.interval);
        slot
    }
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
