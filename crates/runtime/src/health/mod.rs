//! What the kubelet asks (`/healthz`, `/readyz`) and what Prometheus reads (`/metrics`).
//!
//! Healthy: no pass is stuck past its deadline, and nothing that has to run has ended. Ready: every cache that was named
//! here is in step; who does not lead is as ready as who does. In plain text, or over TLS if the listener has a
//! certificate.

mod server;

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

pub use self::server::{Routes, serve};
pub use crate::server::{Bind, BindError};

/// A pass ends by its deadline unless it blocks its thread. So much later there is no doubt.
const GRACE: Duration = Duration::from_secs(15);

type Check = Box<dyn Fn() -> bool + Send + Sync>;

#[derive(Default)]
pub struct Health {
    checks: Mutex<Vec<(String, Check)>>,
    reconciles: Mutex<Passes>,
    failed: Mutex<Option<String>>,
}

#[derive(Default)]
struct Passes {
    serial: u64,
    running: HashMap<u64, (&'static str, Instant)>,
}

/// Stands for one pass that is under way.
pub struct Watched {
    health: Arc<Health>,
    serial: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.health.reconciles.lock().running.remove(&self.serial);
    }
}

impl Health {
    /// Readiness waits for `is_ready` from now on.
    pub fn require(&self, name: &str, is_ready: impl Fn() -> bool + Send + Sync + 'static) {
        self.checks.lock().push((name.to_owned(), Box::new(is_ready)));
    }

    /// A pass begins. It counts as stuck if the result is not dropped in time.
    pub fn begin(self: &Arc<Self>, controller: &'static str, deadline: Duration) -> Watched {
        let mut reconciles = self.reconciles.lock();
        reconciles.serial += 1;
        let serial = reconciles.serial;
        reconciles.running.insert(serial, (controller, Instant::now() + deadline + GRACE));
        Watched { health: self.clone(), serial }
    }

    /// Something that the program cannot do without has ended. This does not heal.
    pub fn fail(&self, why: String) {
        self.failed.lock().get_or_insert(why);
    }

    /// What is wrong, if anything.
    pub fn sickness(&self) -> Option<String> {
        if let Some(why) = &*self.failed.lock() {
            return Some(why.clone());
        }
        let now = Instant::now();
        let reconciles = self.reconciles.lock();
        let (controller, _) = reconciles.running.values().find(|(_, limit)| now > *limit)?;
        Some(format!("a pass of controller {controller} is stuck past its deadline"))
    }

    /// What is waited for, if anything.
    pub fn not_ready(&self) -> Option<String> {
        let checks = self.checks.lock();
        let waiting: Vec<&str> =
            checks.iter().filter(|(_, is_ready)| !is_ready()).map(|(name, _)| name.as_str()).collect();
        (!waiting.is_empty()).then(|| format!("waiting for {}", waiting.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stuck_pass_is_unhealthy_until_it_ends() {
        let health = Arc::new(Health::default());
        let watched = health.begin("Machine", Duration::from_secs(60));
        tokio::time::advance(Duration::from_secs(74)).await;
        assert_eq!(health.sickness(), None);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(health.sickness().unwrap().contains("Machine"));
        drop(watched);
        assert_eq!(health.sickness(), None);
        health.fail("the cache has panicked".to_owned());
        assert!(health.sickness().is_some());
    }

    #[test]
    fn readiness_names_what_is_missing() {
        let health = Health::default();
        assert_eq!(health.not_ready(), None);
        health.require("machines", || true);
        health.require("virtualmachines", || false);
        assert_eq!(health.not_ready().as_deref(), Some("waiting for virtualmachines"));
    }
}
