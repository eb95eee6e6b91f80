//! Start, health, metrics and end of the program.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use vitivirt_lab::harness::Suite;
use vitivirt_lab::{Lab, LabOptions, OperatorProcess};
use vitivirt_runtime::lease::message;
use vitivirt_runtime::program::message::STARTED;

use crate::replica::{ACCOUNT, PATIENCE, start, start_leader};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("health_and_metrics_are_served_by_leader_and_standby", |labs| async move {
        let lab = labs.plain().await?;
        let leader = start_leader(&lab, "life-health", false).await?;
        let standby = start(&lab, "life-health", false).await?;
        standby.wait_for_message(STARTED, PATIENCE).await?;
        for program in [&leader, &standby] {
            // Ready means that the caches are in step, which takes a moment.
            for path in ["/healthz", "/readyz"] {
                let answer = async {
                    loop {
                        let (status, body) = program.get(8081, path).await?;
                        if status == 200 {
                            return anyhow::Ok(());
                        }
                        ensure!(path == "/readyz", "{path} answered {status}: {body}");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                };
                tokio::time::timeout(PATIENCE, answer)
                    .await
                    .with_context(|| format!("{path} did not answer 200"))??;
            }
        }
        ensure!(leads(&leader).await? && !leads(&standby).await?, "only the leader says that it leads");
        Ok(())
    });

    suite.test("log_lines_are_flat_json", |labs| async move {
        let lab = labs.plain().await?;
        let program = start_leader(&lab, "life-log", false).await?;
        let text = program.log_text();
        // The last line may still be in the writing.
        let complete = text.rfind('\n').map_or("", |end| text.get(..end).unwrap_or_default());
        ensure!(!complete.is_empty(), "it logged nothing: {text:?}");
        for line in complete.lines() {
            let line: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
            let line = line.as_object().context("not an object")?;
            for field in ["timestamp", "level", "message"] {
                ensure!(line.get(field).is_some_and(Value::is_string), "no {field} in {line:?}");
            }
            ensure!(!line.values().any(|value| value.is_object() || value.is_array()), "nested: {line:?}");
        }
        Ok(())
    });

    suite.test("missing_rights_are_named_and_heal", |labs| async move {
        let lab = labs.plain().await?;
        lab.grant("life-rights", ACCOUNT, &json!([])).await?;
        let program = start(&lab, "life-rights", false).await?;
        program.wait_for_message(STARTED, PATIENCE).await?;
        let complaint = async {
            while !program.log_text().contains("cannot list resource \\\"leases\\\"") {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, complaint)
            .await
            .with_context(|| format!("nobody complained: {}", program.log_text()))?;
        lab.change_grant("life-rights", ACCOUNT, &crate::replica::lease_rules()).await?;
        program.wait_for_message(message::ACQUIRED, PATIENCE).await.map(|_| ())
    });

    suite.test("it_outlives_the_api_server", |_| async move {
        let lab = Lab::start(LabOptions::default()).await?;
        let mut program = start_leader(&lab, "life-outage", false).await?;
        lab.stop_api_server().await?;
        program.wait_for_message(message::LOST, PATIENCE).await?;
        lab.start_api_server().await?;
        let again = async {
            while program.log_lines().iter().filter(|line| line["message"] == message::ACQUIRED).count() < 2 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, again).await.context("it did not lead again")?;
        program.signal(Signal::SIGTERM)?;
        let status = program.wait(Duration::from_secs(5)).await?;
        ensure!(status.success(), "{status}");
        lab.stop().await
    });
}

async fn leads(program: &OperatorProcess) -> Result<bool> {
    let (status, metrics) = program.get(8080, "/metrics").await?;
    ensure!(status == 200, "/metrics answered {status}");
    let line = metrics.lines().find(|line| line.starts_with("kubevirt_operator_leader ")).context("no leader gauge")?;
    Ok(line.ends_with(" 1"))
}
