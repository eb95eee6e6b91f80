//! What is wrong in the lanes that only report. The lane `Components` writes it into the status of the KubeVirt resource.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use vitivirt_install::{Lane, LaneProblem};

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
