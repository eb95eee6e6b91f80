//! The Machine controller: observe from the caches, decide in `machine`, count what was told.

use std::sync::Arc;

use serde_json::Value;
use vitivirt_api::machine::MachineStatus;
use vitivirt_api::{Failure, ObjectKey, Outcome, Plan, Report, Target};
use vitivirt_machine::Observed;
use vitivirt_runtime::reconcile::Controller;

use crate::metrics::MachineMetrics;
use crate::observe::Observer;

pub(crate) struct MachineController {
    pub(crate) observer: Observer,
    pub(crate) metrics: Arc<MachineMetrics>,
}

impl Controller for MachineController {
    type Observed = Observed;
    type Status = Value;

    const NAME: &'static str = "Machine";

    async fn observe(&self, key: &ObjectKey) -> Result<Option<Observed>, Failure> {
        self.observer.observe(key).await
    }

    fn plan(&self, observed: &Observed) -> Result<Plan, Failure> {
        Ok(vitivirt_machine::plan(observed))
    }

    fn owns(&self, observed: &Observed, target: &Target, live: &Value) -> bool {
        vitivirt_machine::owns(observed, target, live)
    }

    fn report(&self, observed: &Observed, plan: &Plan, outcome: &Outcome) -> Report {
        let report = vitivirt_machine::report(observed, plan, outcome);
        let desired = report.status.as_ref().map(|status| status_of(&status.desired));
        if let Some(desired) = desired {
            self.metrics.reported(observed, &desired);
            let before = observed.machine.status.as_ref().and_then(|status| status.phase.as_deref());
            if let Some(phase) = desired.phase.as_deref().filter(|phase| Some(*phase) != before) {
                tracing::info!(phase, "the phase changed");
            }
        }
        report
    }

    /// The seed's names for these fields.
    fn span(&self, key: &ObjectKey) -> tracing::Span {
        let namespace = key.namespace().unwrap_or_default();
        tracing::info_span!("reconcile", controller = Self::NAME, machine = key.name(), namespace)
    }
}

/// A status of ours can be read; should it ever not be, nothing is counted.
fn status_of(value: &Value) -> MachineStatus {
    serde_json::from_value(value.clone()).unwrap_or_default()
}
