//! The endpoints for the kubelet (`/healthz`, `/readyz`) and for Prometheus (`/metrics`).
//!
//! Healthy: no reconcile runs past its deadline, and no required task has ended. Ready: every readiness check passes,
//! usually one per cache. A replica on standby is as ready as the leader. A listener with a certificate serves TLS, and
//! can require a permission for `/metrics`.

mod server;

use std::{collections::HashMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::FutureExt;
use parking_lot::Mutex;
use tokio::time::Instant;

pub(crate) use self::server::{METRICS, Routes, serve};
pub use crate::server::{Bind, BindError};

/// A reconcile ends by its deadline unless it blocks its thread. After this additional time it is certainly stuck.
const GRACE: Duration = Duration::from_secs(15);

type ReadinessCheck = Box<dyn Fn() -> bool + Send + Sync>;

#[derive(Default)]
pub struct Health {
    checks: Mutex<Vec<(String, ReadinessCheck)>>,
    reconciles: Mutex<RunningReconciles>,
    failed: Mutex<Option<String>>,
    /// What the program waits for before it starts.
    waiting: Mutex<Option<&'static str>>,
}

#[derive(Default)]
struct RunningReconciles {
    serial: u64,
    /// The controller of each reconcile, and the time from which on it counts as stuck.
    running: HashMap<u64, (&'static str, Instant)>,
}

/// One running reconcile. Dropping it ends the reconcile.
pub(crate) struct InFlight {
    health: Arc<Health>,
    serial: u64,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.health.reconciles.lock().running.remove(&self.serial);
    }
}

impl Health {
    /// From now on the program is ready only while `is_ready` returns true.
    pub(crate) fn add_readiness_check(&self, name: &str, is_ready: impl Fn() -> bool + Send + Sync + 'static) {
        self.checks.lock().push((name.to_owned(), Box::new(is_ready)));
    }

    /// The program is not ready while it waits for something.
    pub fn set_waiting(&self, what: Option<&'static str>) {
        *self.waiting.lock() = what;
    }

    /// Begins to track a reconcile. It counts as stuck if the returned guard is not dropped in time.
    pub(crate) fn track_reconcile(self: &Arc<Self>, controller: &'static str, deadline: Duration) -> InFlight {
        let mut reconciles = self.reconciles.lock();
        reconciles.serial += 1;
        let serial = reconciles.serial;
        reconciles.running.insert(serial, (controller, Instant::now() + deadline + GRACE));
        InFlight { health: self.clone(), serial }
    }

    /// Runs a task. If it panics, the program is not healthy any more, so that the kubelet replaces it.
    pub fn spawn(self: &Arc<Self>, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let health = self.clone();
        tokio::spawn(async move {
            if AssertUnwindSafe(task).catch_unwind().await.is_err() {
                health.fail(format!("{name} panicked"));
            }
        });
    }

    /// A required task has ended. The program stays unhealthy until it is restarted.
    pub(crate) fn fail(&self, reason: String) {
        self.failed.lock().get_or_insert(reason);
    }

    /// Why the program is not healthy, if it is not.
    pub fn liveness_error(&self) -> Option<String> {
        if let Some(reason) = &*self.failed.lock() {
            return Some(reason.clone());
        }
        let now = Instant::now();
        let reconciles = self.reconciles.lock();
        let (controller, _) = reconciles.running.values().find(|(_, limit)| now > *limit)?;
        Some(format!("a reconcile of controller {controller} runs past its deadline"))
    }

    /// Why the program is not ready, if it is not.
    pub fn readiness_error(&self) -> Option<String> {
        let checks = self.checks.lock();
        let waiting: Vec<&str> = (*self.waiting.lock())
            .into_iter()
            .chain(checks.iter().filter(|(_, is_ready)| !is_ready()).map(|(name, _)| name.as_str()))
            .collect();
        (!waiting.is_empty()).then(|| format!("waiting for {}", waiting.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stuck_reconcile_is_unhealthy_until_it_ends() {
        let health = Arc::new(Health::default());
        let in_flight = health.track_reconcile("Machine", Duration::from_secs(60));
        tokio::time::advance(Duration::from_secs(74)).await;
        assert_eq!(health.liveness_error(), None);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(health.liveness_error().unwrap().contains("Machine"));
        drop(in_flight);
        assert_eq!(health.liveness_error(), None);
        health.fail("the cache has panicked".to_owned());
        assert!(health.liveness_error().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_makes_the_program_unhealthy() {
        let health = Arc::new(Health::default());
        health.spawn("the task", async { panic!("on purpose") });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(health.liveness_error().as_deref(), Some("the task panicked"));
    }

    #[test]
    fn the_readiness_error_names_the_failed_checks() {
        let health = Health::default();
        assert_eq!(health.readiness_error(), None);
        health.add_readiness_check("machines", || true);
        health.add_readiness_check("virtualmachines", || false);
        assert_eq!(health.readiness_error().as_deref(), Some("waiting for virtualmachines"));
        health.set_waiting(Some("a CRD"));
        assert_eq!(health.readiness_error().as_deref(), Some("waiting for a CRD, virtualmachines"));
    }
}
