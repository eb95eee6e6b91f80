//! The output of `check` in both programs: one line for each thing that the program needs of a cluster. Each program
//! fills the report; this module prints it and derives the exit code.

use std::{fmt::Write as _, process::ExitCode};

use anstyle::{AnsiColor, Style};
use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::{
    ClusterArguments, PlanFormat, PlanOutput,
    output::{print, print_styled, yaml},
    setting::namespace_name,
};

/// The last part of the help of `check`.
pub const CHECK_EXIT_STATUS: &str = "\
Exit status:
  0  No check failed; there may be warnings
  1  A check failed
  2  The result is unknown: the cluster cannot be read, or an argument is invalid";

/// The arguments of `check` in both programs.
#[derive(Debug, Clone, Args)]
pub struct CheckArguments {
    /// Check the cluster before the operator is installed
    #[arg(long)]
    pub pre: bool,
    /// Namespace of the operator. Default: the namespace in its manifests
    #[arg(short, long, value_parser = namespace_name)]
    pub namespace: Option<String>,
    #[command(flatten)]
    pub cluster: ClusterArguments,
    #[command(flatten)]
    pub output: PlanOutput,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum CheckStatus {
    Ok,
    /// Something that only some users need is missing.
    Warning,
    Failed,
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: String,
    pub status: CheckStatus,
    pub message: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Check {
    pub fn ok(name: &str, message: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status: CheckStatus::Ok, message: message.into(), remedy: None }
    }

    pub fn warning(name: &str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: CheckStatus::Warning, remedy: Some(remedy.into()), ..Self::ok(name, message) }
    }

    pub fn failed(name: &str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: CheckStatus::Failed, ..Self::warning(name, message, remedy) }
    }

    /// A check whose data could not be read.
    pub fn unknown(name: &str, error: &str) -> Self {
        Self::warning(name, format!("not checked: {error}"), "use an account that can read it")
    }
}

/// The oldest Kubernetes that has every API that the manifests use: admission policies (`v1`) came last.
const LEAST_MINOR: u32 = 30;

/// A lease that its holder has not renewed for this time belongs to a process that does not run.
const STALE_LEASE_SECONDS: i64 = 60;

/// How many missing permissions a line names.
const NAMED: usize = 5;

/// The version that an API server reports, as major, minor (which may end with `+`) and the whole version.
pub fn check_server_version(major: &str, minor: &str, version: &str) -> Check {
    let name = "API server";
    let number = |text: &str| text.trim_end_matches('+').parse::<u32>().ok();
    match (number(major), number(minor)) {
        (Some(1), Some(minor)) if minor < LEAST_MINOR => Check::failed(
            name,
            format!("Kubernetes {version} is too old"),
            format!("upgrade the cluster to v1.{LEAST_MINOR} or newer"),
        ),
        (Some(_), Some(_)) => Check::ok(name, format!("Kubernetes {version}")),
        _ => Check::warning(name, format!("unknown version {version:?}"), "check that it is Kubernetes"),
    }
}

/// The permissions of the operator's account, or of the user who installs it.
pub fn check_permissions(account: &str, missing: &[String], remedy: &str) -> Check {
    let name = "Permissions";
    if missing.is_empty() {
        return Check::ok(name, format!("{account} has all permissions"));
    }
    let named: Vec<&str> = missing.iter().take(NAMED).map(String::as_str).collect();
    let more = missing.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    Check::failed(name, format!("{account} cannot {}{more}", named.join(", ")), remedy)
}

/// The Lease of the operator: its holder, and the seconds since it was renewed.
pub fn check_lease(namespace: &str, name: &str, lease: Option<(&str, i64)>) -> Check {
    let title = "Operator";
    match lease {
        Some((holder, age)) if !holder.is_empty() && age <= STALE_LEASE_SECONDS => {
            Check::ok(title, format!("{holder} holds the Lease {namespace}/{name}"))
        }
        Some((holder, age)) if !holder.is_empty() => Check::failed(
            title,
            format!("{holder} renewed the Lease {namespace}/{name} {age} s ago"),
            format!("check the pods: kubectl get pods -n {namespace}"),
        ),
        Some(_) => Check::failed(
            title,
            format!("no process holds the Lease {namespace}/{name}"),
            format!("check the pods: kubectl get pods -n {namespace}"),
        ),
        None => Check::failed(
            title,
            format!("Lease {namespace}/{name} not found"),
            format!("install the operator, or set --namespace if it is not {namespace}"),
        ),
    }
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    pub checks: Vec<Check>,
}

impl CheckReport {
    fn count(&self, status: CheckStatus) -> usize {
        self.checks.iter().filter(|check| check.status == status).count()
    }

    pub fn exit_code(&self) -> ExitCode {
        if self.count(CheckStatus::Failed) > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    /// Prints the report to standard output.
    pub fn print(&self, output: &PlanOutput) -> Result<()> {
        match output.output {
            PlanFormat::Text => print_styled(&self.text(), output.color_choice()),
            PlanFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(self)?)),
            PlanFormat::Yaml => print(&format!("{}\n", yaml(self)?)),
        }
    }

    /// The text has ANSI escape codes, which the output stream removes if it has no colors.
    fn text(&self) -> String {
        let mut text = String::new();
        for Check { name, status, message, remedy } in &self.checks {
            let (word, style): (_, Style) = match status {
                CheckStatus::Ok => ("ok", AnsiColor::Green.on_default()),
                CheckStatus::Warning => ("warning", AnsiColor::Yellow.on_default()),
                CheckStatus::Failed => ("failed", AnsiColor::Red.on_default()),
            };
            let remedy = remedy.as_deref().map(|remedy| format!("; {remedy}")).unwrap_or_default();
            let _ = writeln!(text, "{style}{word:<7}{style:#}  {name}: {message}{remedy}");
        }
        let [ok, warnings, failed] =
            [CheckStatus::Ok, CheckStatus::Warning, CheckStatus::Failed].map(|status| self.count(status));
        let _ = writeln!(text, "{ok} ok, {warnings} with a warning, {failed} failed");
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report() -> CheckReport {
        let checks = vec![
            Check::ok("API server", "Kubernetes v1.36.3"),
            Check::warning("CDI", "not installed", "install it"),
            Check::failed("KubeVirt", "not installed", "install KubeVirt"),
        ];
        CheckReport { checks }
    }

    #[test]
    fn a_check_is_one_line_with_status_cause_and_remedy() {
        let plain = anstream::adapter::strip_str(&report().text()).to_string();
        let expected = "ok       API server: Kubernetes v1.36.3\n\
                        warning  CDI: not installed; install it\n\
                        failed   KubeVirt: not installed; install KubeVirt\n\
                        1 ok, 1 with a warning, 1 failed\n";
        assert_eq!(plain, expected);
    }

    #[test]
    fn an_old_or_unknown_kubernetes_is_reported() {
        let status = |major, minor| check_server_version(major, minor, "v").status;
        assert_eq!(status("1", "36"), CheckStatus::Ok);
        assert_eq!(status("1", "30+"), CheckStatus::Ok);
        assert_eq!(status("1", "29"), CheckStatus::Failed);
        assert_eq!(status("2", "0"), CheckStatus::Ok);
        assert_eq!(status("", ""), CheckStatus::Warning);
    }

    #[test]
    fn a_few_missing_permissions_are_named_and_the_others_counted() {
        assert_eq!(check_permissions("a", &[], "grant it").status, CheckStatus::Ok);
        let missing: Vec<String> = (1..=7).map(|number| format!("get x{number}")).collect();
        let check = check_permissions("a", &missing, "grant it");
        assert_eq!(check.status, CheckStatus::Failed);
        assert_eq!(check.message, "a cannot get x1, get x2, get x3, get x4, get x5, and 2 more");
    }

    #[test]
    fn only_a_lease_that_was_renewed_proves_that_the_operator_runs() {
        let status = |lease| check_lease("ns", "operator", lease).status;
        assert_eq!(status(Some(("pod-1", 3))), CheckStatus::Ok);
        assert_eq!(status(Some(("pod-1", 300))), CheckStatus::Failed);
        assert_eq!(status(Some(("", 1))), CheckStatus::Failed);
        assert_eq!(status(None), CheckStatus::Failed);
    }

    #[test]
    fn only_a_failed_check_changes_the_exit_code() {
        let mut report = report();
        assert_eq!(report.exit_code(), ExitCode::FAILURE);
        report.checks.pop();
        assert_eq!(report.exit_code(), ExitCode::SUCCESS);
    }

    #[test]
    fn json_has_one_object_per_check() {
        let expected = json!({"checks": [
            {"name": "API server", "status": "ok", "message": "Kubernetes v1.36.3"},
            {"name": "CDI", "status": "warning", "message": "not installed", "remedy": "install it"},
            {"name": "KubeVirt", "status": "failed", "message": "not installed", "remedy": "install KubeVirt"},
        ]});
        assert_eq!(serde_json::to_value(report()).unwrap(), expected);
    }
}
