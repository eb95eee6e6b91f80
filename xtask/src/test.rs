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

/// Packages with a test binary that starts labs, in the order in which a failure explains the next ones.
const LAB_SUITES: [(&str, &str); 3] = [("lab", "lab"), ("kubevirt-operator", "cluster"), ("virt-operator", "cluster")];

struct Suite {
    name: String,
    command: Command,
}

impl Suite {
    fn cargo(name: &str, arguments: &[&str]) -> Self {
        let mut command = cargo();
        command.args(arguments);
        Suite { name: name.to_owned(), command }
    }
}

struct Outcome {
    name: String,
    time: Duration,
    passed: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut outcomes = Vec::new();
    for mut suite in suites(options.fast)? {
        eprintln!("\n━━ {}", suite.name);
        let started = Instant::now();
        let status = suite.command.status().with_context(|| format!("running {}", suite.name))?;
        outcomes.push(Outcome { name: suite.name, time: started.elapsed(), passed: status.success() });
    }
    report(&outcomes)
}

fn suites(fast: bool) -> Result<Vec<Suite>> {
    let mut suites = vec![
        Suite::cargo("format", &["fmt", "--all", "--check"]),
        Suite::cargo("lints", &["clippy", "--quiet", "--workspace", "--all-targets", "--", "--deny", "warnings"]),
        Suite::cargo("generated files", &["xtask", "generate", "--check"]),
    ];
    if is_installed("cargo-deny") {
        suites.push(Suite::cargo("dependencies", &["deny", "check", "bans", "licenses", "sources"]));
    } else {
        eprintln!("cargo-deny is not installed (`cargo install cargo-deny`): dependencies are not checked");
    }
    suites.push(Suite::cargo("unit tests", &["test", "--quiet", "--workspace", "--lib", "--bins"]));
    suites.push(Suite::cargo(
        "examples in docs",
        &["test", "--quiet", "--doc", "--package", "lab", "--package", "runtime"],
    ));
    if !fast {
        // Built here, with the network at hand, and timed apart from the tests that use them.
        suites.push(Suite::cargo("the lab's parts", &["xtask", "lab", "build"]));
        for (package, binary) in LAB_SUITES {
            suites.push(Suite::cargo(
                &format!("{package} on the lab"),
                &["test", "--quiet", "--package", package, "--test", binary],
            ));
        }
    }
    Ok(suites)
}

fn is_installed(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

fn report(outcomes: &[Outcome]) -> Result<()> {
    println!("\n━━ time of each suite");
    for outcome in outcomes {
        let verdict = if outcome.passed { "passed" } else { "FAILED" };
        println!("{:>8.1} s  {verdict}  {}", outcome.time.as_secs_f64(), outcome.name);
    }
    let total: Duration = outcomes.iter().map(|outcome| outcome.time).sum();
    println!("{:>8.1} s  in all", total.as_secs_f64());
    let failed = outcomes.iter().filter(|outcome| !outcome.passed).count();
    println!("suites: {} passed, {failed} failed", outcomes.len() - failed);
    if failed > 0 {
        bail!("{failed} of {} suites failed", outcomes.len());
    }
    Ok(())
}
