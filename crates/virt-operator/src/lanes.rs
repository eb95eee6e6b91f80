//! What the lanes share: what is wrong in the lanes that only report, and whether they may still write.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedRwLockReadGuard, RwLock},
    time::timeout,
};
use vitivirt_api::{Failure, reason};
use vitivirt_install::{Lane, LaneProblem};

/// What is wrong in the lanes that only report. The lane `Components` writes it into the status of the KubeVirt
/// resource.
#[derive(Default)]
pub(crate) struct LaneProblems(Mutex<BTreeMap<Lane, LaneProblem>>);

impl LaneProblems {
    pub(crate) fn get(&self) -> BTreeMap<Lane, LaneProblem> {
        self.0.lock().clone()
    }

    /// Returns whether the problem of the lane has changed. `None`: the lane is done.
    pub(crate) fn set(&self, lane: Lane, problem: Option<LaneProblem>) -> bool {
        let mut problems = self.0.lock();
        if problems.get(&lane) == problem.as_ref() {
            return false;
        }
        match problem {
            Some(problem) => problems.insert(lane, problem),
            None => problems.remove(&lane),
        };
        true
    }

    /// Another leader may have removed the cause of a problem.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

/// How long a removal waits for the reconciles of the other lanes. If they take longer, it is retried.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Ends the lanes for a KubeVirt resource whose installation is removed. A lane holds a permit while it reconciles, and
/// `close` waits for the permits. So nothing that a lane creates can be missed by the removal, which reads the caches
/// after that.
#[derive(Default)]
pub(crate) struct LaneGates {
    certificates: Gate,
    /// Of the lanes `Monitoring` and `Instancetypes`.
    others: Gate,
}

/// The UID of the resource for which the gate is closed.
type Gate = Arc<RwLock<Option<String>>>;

/// A lane may write while it has one.
pub(crate) struct LanePermit {
    _guard: OwnedRwLockReadGuard<Option<String>>,
}

impl LaneGates {
    /// `None` if the lane is closed for this resource.
    pub(crate) async fn enter(&self, lane: Lane, uid: &str) -> Option<LanePermit> {
        let guard = self.gate(lane).clone().read_owned().await;
        (guard.as_deref() != Some(uid)).then_some(LanePermit { _guard: guard })
    }

    /// Closes the lane, and waits until it does not reconcile.
    pub(crate) async fn close(&self, lane: Lane, uid: &str) -> Result<(), Failure> {
        if self.gate(lane).read().await.as_deref() == Some(uid) {
            return Ok(());
        }
        match timeout(CLOSE_TIMEOUT, self.gate(lane).write()).await {
            Ok(mut closed) => {
                *closed = Some(uid.to_owned());
                Ok(())
            }
            Err(_) => {
                let message = format!("a reconcile of the lane {lane} has not ended within {CLOSE_TIMEOUT:?}");
                Err(Failure::transient(reason::RECONCILE_DEADLINE_EXCEEDED, message))
            }
        }
    }

    fn gate(&self, lane: Lane) -> &Gate {
        match lane {
            Lane::Certificates => &self.certificates,
            Lane::Components | Lane::Monitoring | Lane::Instancetypes => &self.others,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lane_is_closed_only_when_its_reconcile_has_ended() {
        let gates = LaneGates::default();
        let permit = gates.enter(Lane::Certificates, "a").await.unwrap();
        assert!(gates.close(Lane::Certificates, "a").await.is_err(), "the lane reconciles");
        assert!(gates.close(Lane::Monitoring, "a").await.is_ok(), "another lane");
        drop(permit);
        assert!(gates.close(Lane::Certificates, "a").await.is_ok());
        assert!(gates.close(Lane::Certificates, "a").await.is_ok(), "again");
        assert!(gates.enter(Lane::Certificates, "a").await.is_none());
        assert!(gates.enter(Lane::Instancetypes, "a").await.is_none());
        assert!(gates.enter(Lane::Certificates, "b").await.is_some(), "the next resource");
    }
}
