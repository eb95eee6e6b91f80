//! `cargo xtask parity`: creates the same KubeVirt resource in two labs, one with the reference operator and one with
//! our virt-operator, and compares all live objects.
//!
//! Our installation is read when the phase becomes Deployed, and again some seconds later: an object that is created or
//! changed after Deployed is a difference too. The reference operator gets the time that it needs.

mod cache;
mod case;
mod installed;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use case::ParityCase;
use clap::{Args, ValueEnum};
use installed::InstalledSnapshots;
use vitivirt_lab::{Extension, VirtOperator, components, isolate};
use vitivirt_snapshot::{Comparison, compare};

use crate::programs;

#[derive(Args, Clone)]
pub(crate) struct ParityOptions {
    /// Files with KubeVirt resources (YAML). Default: crates/install/tests/variants
    #[arg(short = 'f', long = "filename", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Extensions of the clusters, for the files given with -f
    #[arg(long, value_enum, value_delimiter = ',', value_name = "EXTENSION", requires = "files")]
    with: Vec<ParityExtension>,
    /// Environment variable of the operators, for the files given with -f
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = parse_variable, requires = "files")]
    environment: Vec<(String, String)>,
    /// Ignore cached results of the reference operator
    #[arg(long)]
    fresh: bool,
    /// Show all fields that differ, not only the first ones
    #[arg(long)]
    verbose: bool,
    /// Compare the reference operator with itself, to check this command
    #[arg(long)]
    itself: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ParityExtension {
    /// CRDs of the Prometheus operator, and the service account for monitoring
    Monitoring,
    /// CRDs of SecurityContextConstraints and Route
    Openshift,
}

impl ParityExtension {
    fn extension(self) -> Extension {
        match self {
            ParityExtension::Monitoring => Extension::Monitoring,
            ParityExtension::Openshift => Extension::OpenShift,
        }
    }
}

const MAX_FIELDS: usize = 5;

fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("must have the form NAME=VALUE".to_owned()),
    }
}

pub(crate) fn run(options: &ParityOptions) -> ExitCode {
    let cases = || case::load_all(&options.files, &options.with, &options.environment);
    isolate::run(
        || {
            cases()?;
            components::ensure(&components::STANDARD)?;
            programs::build(false).map(|_| ())
        },
        || {
            let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
            runtime.block_on(compare_all(&cases()?, options))
        },
    )
}

async fn compare_all(cases: &[ParityCase], options: &ParityOptions) -> Result<ExitCode> {
    let mut equal = 0;
    for case in cases {
        equal += usize::from(compare_case(case, options).await.with_context(|| case.name.clone())?);
    }
    println!("{equal} of {} KubeVirt resources have identical installations", cases.len());
    Ok(if equal == cases.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns whether both installations of a KubeVirt resource are identical.
async fn compare_case(case: &ParityCase, options: &ParityOptions) -> Result<bool> {
    let operator = if options.itself {
        VirtOperator::reference()
    } else {
        VirtOperator::ours(programs::stage("debug", "virt-operator")?)
    };
    eprintln!("→ {} …", case.name);
    let (reference, ours) =
        tokio::try_join!(reference_installation(case, options.fresh), installed::install(case, operator))?;
    let expected = &reference.later;
    // The reference operator still changes objects after Deployed.
    let ours = if options.itself { InstalledSnapshots { deployed: ours.later.clone(), ..ours } } else { ours };
    write_snapshots(&case.name, &reference, &ours)?;

    let comparison = compare(expected, &ours.deployed);
    let after = compare(&ours.deployed, &ours.later);
    println!("{}: {comparison}; Deployed after {:.1} s, reference {:.1} s", case.name, ours.seconds, reference.seconds);
    let fields = if options.verbose { usize::MAX } else { MAX_FIELDS };
    print_details(&comparison, "", fields);
    print_details(&after, "after Deployed: ", fields);
    Ok(comparison.is_equal() && after.is_equal())
}

fn print_details(comparison: &Comparison, prefix: &str, fields: usize) {
    if !comparison.is_equal() {
        for line in comparison.details(fields).lines() {
            println!("    {prefix}{line}");
        }
    }
}

async fn reference_installation(case: &ParityCase, fresh: bool) -> Result<InstalledSnapshots> {
    let path = cache::path(case)?;
    if !fresh && let Some(cached) = cache::read(&path) {
        return Ok(cached);
    }
    let installed = installed::install(case, VirtOperator::reference()).await?;
    cache::write(&path, &installed)?;
    Ok(installed)
}

/// Writes both snapshots to target/parity, for debugging.
fn write_snapshots(case: &str, reference: &InstalledSnapshots, ours: &InstalledSnapshots) -> Result<()> {
    let folder = programs::target_dir()?.join("parity");
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let write = |what: &str, snapshot| cache::write(&folder.join(format!("{case}-{what}.json.gz")), snapshot);
    write("reference", &reference.later)?;
    write("ours", &ours.deployed)
}

fn file_name(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}
