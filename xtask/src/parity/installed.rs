//! One installation in a lab of its own: what was there when the resource said Deployed, and what is there later.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use vitivirt_lab::{Lab, LabOptions, VirtOperator};
use vitivirt_snapshot::{Snapshot, compare};

use super::case::ParityCase;

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct InstalledSnapshots {
    /// From the resource's creation until it said Deployed.
    pub(super) seconds: f64,
    pub(super) deployed: Snapshot,
    pub(super) later: Snapshot,
}

const TIMEOUT: Duration = Duration::from_secs(120);
/// Longer than the release's operator takes from one look at everything to the next.
const LATER: Duration = Duration::from_secs(7);
const LOOKS: usize = 5;

pub(super) async fn install(case: &ParityCase, operator: VirtOperator) -> Result<InstalledSnapshots> {
    let who = if operator.program.is_some() { "ours" } else { "reference" };
    let lab = Lab::start(LabOptions::default()).await?;
    let installed = lab.keeping_logs(&format!("parity-{}-{who}", case.name), watch(&lab, case, operator)).await?;
    lab.stop().await?;
    Ok(installed)
}

async fn watch(lab: &Lab, case: &ParityCase, operator: VirtOperator) -> Result<InstalledSnapshots> {
    let is_reference = operator.program.is_none();
    case.prepare(lab).await?;
    lab.create_virt_operator(&VirtOperator { environment: case.environment.clone(), ..operator }).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    let clock = Instant::now();
    let kubevirt = lab.deploy_kubevirt(Some(case.custom_resource.clone())).await?;
    let seconds = clock.elapsed().as_secs_f64();
    let version = kubevirt.metadata.resource_version.context("an object without a version")?;
    let deployed = lab.installed(Some(&version)).await?;
    let later = if is_reference { settled(lab).await? } else { after(lab, LATER).await? };
    Ok(InstalledSnapshots { seconds, deployed, later })
}

async fn after(lab: &Lab, pause: Duration) -> Result<Snapshot> {
    tokio::time::sleep(pause).await;
    lab.installed(None).await
}

/// When nothing has changed from one look to the next.
async fn settled(lab: &Lab) -> Result<Snapshot> {
    let mut before = after(lab, LATER).await?;
    for _ in 0..LOOKS {
        let now = after(lab, LATER).await?;
        if compare(&before, &now).is_equal() {
            return Ok(now);
        }
        before = now;
    }
    bail!("KubeVirt's own operator is still changing things")
}
