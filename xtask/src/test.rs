//! `cargo xtask test`: every check, each with its time.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::programs::cargo;

#[derive(Args)]
pub(crate) struct Options {
    /// Only what needs no cluster: format, lints, generated files, unit tests
    #[arg(long)]
    fast: bool,
}

/// Test binaries of the crates that only decide; they need no cluster.
const PURE_SUITES: [&str; 2] = ["install", "planner"];

/// Packages with a test binary that starts labs, in the order in which a failure explains the next ones.
const LAB_SUITES: [(&str, &str); 3] =
    [("vitivirt-lab", "lab"), ("kubevirt-operator", "cluster"), ("virt-operator", "cluster")];

struct Suite {
    name: String,
    what: What,
}

enum What {
    Run(Command),
    /// Why it cannot be run on this machine.
    Skip(&'static str),
}

impl Suite {
    fn cargo(name: &str, arguments: &[&str]) -> Self {
        let mut command = cargo();
        command.args(arguments);
        Suite { name: name.to_owned(), what: What::Run(command) }
    }
}

struct Outcome {
    name: String,
    time: Duration,
    verdict: Verdict,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    ReconcileResult,
    Failed,
    Skipped,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut outcomes = Vec::new();
    for Suite { name, what } in suites(options.fast) {
        eprintln!("\n━━ {name}");
        let started = Instant::now();
        let verdict = match what {
            What::Run(mut command) => {
                let status = command.status().with_context(|| format!("running {name}"))?;
                if status.success() { Verdict::ReconcileResult } else { Verdict::Failed }
            }
            What::Skip(why) => {
                eprintln!("skipped: {why}");
                Verdict::Skipped
            }
        };
        outcomes.push(Outcome { name, time: started.elapsed(), verdict });
    }
    report(&outcomes)
}

fn suites(fast: bool) -> Vec<Suite> {
    let mut suites = vec![
        Suite::cargo("format", &["fmt", "--all", "--check"]),
        Suite::cargo("lints", &["clippy", "--quiet", "--workspace", "--all-targets", "--", "--deny", "warnings"]),
        Suite::cargo("generated files", &["xtask", "generate", "--check"]),
    ];
    if is_installed("cargo-deny") {
        suites.push(Suite::cargo("dependencies", &["deny", "check", "bans", "licenses", "sources"]));
    } else {
        let why = "cargo-deny is not installed (`cargo install cargo-deny`)";
        suites.push(Suite { name: "dependencies".to_owned(), what: What::Skip(why) });
    }
    suites.push(Suite::cargo("unit tests", &["test", "--quiet", "--workspace", "--lib", "--bins"]));
    let mut pure = vec!["test", "--quiet", "--workspace"];
    pure.extend(PURE_SUITES.iter().flat_map(|name| ["--test", name]));
    suites.push(Suite::cargo("tests without a cluster", &pure));
    suites.push(Suite::cargo(
        "examples in docs",
        &["test", "--quiet", "--doc", "--package", "vitivirt-lab", "--package", "vitivirt-runtime"],
    ));
    if !fast {
        // Built here, with the network at hand, and timed apart from the tests that use them.
        suites.push(Suite::cargo("the lab's parts", &["xtask", "lab", "build"]));
        // The tests of one operator may run the other beside it.
        suites.push(Suite::cargo("both programs", &["build", "--quiet", "--workspace", "--bins"]));
        for (package, binary) in LAB_SUITES {
            suites.push(Suite::cargo(
                &format!("{package} on the lab"),
                &["test", "--quiet", "--package", package, "--test", binary],
            ));
        }
    }
    suites
}

fn is_installed(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

fn report(outcomes: &[Outcome]) -> Result<()> {
    println!("\n━━ time of each suite");
    for outcome in outcomes {
        let verdict = match outcome.verdict {
            Verdict::ReconcileResult => "passed",
            Verdict::Failed => "FAILED",
            Verdict::Skipped => "skipped",
        };
        println!("{:>8.1} s  {verdict:<7}  {}", outcome.time.as_secs_f64(), outcome.name);
    }
    let total: Duration = outcomes.iter().map(|outcome| outcome.time).sum();
    println!("{:>8.1} s  in all", total.as_secs_f64());
    let count = |verdict| outcomes.iter().filter(|outcome| outcome.verdict == verdict).count();
    let failed = count(Verdict::Failed);
    println!(
        "suites: {} passed, {failed} failed, {} skipped",
        count(Verdict::ReconcileResult),
        count(Verdict::Skipped)
    );
    if failed > 0 {
        bail!("{failed} of {} suites failed", outcomes.len());
    }
    Ok(())
}
