//! The Machine controller: observes from the caches, decides with `vitivirt-machine`, and counts the reports.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use serde_json::Value;
use vitivirt_api::{
    Failure, ObjectKey, Outcome, Plan, Report, Target,
    machine::{MachinePhase, MachineStatus, condition_type},
};
use vitivirt_machine::{Assessed, Settled, WaitingState};
use vitivirt_runtime::reconcile::Controller;

use crate::{metrics::MachineMetrics, observe::Observer, repairs::RepairHistory};

pub(crate) struct MachineController {
    pub(crate) observer: Observer,
    pub(crate) metrics: Arc<MachineMetrics>,
    /// The states that wait to be written.
    pub(crate) waiting_status: Mutex<HashMap<ObjectKey, WaitingState>>,
    pub(crate) repairs: Arc<RepairHistory>,
}

impl Controller for MachineController {
    type Observed = Assessed;
    type Status = MachineStatus;

    const NAME: &'static str = "Machine";

    async fn observe(&self, key: &ObjectKey) -> Result<Option<Assessed>, Failure> {
        let observed = self.observer.observe(key).await?;
        if observed.is_none() {
            self.waiting_status.lock().remove(key);
        }
        Ok(observed)
    }

    fn plan(&self, assessed: &Assessed) -> Result<Plan, Failure> {
        vitivirt_machine::plan(assessed)
    }

    fn owns(&self, assessed: &Assessed, target: &Target, live: &Value) -> bool {
        vitivirt_machine::owns(assessed.observed(), target, live)
    }

    fn report(&self, assessed: &Assessed, plan: &Plan, outcome: &Outcome) -> Report<MachineStatus> {
        self.repairs.record(assessed.observed(), plan);
        let report = vitivirt_machine::report(assessed, plan, outcome);
        let key = assessed.observed().id.key();
        let mut waiting = self.waiting_status.lock();
        let Settled { report, waiting: state } = vitivirt_machine::settle(assessed, report, waiting.get(&key));
        match state {
            Some(state) => waiting.insert(key, state),
            None => waiting.remove(&key),
        };
        drop(waiting);
        if let Some(status) = &report.status {
            self.metrics.record_report(assessed, &status.desired);
            log_phase_change(&status.observed, &status.desired);
        }
        report
    }

    /// The field with the name is called `machine`.
    fn span(&self, key: &ObjectKey) -> tracing::Span {
        let namespace = key.namespace().unwrap_or_default();
        tracing::info_span!("reconcile", controller = Self::NAME, machine = key.name(), namespace)
    }
}

fn log_phase_change(old: &MachineStatus, new: &MachineStatus) {
    if old.phase == new.phase {
        return;
    }
    let phase = |status: &MachineStatus| status.phase.map(MachinePhase::as_str).unwrap_or_default();
    let ready = new.conditions.iter().find(|condition| condition.type_ == condition_type::READY);
    let reason = ready.map(|ready| ready.reason.as_str()).unwrap_or_default();
    tracing::info!(old = phase(old), new = phase(new), reason, diagnosis = new.diagnosis, "phase changed");
}
