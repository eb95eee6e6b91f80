//! The KubeVirt controller: observe from the caches, decide in `install`.

use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Outcome, Plan, Report, Target};
use vitivirt_install::Observed;
use vitivirt_runtime::reconcile::Controller;

use crate::observe::Observer;

pub(crate) struct KubeVirtController {
    pub(crate) observer: Observer,
}

impl Controller for KubeVirtController {
    type Observed = Observed;
    type Status = Value;

    const NAME: &'static str = "KubeVirt";

    async fn observe(&self, key: &ObjectKey) -> Result<Option<Observed>, Failure> {
        self.observer.observe(key).await
    }

    fn plan(&self, observed: &Observed) -> Result<Plan, Failure> {
        Ok(vitivirt_install::plan(observed))
    }

    fn owns(&self, _: &Observed, _: &Target, live: &Value) -> bool {
        vitivirt_install::owns(live)
    }

    fn report(&self, observed: &Observed, plan: &Plan, outcome: &Outcome) -> Report {
        self.observer.remember(observed, plan, outcome);
        let report = vitivirt_install::report(observed, plan, outcome);
        tell(observed, outcome, &report);
        report
    }
}

fn tell(observed: &Observed, outcome: &Outcome, report: &Report) {
    let phase = |status: &Value| status.get("phase").and_then(Value::as_str).unwrap_or_default().to_owned();
    if let Some(status) = &report.status {
        let (before, after) = (phase(&status.observed), phase(&status.desired));
        if before != after {
            tracing::info!(phase = after, "the phase changed");
        }
    }
    if outcome.written > 0 {
        let generation = observed.kubevirt.metadata.generation;
        tracing::info!(written = outcome.written, generation, stop = ?outcome.stop, "changed the installation");
    }
}
