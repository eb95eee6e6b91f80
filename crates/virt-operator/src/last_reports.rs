//! What the last reconcile of each lane planned, and what drifted last, for the status page of the leader. It has a
//! bounded size and no values of fields.

use std::collections::{BTreeMap, VecDeque};

use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;
use vitivirt_api::{Outcome, Plan, Stop, Write};
use vitivirt_install::{Desired, Lane, Observed, view::drifted_objects};

use crate::commands::plan::written_fields;

const MOST_DRIFTS: usize = 10;
const MOST_WRITES: usize = 100;
const MOST_FIELDS: usize = 8;

#[derive(Default)]
pub(crate) struct LastReports(Mutex<Reports>);

#[derive(Clone, Default)]
pub(crate) struct Reports {
    pub(crate) lanes: BTreeMap<Lane, LaneReport>,
    /// The newest first.
    pub(crate) drifts: VecDeque<DriftRecord>,
}

/// The result of one reconcile.
#[derive(Clone)]
pub(crate) struct LaneReport {
    pub(crate) at: Timestamp,
    pub(crate) state: LaneState,
    /// What differs now. Empty if every write succeeded.
    pub(crate) open: Vec<OpenWrite>,
    /// How many there are.
    pub(crate) open_count: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LaneState {
    Done,
    Waiting(String),
    Failed(String),
}

/// A planned write.
#[derive(Clone)]
pub(crate) struct OpenWrite {
    pub(crate) action: &'static str,
    pub(crate) object: String,
    pub(crate) fields: Vec<String>,
}

/// An object that another client changed or deleted.
#[derive(Clone)]
pub(crate) struct DriftRecord {
    pub(crate) at: Timestamp,
    pub(crate) object: String,
    pub(crate) deleted: bool,
    pub(crate) fields: Vec<String>,
    pub(crate) managers: Vec<String>,
}

impl LastReports {
    pub(crate) fn get(&self) -> Reports {
        self.0.lock().clone()
    }

    /// Another replica leads now.
    pub(crate) fn clear(&self) {
        *self.0.lock() = Reports::default();
    }

    pub(crate) fn record(&self, lane: Lane, observed: &Observed, desired: &Desired, plan: &Plan, outcome: &Outcome) {
        let drifts: Vec<DriftRecord> = drifts(observed, desired, plan).collect();
        let report = LaneReport::new(observed, plan, outcome);
        let mut reports = self.0.lock();
        for drift in drifts {
            // A fight is one entry.
            reports.drifts.retain(|known| known.object != drift.object);
            reports.drifts.push_front(drift);
        }
        reports.drifts.truncate(MOST_DRIFTS);
        reports.lanes.insert(lane, report);
    }
}

fn drifts<'a>(observed: &'a Observed, desired: &Desired, plan: &'a Plan) -> impl Iterator<Item = DriftRecord> + 'a {
    drifted_objects(observed, desired, plan).into_iter().map(|drifted| {
        let mut writes = plan.steps.iter().flat_map(|step| &step.writes);
        let write = writes.find(|write| *write.target() == drifted.target);
        DriftRecord {
            at: observed.now,
            object: drifted.target.to_string(),
            deleted: drifted.deleted,
            fields: write.map(|write| first_fields(observed, write)).unwrap_or_default(),
            managers: drifted.managers,
        }
    })
}

/// The writes that were not sent. A step that waits has sent its own; the writes of a step that failed count as open.
fn open_writes<'a>(plan: &'a Plan, stop: &Stop) -> impl Iterator<Item = &'a Write> + use<'a> {
    let position = |name: &str| plan.steps.iter().position(|step| step.name == name);
    let first = match stop {
        Stop::Done => plan.steps.len(),
        Stop::Waiting { step, .. } => position(step).map_or(0, |index| index + 1),
        Stop::Failed { step, .. } | Stop::NameConflict { step, .. } => position(step).unwrap_or_default(),
    };
    plan.steps.iter().skip(first).flat_map(|step| &step.writes)
}

fn first_fields(observed: &Observed, write: &Write) -> Vec<String> {
    let mut fields = written_fields(observed, write);
    fields.truncate(MOST_FIELDS);
    fields
}

impl LaneReport {
    fn new(observed: &Observed, plan: &Plan, outcome: &Outcome) -> Self {
        let state = match &outcome.stop {
            Stop::Done => LaneState::Done,
            Stop::Waiting { wait, .. } => LaneState::Waiting(wait.message.clone()),
            Stop::Failed { failure, .. } => LaneState::Failed(failure.message.clone()),
            Stop::NameConflict { target, .. } => {
                LaneState::Failed(format!("{target} already exists and is not managed by this operator"))
            }
        };
        let open: Vec<&Write> = open_writes(plan, &outcome.stop).collect();
        let open_write = |write: &&Write| OpenWrite {
            action: match write {
                Write::Create { .. } | Write::Lazy { verb: "create", .. } => "create",
                Write::Delete { .. } => "delete",
                Write::Apply { .. } | Write::Patch { .. } | Write::Lazy { .. } | Write::Status { .. } => "update",
            },
            object: write.target().to_string(),
            fields: first_fields(observed, write),
        };
        Self {
            at: observed.now,
            state,
            open_count: open.len(),
            open: open.iter().take(MOST_WRITES).map(open_write).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use vitivirt_api::{Failure, ObjectKey, Step, Target, Wait};
    use vitivirt_install::Kind;

    use super::*;

    #[test]
    fn what_differs_is_what_was_not_written() {
        let write = |name: &str| Write::Delete {
            target: Target::new(Kind::Service.resource(), ObjectKey::namespaced("ns", name)),
            uid: "u".to_owned(),
            resource_version: None,
        };
        let step = |name: &'static str| Step::new(name).write(write(name));
        let plan = Plan { steps: vec![step("first"), step("second"), step("third")] };
        let names = |stop: &Stop| -> Vec<String> {
            open_writes(&plan, stop).map(|write| write.target().key.name().to_owned()).collect()
        };
        assert_eq!(names(&Stop::Done), [""; 0]);
        let wait = Wait { reason: "r", message: String::new(), requeue_after: None };
        assert_eq!(names(&Stop::Waiting { step: "second", wait }), ["third"]);
        let failure = Failure::invalid("r", String::new());
        assert_eq!(names(&Stop::Failed { step: "second", failure }), ["second", "third"]);
    }
}
