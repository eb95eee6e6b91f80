//! A Prometheus in the lab, and its HTTP API.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vitivirt_lab::{Lab, OperatorProcess, OperatorProcessOptions, components};

use crate::TIMEOUT;

const PORT: u16 = 9090;

/// A process that Prometheus scrapes, with the labels that the Prometheus operator would add.
pub(crate) struct Target {
    pub(crate) address: String,
    pub(crate) scheme: &'static str,
    pub(crate) namespace: String,
    pub(crate) pod: String,
}

pub(crate) struct Prometheus(OperatorProcess);

impl Prometheus {
    pub(crate) async fn start(lab: &Lab, targets: &[Target], rule_files: &[Value]) -> Result<Self> {
        let folder = lab.folder().join("prometheus");
        std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let mut rule_names = Vec::new();
        for (number, rules) in rule_files.iter().enumerate() {
            let name = format!("rules-{number}.yaml");
            // JSON is YAML.
            std::fs::write(folder.join(&name), rules.to_string()).context("writing rules")?;
            rule_names.push(name);
        }
        let jobs = targets.iter().map(|target| {
            json!({
                "job_name": target.pod,
                "scheme": target.scheme,
                "tls_config": {"insecure_skip_verify": true},
                "honor_labels": true,
                "static_configs": [{
                    "targets": [target.address],
                    "labels": {"namespace": target.namespace, "pod": target.pod},
                }],
            })
        });
        let config = json!({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "2s"},
            "rule_files": rule_names,
            "scrape_configs": jobs.collect::<Vec<_>>(),
        });
        let path = folder.join("prometheus.yaml");
        std::fs::write(&path, config.to_string()).context("writing the configuration")?;
        let process = lab
            .run(OperatorProcessOptions {
                file: components::prometheus()?,
                namespace: "monitoring".to_owned(),
                service_account: "prometheus-k8s".to_owned(),
                arguments: vec![
                    format!("--config.file={}", path.display()),
                    format!("--storage.tsdb.path={}", folder.join("data").display()),
                    format!("--web.listen-address={{address}}:{PORT}"),
                ],
                environment: Vec::new(),
                through_proxy: false,
            })
            .await?;
        let prometheus = Self(process);
        let mut poll = prometheus.poll("Prometheus is ready");
        while !prometheus.0.get(PORT, "/-/ready").await.is_ok_and(|(status, _)| status == 200) {
            poll.next().await?;
        }
        Ok(prometheus)
    }

    fn poll<'a>(&'a self, what: &'a str) -> Poll<'a> {
        Poll { prometheus: self, what, begin: Instant::now() }
    }

    async fn get(&self, path: &str) -> Result<Value> {
        let (status, text) = self.0.get(PORT, path).await?;
        ensure!(status == 200, "Prometheus responded with {status}: {text}");
        let response: Value = serde_json::from_str(&text).with_context(|| format!("parsing {text}"))?;
        ensure!(response["status"] == "success", "{response}");
        Ok(response["data"].clone())
    }

    /// Waits until every target has been scraped without an error.
    pub(crate) async fn wait_until_scraped(&self, targets: usize) -> Result<()> {
        let mut poll = self.poll("every target is scraped");
        loop {
            let data = self.get("/api/v1/targets?state=active").await?;
            let up = data["activeTargets"].as_array().into_iter().flatten().filter(|target| target["health"] == "up");
            if up.count() == targets {
                return Ok(());
            }
            poll.next().await?;
        }
    }

    /// Waits until every rule has been evaluated, and returns all rules. Fails if the evaluation of one failed.
    pub(crate) async fn wait_until_evaluated(&self) -> Result<Vec<Value>> {
        let mut poll = self.poll("every rule is evaluated");
        loop {
            let data = self.get("/api/v1/rules").await?;
            let groups = data["groups"].as_array().into_iter().flatten();
            let rules: Vec<Value> =
                groups.flat_map(|group| group["rules"].as_array().into_iter().flatten()).cloned().collect();
            if let Some(failed) = rules.iter().find(|rule| rule["health"] == "err") {
                bail!("a rule cannot be evaluated: {failed}");
            }
            if rules.iter().all(|rule| rule["health"] == "ok") {
                return Ok(rules);
            }
            poll.next().await?;
        }
    }

    /// The samples of an instant query.
    pub(crate) async fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let data = self.get(&format!("/api/v1/query?query={}", encode(expression))).await?;
        Ok(data["result"].as_array().cloned().unwrap_or_default())
    }

    pub(crate) async fn wait_for_value(&self, expression: &str, expected: &str) -> Result<()> {
        let what = format!("{expression} is {expected}");
        let mut poll = self.poll(&what);
        loop {
            let samples = self.query(expression).await?;
            if samples.iter().any(|sample| sample["value"][1] == expected) {
                return Ok(());
            }
            poll.next().await.with_context(|| format!("{samples:?}"))?;
        }
    }

    /// The names of all series that Prometheus has scraped or recorded.
    pub(crate) async fn series_names(&self) -> Result<BTreeSet<String>> {
        let data = self.get("/api/v1/label/__name__/values").await?;
        Ok(data.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect())
    }

    /// The series that an expression selects, as Prometheus parses it.
    pub(crate) async fn selected_series(&self, expression: &str) -> Result<BTreeSet<String>> {
        let tree = self.get(&format!("/api/v1/parse_query?query={}", encode(expression))).await?;
        let mut names = BTreeSet::new();
        add_selectors(&tree, &mut names);
        ensure!(!names.is_empty(), "{expression} selects no series");
        Ok(names)
    }
}

/// The pauses between the checks of one condition.
struct Poll<'a> {
    prometheus: &'a Prometheus,
    what: &'a str,
    begin: Instant,
}

impl Poll<'_> {
    async fn next(&mut self) -> Result<()> {
        if self.begin.elapsed() > TIMEOUT {
            bail!("timed out: {}; log of Prometheus:\n{}", self.what, self.prometheus.0.log_text());
        }
        sleep(Duration::from_millis(500)).await;
        Ok(())
    }
}

fn add_selectors(node: &Value, names: &mut BTreeSet<String>) {
    match node {
        Value::Object(fields) => {
            let is_selector =
                ["vectorSelector", "matrixSelector"].iter().any(|kind| fields.get("type").is_some_and(|of| of == kind));
            if let (true, Some(name)) = (is_selector, fields.get("name").and_then(Value::as_str)) {
                names.insert(name.to_owned());
            }
            fields.values().for_each(|field| add_selectors(field, names));
        }
        Value::Array(items) => items.iter().for_each(|item| add_selectors(item, names)),
        _ => {}
    }
}

/// Percent-encodes a value of a query string.
fn encode(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}
