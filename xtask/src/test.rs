//! `cargo xtask test`: runs all checks and prints the duration of each.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{
    programs::{cargo, is_installed},
    shipped::{self, ImageArchitecture},
};

#[derive(Args)]
pub(crate) struct TestOptions {
    /// Run only checks without a cluster: format, lints, generated files, unit tests
    #[arg(long)]
    fast: bool,
}

/// Test binaries that need no cluster.
const PURE_SUITES: [&str; 3] = ["commands", "install", "planner"];

/// Packages with a test binary that starts labs. A failure of an earlier one may explain failures of later ones.
const LAB_SUITES: [(&str, &str); 5] = [
    ("vitivirt-lab", "lab"),
    ("kubevirt-operator", "cluster"),
    ("virt-operator", "cluster"),
    ("virt-operator", "monitoring"),
    ("kubectl-vmachine", "cluster"),
];

struct TestSuite {
    name: String,
    action: SuiteAction,
}

enum SuiteAction {
    Run(Command),
    /// Runs a command and checks what it prints.
    Check(Command, fn(&str) -> Result<()>),
    /// Why the suite cannot run on this machine.
    Skip(String),
}

impl TestSuite {
    fn cargo(name: &str, arguments: &[&str]) -> Self {
        let mut command = cargo();
        command.args(arguments);
        TestSuite { name: name.to_owned(), action: SuiteAction::Run(command) }
    }
}

struct SuiteReport {
    name: String,
    time: Duration,
    result: SuiteResult,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SuiteResult {
    Passed,
    Failed,
    Skipped,
}

pub(crate) fn run(options: &TestOptions) -> Result<()> {
    let mut reports = Vec::new();
    for TestSuite { name, action } in suites(options.fast) {
        eprintln!("\n━━ {name}");
        let started = Instant::now();
        let result = match action {
            SuiteAction::Run(mut command) => {
                let status = command.status().with_context(|| format!("running {name}"))?;
                if status.success() { SuiteResult::Passed } else { SuiteResult::Failed }
            }
            SuiteAction::Check(command, check) => match checked(command, check) {
                Ok(()) => SuiteResult::Passed,
                Err(error) => {
                    eprintln!("error: {error:#}");
                    SuiteResult::Failed
                }
            },
            SuiteAction::Skip(reason) => {
                eprintln!("skipped: {reason}");
                SuiteResult::Skipped
            }
        };
        reports.push(SuiteReport { name, time: started.elapsed(), result });
    }
    report(&reports)
}

fn suites(fast: bool) -> Vec<TestSuite> {
    let mut suites = vec![
        TestSuite::cargo("format", &["fmt", "--all", "--check"]),
        TestSuite::cargo("lints", &["clippy", "--quiet", "--workspace", "--all-targets", "--", "--deny", "warnings"]),
        TestSuite::cargo("generated files", &["xtask", "generate", "--check"]),
    ];
    if is_installed("cargo-deny") {
        suites.push(TestSuite::cargo("dependencies", &["deny", "check", "bans", "licenses", "sources"]));
    } else {
        let reason = "cargo-deny is not installed (`cargo install cargo-deny`)";
        suites.push(TestSuite { name: "dependencies".to_owned(), action: SuiteAction::Skip(reason.to_owned()) });
    }
    suites.push(TestSuite::cargo("unit tests", &["test", "--quiet", "--workspace", "--lib", "--bins"]));
    let mut pure = vec!["test", "--quiet", "--workspace"];
    pure.extend(PURE_SUITES.iter().flat_map(|name| ["--test", name]));
    suites.push(TestSuite::cargo("tests without cluster", &pure));
    suites.push(TestSuite::cargo(
        "documentation examples",
        &["test", "--quiet", "--doc", "--package", "vitivirt-lab", "--package", "vitivirt-runtime"],
    ));
    if !fast {
        // Built here with network access, and timed separately from the tests that use the components.
        suites.push(TestSuite::cargo("lab components", &["xtask", "lab", "build"]));
        // The tests of one operator may also run the other one.
        suites.push(TestSuite::cargo("operator binaries", &["build", "--quiet", "--workspace", "--bins"]));
        for (package, binary) in LAB_SUITES {
            suites.push(TestSuite::cargo(
                &format!("{package} tests on the lab ({binary})"),
                &["test", "--quiet", "--package", package, "--test", binary],
            ));
        }
        let mut demo = cargo();
        demo.args(["xtask", "demo"]);
        suites.push(TestSuite { name: "demo".to_owned(), action: SuiteAction::Check(demo, check_demo) });
        suites.push(image_suite());
    }
    suites
}

/// Runs a command without a terminal. Its messages go to this process's.
fn checked(mut command: Command, check: fn(&str) -> Result<()>) -> Result<()> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("running the command")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{}:\n{text}", output.status);
    }
    check(&text)
}

/// The last table of Machines has the phases that the steps of the demo lead to, and nothing of them is left at the end.
fn check_demo(output: &str) -> Result<()> {
    let lines: Vec<Vec<&str>> = output.lines().map(|line| line.split_whitespace().collect()).collect();
    let is_header = |line: &Vec<&str>| line.starts_with(&["NAME", "PHASE"]);
    let Some(header) = lines.iter().rposition(is_header) else { bail!("no table of Machines in:\n{output}") };
    let rows = lines.iter().skip(header + 1).take_while(|line| line.len() > 2);
    let phases: Vec<(&str, &str)> = rows.filter_map(|row| Some((*row.first()?, *row.get(1)?))).take(4).collect();
    let expected = [
        ("basic-vm", "Running"),
        ("container-disk-vm", "Running"),
        ("custom-vm", "Stopped"),
        ("networked-vm", "Running"),
    ];
    if phases != expected {
        bail!("the demo ends with the phases {phases:?}, not {expected:?}");
    }
    let left = lines.iter().rev().take_while(|line| !line.starts_with(&["NAME"])).flatten();
    if let Some(crd) = left.into_iter().find(|word| word.contains("vitistack.io") || word.ends_with(".kubevirt.io")) {
        bail!("the demo leaves {crd}");
    }
    Ok(())
}

/// The image from its layout to both operators on a lab. A release has the same layout and other programs: those of
/// this suite compile in a fraction of the time.
fn image_suite() -> TestSuite {
    let name = "image";
    let target = ImageArchitecture::host().and_then(|architecture| shipped::check_target(architecture.target()));
    match target {
        Ok(()) => TestSuite::cargo(name, &["xtask", "image", "--profile", "quick", "--no-sbom", "--check"]),
        Err(error) => TestSuite { name: name.to_owned(), action: SuiteAction::Skip(error.to_string()) },
    }
}

fn report(reports: &[SuiteReport]) -> Result<()> {
    println!("\n━━ duration of each suite");
    for report in reports {
        let result = match report.result {
            SuiteResult::Passed => "passed",
            SuiteResult::Failed => "FAILED",
            SuiteResult::Skipped => "skipped",
        };
        println!("{:>8.1} s  {result:<7}  {}", report.time.as_secs_f64(), report.name);
    }
    let total: Duration = reports.iter().map(|report| report.time).sum();
    println!("{:>8.1} s  total", total.as_secs_f64());
    let count = |result| reports.iter().filter(|report| report.result == result).count();
    let failed = count(SuiteResult::Failed);
    println!("suites: {} passed, {failed} failed, {} skipped", count(SuiteResult::Passed), count(SuiteResult::Skipped));
    if failed > 0 {
        bail!("{failed} of {} suites failed", reports.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_table_of_the_demo_is_checked() {
        let table = |phase: &str| {
            format!(
                "NAME PHASE REASON\nbasic-vm {phase} Running\ncontainer-disk-vm Running Running\n\
                 custom-vm Stopped Stopped\nnetworked-vm Running Running\n\nmachine deleted\n"
            )
        };
        let crds = "NAME CREATED AT\nnetworks.k8s.cni.cncf.io 2026\n";
        check_demo(&format!("{}{}{crds}", table("Creating"), table("Running"))).unwrap();
        assert!(check_demo(&format!("{}{crds}", table("Creating"))).is_err());
        assert!(check_demo(crds).is_err());
        let left = check_demo(&format!("{}{crds}machines.vitistack.io 2026\n", table("Running"))).unwrap_err();
        assert!(left.to_string().contains("leaves machines.vitistack.io"), "{left}");
    }
}
