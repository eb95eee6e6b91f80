//! The results of the specs: read from ginkgo's report, and stored in a short form for the page in the docs.

use std::{collections::BTreeMap, fmt, fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::TestedOperator;

/// The results of one run.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Specs {
    pub(super) specs: Vec<Spec>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) name: String,
    /// In ginkgo's words.
    state: String,
    seconds: u64,
    /// The first line of the message. Empty if the spec passed.
    pub(super) failure: String,
}

impl Spec {
    pub(super) fn is_skipped(&self) -> bool {
        matches!(self.state.as_str(), "skipped" | "pending")
    }

    pub(super) fn has_passed(&self) -> bool {
        self.state == "passed"
    }
}

impl Specs {
    pub(super) fn failed(&self) -> impl Iterator<Item = &Spec> {
        self.specs.iter().filter(|spec| !spec.has_passed() && !spec.is_skipped())
    }

    /// The result of a run of one spec. A name that matches no spec would count as a success otherwise.
    pub(super) fn only(self) -> Result<Spec> {
        let mut ran: Vec<Spec> = self.specs.into_iter().filter(|spec| !spec.is_skipped()).collect();
        ensure!(ran.len() == 1, "{} specs ran, expected one", ran.len());
        ran.pop().context("no spec ran")
    }

    pub(super) fn by_name(&self) -> BTreeMap<&str, &Spec> {
        self.specs.iter().map(|spec| (spec.name.as_str(), spec)).collect()
    }

    /// The stored results with those of this run: specs that did not run keep their last result.
    pub(super) fn after(self, stored: Option<Self>) -> Self {
        let Some(stored) = stored else { return self };
        let present = self.by_name();
        let newest = |spec: &Spec| present.get(spec.name.as_str()).copied().filter(|spec| !spec.is_skipped()).cloned();
        let mut specs: Vec<Spec> =
            stored.specs.iter().map(|spec| newest(spec).unwrap_or_else(|| spec.clone())).collect();
        let known = stored.by_name();
        specs.extend(self.specs.iter().filter(|spec| !known.contains_key(spec.name.as_str())).cloned());
        Self { specs }
    }

    pub(super) fn write(&self, folder: &Path, operator: TestedOperator) -> Result<()> {
        let file = folder.join(file_name(operator));
        fs::write(&file, serde_json::to_string_pretty(self)?).with_context(|| format!("writing {}", file.display()))
    }

    /// The stored results, if the specs have run before.
    pub(super) fn read(folder: &Path, operator: TestedOperator) -> Result<Option<Self>> {
        let file = folder.join(file_name(operator));
        if !file.exists() {
            return Ok(None);
        }
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        serde_json::from_str(&text).map(Some).with_context(|| format!("parsing {}", file.display()))
    }
}

fn file_name(operator: TestedOperator) -> String {
    format!("{}.json", operator.name())
}

impl fmt::Display for Specs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let passed = self.specs.iter().filter(|spec| spec.has_passed());
        let seconds: u64 = self.specs.iter().map(|spec| spec.seconds).sum();
        write!(f, "{} specs passed, {} failed, in {seconds} s", passed.count(), self.failed().count())
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct GinkgoSuite {
    #[serde(default)]
    special_suite_failure_reasons: Option<Vec<String>>,
    #[serde(default)]
    spec_reports: Vec<SpecReport>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SpecReport {
    #[serde(default)]
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_type: String,
    leaf_node_text: String,
    state: String,
    run_time: u64,
    #[serde(default)]
    failure: Option<GinkgoFailure>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct GinkgoFailure {
    #[serde(default)]
    message: String,
}

/// Reads ginkgo's report. A failed set-up of the suite is an error.
pub(super) fn spec_reports(file: &Path) -> Result<Specs> {
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    parse(&text)
}

fn parse(text: &str) -> Result<Specs> {
    let suites: Vec<GinkgoSuite> = serde_json::from_str(text).context("parsing the report")?;
    let mut specs = Vec::new();
    for suite in suites {
        let reasons = suite.special_suite_failure_reasons.unwrap_or_default();
        for report in suite.spec_reports {
            let message = report.failure.map(|failure| failure.message).unwrap_or_default();
            let failure = message.split_whitespace().collect::<Vec<_>>().join(" ");
            let failed = !matches!(report.state.as_str(), "passed" | "skipped" | "pending");
            if report.leaf_node_type != "It" {
                let before = report.leaf_node_type.contains("BeforeSuite");
                ensure!(!(failed && before), "the suite was not set up: {failure}; {}", reasons.join(", "));
                continue;
            }
            let texts = report.container_hierarchy_texts.unwrap_or_default();
            let name = texts.into_iter().chain([report.leaf_node_text]).collect::<Vec<_>>().join(" ");
            specs.push(Spec { name, state: report.state, seconds: report.run_time / 1_000_000_000, failure });
        }
    }
    Ok(Specs { specs })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"[{"SpecialSuiteFailureReasons": null, "SpecReports": [
        {"ContainerHierarchyTexts": null, "LeafNodeType": "SynchronizedBeforeSuite", "LeafNodeText": "",
         "State": "passed", "RunTime": 5},
        {"ContainerHierarchyTexts": ["a", "b"], "LeafNodeType": "It", "LeafNodeText": "c", "State": "failed",
         "RunTime": 2500000000, "Failure": {"Message": "Timed out\n  after 1s"}},
        {"ContainerHierarchyTexts": ["a"], "LeafNodeType": "It", "LeafNodeText": "d", "State": "passed", "RunTime": 1}
    ]}]"#;

    #[test]
    fn the_report_of_ginkgo_is_read() {
        let specs = parse(REPORT).unwrap();
        assert_eq!(specs.to_string(), "1 specs passed, 1 failed, in 2 s");
        let failed: Vec<&Spec> = specs.failed().collect();
        assert_eq!((failed[0].name.as_str(), failed[0].failure.as_str()), ("a b c", "Timed out after 1s"));
    }

    #[test]
    fn exactly_one_spec_runs_alone() {
        let ran = |states: &[&str]| {
            let spec = |state: &&str| Spec { state: (*state).to_owned(), ..parse(REPORT).unwrap().specs.remove(0) };
            Specs { specs: states.iter().map(spec).collect() }.only()
        };
        assert!(ran(&["skipped", "passed", "skipped"]).unwrap().has_passed());
        assert!(ran(&["skipped", "skipped"]).is_err());
        assert!(ran(&["passed", "failed"]).is_err());
    }

    #[test]
    fn specs_that_did_not_run_keep_their_last_result() {
        let spec = |name: &str, state: &str| Spec {
            name: name.to_owned(),
            state: state.to_owned(),
            seconds: 1,
            failure: String::new(),
        };
        let stored = Specs { specs: vec![spec("a", "failed"), spec("b", "passed"), spec("c", "skipped")] };
        let run = Specs { specs: vec![spec("a", "passed"), spec("b", "skipped"), spec("d", "passed")] };
        let expected = [spec("a", "passed"), spec("b", "passed"), spec("c", "skipped"), spec("d", "passed")];
        assert_eq!(run.after(Some(stored)).specs, expected);
    }

    #[test]
    fn a_failed_set_up_of_the_suite_is_an_error() {
        let report = REPORT.replacen("\"passed\"", "\"failed\"", 1);
        assert!(parse(&report).is_err_and(|error| error.to_string().starts_with("the suite was not set up")));
    }
}
