//! One installation in its own lab: its objects when the phase becomes Deployed, and some time later.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use vitivirt_lab::{Lab, LabOptions, VirtOperator};
use vitivirt_snapshot::{Snapshot, compare};

use super::case::ParityCase;

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct InstalledSnapshots {
    /// From the creation of the KubeVirt resource until its phase is Deployed.
    pub(super) seconds: f64,
    pub(super) deployed: Snapshot,
    pub(super) later: Snapshot,
}

const TIMEOUT: Duration = Duration::from_secs(120);
/// Longer than the interval between two reconciles of the reference operator.
const LATER: Duration = Duration::from_secs(7);
const MAX_CHECKS: usize = 5;

pub(super) async fn install(case: &ParityCase, operator: VirtOperator) -> Result<InstalledSnapshots> {
    let name = if operator.program.is_some() { "ours" } else { "reference" };
    let lab = Lab::start(LabOptions::default()).await?;
    let installed = lab.keeping_logs(&format!("parity-{}-{name}", case.name), observe(&lab, case, operator)).await?;
    lab.stop().await?;
    Ok(installed)
}

async fn observe(lab: &Lab, case: &ParityCase, operator: VirtOperator) -> Result<InstalledSnapshots> {
    let is_reference = operator.program.is_none();
    case.prepare(lab).await?;
    lab.create_virt_operator(&VirtOperator { environment: case.environment.clone(), ..operator }).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    let clock = Instant::now();
    let kubevirt = lab.deploy_kubevirt(Some(case.custom_resource.clone())).await?;
    let seconds = clock.elapsed().as_secs_f64();
    let version = kubevirt.metadata.resource_version.context("the KubeVirt resource has no resourceVersion")?;
    let deployed = lab.installed(Some(&version)).await?;
    let later = if is_reference { snapshot_when_stable(lab).await? } else { snapshot_after(lab, LATER).await? };
    Ok(InstalledSnapshots { seconds, deployed, later })
}

async fn snapshot_after(lab: &Lab, pause: Duration) -> Result<Snapshot> {
    tokio::time::sleep(pause).await;
    lab.installed(None).await
}

/// Takes snapshots until two of them are identical.
async fn snapshot_when_stable(lab: &Lab) -> Result<Snapshot> {
    let mut before = snapshot_after(lab, LATER).await?;
    for _ in 0..MAX_CHECKS {
        let now = snapshot_after(lab, LATER).await?;
        if compare(&before, &now).is_equal() {
            return Ok(now);
        }
        before = now;
    }
    bail!("the reference operator is still changing objects")
}
