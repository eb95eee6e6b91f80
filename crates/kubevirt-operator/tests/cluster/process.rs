//! The operator's process: health, metrics, log format, missing permissions and an API server outage.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use vitivirt_lab::{
    Lab, LabOptions, OperatorProcess,
    harness::{SharedLabs, Suite},
};
use vitivirt_runtime::{lease::message, program::message::STARTED};

use crate::{
    poll::poll_until,
    replica::{ACCOUNT, PATIENCE, grant_permissions, lease_rules, start, start_leader},
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        leader_and_standby_serve_health_and_metrics,
        log_lines_are_flat_json,
        a_missing_lease_permission_is_logged_and_recovers_when_granted,
        the_operator_leads_again_after_an_api_server_outage,
    );
}

async fn leader_and_standby_serve_health_and_metrics(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let leader = start_leader(&lab, "process-health", false).await?;
    let standby = start(&lab, "process-health", false).await?;
    standby.wait_for_message(STARTED, PATIENCE).await?;
    for program in [&leader, &standby] {
        let (status, body) = program.get(8081, "/healthz").await?;
        ensure!(status == 200, "/healthz answered {status}: {body}");
        // A replica is ready when its caches are synced, which takes a moment.
        let is_ready = || async { Ok(program.get(8081, "/readyz").await?.0 == 200) };
        poll_until(PATIENCE, is_ready, || "/readyz answers 200".to_owned()).await?;
    }
    ensure!(reports_leadership(&leader).await?, "the leader's metrics do not report leadership");
    ensure!(!reports_leadership(&standby).await?, "the standby's metrics report leadership");
    Ok(())
}

async fn log_lines_are_flat_json(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let program = start_leader(&lab, "process-log", false).await?;
    let text = program.log_text();
    // The program may still be writing the last line.
    let complete = text.rfind('\n').map_or("", |end| text.get(..end).unwrap_or_default());
    ensure!(!complete.is_empty(), "no complete log line: {text:?}");
    for line in complete.lines() {
        let line: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
        let line = line.as_object().context("not an object")?;
        for field in ["timestamp", "level", "message"] {
            ensure!(line.get(field).is_some_and(Value::is_string), "no {field} in {line:?}");
        }
        ensure!(!line.values().any(|value| value.is_object() || value.is_array()), "nested: {line:?}");
    }
    Ok(())
}

async fn a_missing_lease_permission_is_logged_and_recovers_when_granted(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    // Without the other permissions its caches are never complete, and it does not ask for the Lease.
    grant_permissions(&lab, "process-permissions").await?;
    lab.change_grant("process-permissions", ACCOUNT, &json!([])).await?;
    let program = start(&lab, "process-permissions", false).await?;
    program.wait_for_message(STARTED, PATIENCE).await?;
    let is_logged = || async { Ok(program.log_text().contains("cannot list resource \\\"leases\\\"")) };
    poll_until(PATIENCE, is_logged, || format!("the missing permission is logged; the log:\n{}", program.log_text()))
        .await?;
    lab.change_grant("process-permissions", ACCOUNT, &lease_rules()).await?;
    program.wait_for_message(message::ACQUIRED, PATIENCE).await.map(|_| ())
}

async fn the_operator_leads_again_after_an_api_server_outage(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    let mut program = start_leader(&lab, "process-outage", false).await?;
    lab.stop_api_server().await?;
    program.wait_for_message(message::LOST, PATIENCE).await?;
    lab.start_api_server().await?;
    let leads_again =
        || async { Ok(program.log_lines().iter().filter(|line| line["message"] == message::ACQUIRED).count() >= 2) };
    poll_until(PATIENCE, leads_again, || "the operator leads again".to_owned()).await?;
    program.signal(Signal::SIGTERM)?;
    let status = program.wait(Duration::from_secs(5)).await?;
    ensure!(status.success(), "{status}");
    lab.stop().await
}

async fn reports_leadership(program: &OperatorProcess) -> Result<bool> {
    let (status, metrics) = program.get(8080, "/metrics").await?;
    ensure!(status == 200, "/metrics answered {status}");
    let line = metrics.lines().find(|line| line.starts_with("kubevirt_operator_leader ")).context("no leader gauge")?;
    Ok(line.ends_with(" 1"))
}
