//! Tests of the rules with promtool, without a cluster.

use std::{path::PathBuf, process::Stdio, sync::Arc};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::{io::AsyncWriteExt, process::Command};
use vitivirt_lab::{
    components,
    harness::{SharedLabs, Suite},
    manifests, paths,
};

use crate::{file, read};

/// Each file with a PrometheusRule, and the tests of its alerts.
const RULES: [(&str, &str); 2] = [
    ("config/prometheus/rules.yaml", "kubevirt-operator.yaml"),
    ("config/virt-operator/alerts.yaml", "virt-operator.yaml"),
];

pub(crate) fn add(suite: &mut Suite) {
    suite.test("every_alert_fires_and_is_silent", every_alert_fires_and_is_silent);
}

/// The rule groups of a PrometheusRule, in the format of a rule file.
pub(crate) fn spec_of(path: &str) -> Result<Value> {
    let documents = manifests::parse(&read(path)?)?;
    let rule = documents.first().with_context(|| format!("{path} is empty"))?;
    Ok(rule["spec"].clone())
}

async fn every_alert_fires_and_is_silent(_: Arc<SharedLabs>) -> Result<()> {
    for (path, tests) in RULES {
        let spec = spec_of(path)?;
        let folder = paths::run_dir()?.join(format!("rules-{tests}"));
        std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        // JSON is YAML.
        std::fs::write(folder.join("rules.yaml"), spec.to_string()).context("writing the rules")?;
        let source = file("crates/virt-operator/tests/monitoring/rules").join(tests);
        let text = std::fs::read_to_string(&source).with_context(|| format!("reading {}", source.display()))?;
        for alert in alert_names(&spec) {
            for part in ["fires", "is silent"] {
                ensure!(text.contains(&format!("- name: {alert} {part}\n")), "{tests} has no test that {alert} {part}");
            }
        }
        std::fs::write(folder.join("tests.yaml"), text).context("writing the tests")?;
        promtool(&folder, &["check", "rules", "--lint-fatal", "rules.yaml"]).await?;
        promtool(&folder, &["test", "rules", "tests.yaml"]).await?;
    }
    Ok(())
}

fn alert_names(spec: &Value) -> Vec<&str> {
    let groups = spec["groups"].as_array().into_iter().flatten();
    let rules = groups.flat_map(|group| group["rules"].as_array().into_iter().flatten());
    rules.filter_map(|rule| rule["alert"].as_str()).collect()
}

async fn promtool(folder: &PathBuf, arguments: &[&str]) -> Result<()> {
    let output = Command::new(components::promtool()?).args(arguments).current_dir(folder).output().await;
    let output = output.context("running promtool")?;
    ensure!(
        output.status.success(),
        "promtool {arguments:?} failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// What `promtool check metrics` reports about an exposition, by line.
pub(crate) async fn promtool_check_metrics(text: &str) -> Result<Vec<String>> {
    let mut child = Command::new(components::promtool()?)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting promtool")?;
    let mut input = child.stdin.take().context("promtool has no standard input")?;
    input.write_all(text.as_bytes()).await.context("writing to promtool")?;
    drop(input);
    let output = child.wait_with_output().await.context("waiting for promtool")?;
    let report = String::from_utf8_lossy(&output.stderr);
    // 3: it reports problems of style.
    ensure!(matches!(output.status.code(), Some(0 | 3)), "promtool cannot read the metrics: {report}");
    Ok(report.lines().map(str::to_owned).collect())
}
