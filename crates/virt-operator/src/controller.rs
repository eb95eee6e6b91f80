//! The KubeVirt controller: the four steps of a reconcile. `observe` and `desired` supply the input, and the crate
//! `vitivirt-install` decides.

use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Outcome, Plan, Report, Target};
use vitivirt_install::{Desired, Observed};
use vitivirt_runtime::reconcile::Controller;

use crate::{desired::DesiredStateBuilder, observe::Observer};

pub(crate) struct KubeVirtController {
    pub(crate) observer: Observer,
    pub(crate) desired: DesiredStateBuilder,
}

/// What a plan is computed from.
pub(crate) struct PlanInput {
    observed: Observed,
    desired: Desired,
}

impl Controller for KubeVirtController {
    type Observed = PlanInput;
    type Status = Value;

    const NAME: &'static str = "KubeVirt";

    async fn observe(&self, key: &ObjectKey) -> Result<Option<PlanInput>, Failure> {
        let Some(mut observed) = self.observer.observe(key).await? else { return Ok(None) };
        observed.repairs = self.desired.repairs();
        let desired = self.desired.desired(&observed).await?;
        self.observer.check_orphans(&mut observed, &desired).await?;
        Ok(Some(PlanInput { observed, desired }))
    }

    fn plan(&self, PlanInput { observed, desired }: &PlanInput) -> Result<Plan, Failure> {
        vitivirt_install::plan(observed, desired)
    }

    fn owns(&self, _: &PlanInput, target: &Target, live: &Value) -> bool {
        vitivirt_install::owns(target, live)
    }

    fn report(&self, PlanInput { observed, desired }: &PlanInput, plan: &Plan, outcome: &Outcome) -> Report {
        self.desired.remember(observed, desired, plan, outcome);
        let report = vitivirt_install::report(observed, desired, plan, outcome);
        log(observed, outcome, &report);
        report
    }
}

fn log(observed: &Observed, outcome: &Outcome, report: &Report) {
    let phase = |status: &Value| status.get("phase").and_then(Value::as_str).unwrap_or_default().to_owned();
    if let Some(status) = &report.status {
        let (old, new) = (phase(&status.observed), phase(&status.desired));
        if old != new {
            tracing::info!(old, new, "phase changed");
        }
    }
    if outcome.written > 0 {
        let generation = observed.kubevirt.metadata.generation;
        tracing::info!(written = outcome.written, generation, stop = ?outcome.stop, "installation changed");
    }
}
