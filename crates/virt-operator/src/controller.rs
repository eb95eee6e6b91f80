//! The KubeVirt controller: observe from the caches, decide in `install`.

use api::{Failure, ObjectKey, Outcome, Plan, Report, Target};
use install::Observed;
use runtime::pass::Controller;
use serde_json::Value;

use crate::observe::Observer;

pub(crate) struct KubeVirtController {
    pub(crate) observer: Observer,
}

impl Controller for KubeVirtController {
    type Observed = Observed;

    const NAME: &'static str = "KubeVirt";

    async fn observe(&self, key: &ObjectKey) -> Result<Option<Observed>, Failure> {
        self.observer.observe(key).await
    }

    fn plan(&self, observed: &Observed) -> Plan {
        install::plan(observed)
    }

    fn owns(&self, _: &Observed, _: &Target, live: &Value) -> bool {
        install::owns(live)
    }

    fn report(&self, observed: &Observed, plan: &Plan, outcome: &Outcome) -> Report {
        self.observer.remember(observed, plan, outcome);
        let report = install::report(observed, plan, outcome);
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
