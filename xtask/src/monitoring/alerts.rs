//! The alerts of `alerts.yaml` as rule groups and PrometheusRules, and the index of their runbooks.

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use vitivirt_api::docs_url;

use super::{PAGE_HEADER, parse, yaml_file};

#[derive(Deserialize)]
pub(super) struct Alerts {
    pub(super) programs: Vec<ProgramAlerts>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProgramAlerts {
    program: String,
    group: String,
    pub(super) alerts: Vec<Alert>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Alert {
    pub(super) name: String,
    severity: Severity,
    /// How long the expression must be true. Without it, the alert fires at once.
    #[serde(default, rename = "for")]
    lasts: Option<String>,
    pub(super) expr: String,
    summary: String,
    description: String,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    Critical,
    Warning,
    Info,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Warning => "warning",
            Self::Info => "info",
        }
    }
}

impl Alerts {
    pub(super) fn read() -> Result<Self> {
        parse("alerts.yaml", include_str!("alerts.yaml"))
    }
}

impl ProgramAlerts {
    /// In the format of a rule file of Prometheus, which is also the spec of a PrometheusRule.
    fn groups(&self) -> Value {
        let rules: Vec<Value> = self.alerts.iter().map(|alert| alert.rule(&self.program)).collect();
        json!({"groups": [{"name": self.group, "rules": rules}]})
    }
}

impl Alert {
    fn rule(&self, program: &str) -> Value {
        let mut rule = Map::new();
        rule.insert("alert".to_owned(), json!(self.name));
        rule.insert("expr".to_owned(), json!(self.expr));
        rule.extend(self.lasts.as_ref().map(|lasts| ("for".to_owned(), json!(lasts))));
        let labels = json!({"severity": self.severity.as_str(), "component": program});
        rule.insert("labels".to_owned(), labels);
        let annotations = json!({
            "summary": self.summary,
            "description": self.description,
            "runbook_url": docs_url(&format!("runbooks/{}.md", self.name)),
        });
        rule.insert("annotations".to_owned(), annotations);
        Value::Object(rule)
    }
}

fn prometheus_rule(name: &str, namespace: &str, labels: &Value, spec: &Value) -> Value {
    json!({
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": spec,
    })
}

pub(super) fn files() -> Result<Vec<(String, String)>> {
    let alerts = Alerts::read()?;
    let mut files = vec![("docs/runbooks/README.md".to_owned(), index(&alerts))];
    for program in &alerts.programs {
        let groups = program.groups();
        match program.program.as_str() {
            "kubevirt-operator" => {
                let labels = json!({
                    "app.kubernetes.io/name": "kubevirt-operator",
                    "app.kubernetes.io/component": "manager",
                    "app.kubernetes.io/part-of": "vitivirt",
                });
                let rule =
                    prometheus_rule("kubevirt-operator-rules", kubevirt_operator::rbac::NAMESPACE, &labels, &groups);
                files.push(("config/prometheus/rules.yaml".to_owned(), yaml_file(rule)?));
                files.push(("charts/kubevirt-operator/files/alerts/machines.yaml".to_owned(), yaml_file(groups)?));
            }
            "virt-operator" => {
                let labels = json!({"app.kubernetes.io/part-of": "vitivirt", "prometheus.kubevirt.io": "true"});
                let rule = prometheus_rule("virt-operator-rules", "kubevirt", &labels, &groups);
                files.push(("config/virt-operator/alerts.yaml".to_owned(), yaml_file(rule)?));
                files.push(("charts/virt-operator/files/alerts/installation.yaml".to_owned(), yaml_file(groups)?));
            }
            other => {
                bail!("alerts.yaml: unsupported value {other:?}; supported values: kubevirt-operator, virt-operator")
            }
        }
    }
    Ok(files)
}

/// docs/runbooks/README.md
fn index(alerts: &Alerts) -> String {
    let mut text = format!("{PAGE_HEADER}# Alerts\n\nHow to install them: [Monitoring](../monitoring.md).\n");
    for program in &alerts.programs {
        text.push_str(&format!(
            "\n## {}\n\n| alert | severity | after | what it means |\n|---|---|---|---|\n",
            program.program
        ));
        for Alert { name, severity, lasts, summary, .. } in &program.alerts {
            let after = lasts.as_deref().unwrap_or("at once");
            text.push_str(&format!("| [{name}]({name}.md) | {} | {after} | {summary} |\n", severity.as_str()));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::programs::root;

    fn names(alerts: &Alerts) -> BTreeSet<String> {
        alerts.programs.iter().flat_map(|program| &program.alerts).map(|alert| alert.name.clone()).collect()
    }

    #[test]
    fn every_alert_has_a_page_with_the_four_parts_and_every_page_has_an_alert() {
        let alerts = Alerts::read().unwrap();
        let folder = root().join("docs/runbooks");
        let pages = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let pages: BTreeSet<String> = pages
            .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
            .filter(|name| name != "README")
            .collect();
        assert_eq!(names(&alerts), pages);
        for name in pages {
            let page = std::fs::read_to_string(folder.join(format!("{name}.md"))).unwrap();
            let headings: Vec<&str> = page.lines().filter(|line| line.starts_with('#')).collect();
            let title = format!("# {name}");
            assert_eq!(headings, [&title, "## Meaning", "## Impact", "## Diagnosis", "## Mitigation"], "{name}");
        }
    }

    #[test]
    fn alerts_have_other_names_than_those_that_virt_operator_installs() {
        let installed = std::fs::File::open(root().join("crates/install/assets/v1.8.4/rules.json.gz")).unwrap();
        let groups: Value = serde_json::from_reader(flate2::read::GzDecoder::new(installed)).unwrap();
        let rules = groups.as_array().unwrap().iter().flat_map(|group| group["rules"].as_array().unwrap());
        let upstream: BTreeSet<String> = rules.filter_map(|rule| rule["alert"].as_str()).map(str::to_owned).collect();
        assert_eq!(upstream.len(), 37, "one of the 38 alerts has two severities");
        let alerts = Alerts::read().unwrap();
        assert_eq!(names(&alerts).len(), alerts.programs.iter().map(|program| program.alerts.len()).sum::<usize>());
        assert!(names(&alerts).is_disjoint(&upstream), "{upstream:?}");
    }
}
