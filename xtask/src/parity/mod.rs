//! `cargo xtask parity`: the same KubeVirt resource in two labs, one with KubeVirt's own virt-operator and one with
//! ours, and every live object of both compared.
//!
//! Ours is taken at the very moment at which the resource says Deployed, and again some seconds later: whatever is
//! installed or changed after that word is a difference too. The release's operator is given the time that it needs.

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
    /// KubeVirt resources (YAML); without any, those of crates/install/tests/variants
    #[arg(short = 'f', long = "filename", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// What the clusters extension besides plain Kubernetes, for the files given with -f
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT", requires = "files")]
    with: Vec<ParityExtension>,
    /// A variable of the operators' Deployments, such as VIRT_API_IMAGE, for the files given with -f
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = variable, requires = "files")]
    environment: Vec<(String, String)>,
    /// Install with KubeVirt's own operator again, whatever earlier runs have kept of it
    #[arg(long)]
    fresh: bool,
    /// Show every field that differs, not only the first ones
    #[arg(long)]
    verbose: bool,
    /// Compare KubeVirt's own operator with itself: a check of this command
    #[arg(long)]
    itself: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ParityExtension {
    /// The Prometheus operator's resources, and the service account that the resource names
    Monitoring,
    /// Security context constraints and routes
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

const FIELDS: usize = 5;

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("must look like NAME=VALUE".to_owned()),
    }
}

pub(crate) fn run(options: &ParityOptions) -> ExitCode {
    let cases = || case::all(&options.files, &options.with, &options.environment);
    isolate::run(
        || {
            cases()?;
            components::ensure(&components::STANDARD)?;
            programs::build(false).map(|_| ())
        },
        || {
            let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
            runtime.block_on(all(&cases()?, options))
        },
    )
}

async fn all(cases: &[ParityCase], options: &ParityOptions) -> Result<ExitCode> {
    let mut equal = 0;
    for case in cases {
        equal += usize::from(one(case, options).await.with_context(|| case.name.clone())?);
    }
    println!("{equal} of {} KubeVirt resources installed alike", cases.len());
    Ok(if equal == cases.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether both installations of a resource are alike.
async fn one(case: &ParityCase, options: &ParityOptions) -> Result<bool> {
    let operator = if options.itself {
        VirtOperator::reference()
    } else {
        VirtOperator::ours(programs::stage("debug", "virt-operator")?)
    };
    eprintln!("→ {} …", case.name);
    let (reference, ours) = tokio::try_join!(reference(case, options.fresh), installed::install(case, operator))?;
    let expected = &reference.later;
    // Nothing of the release's operator is done when it says so.
    let ours = if options.itself { InstalledSnapshots { deployed: ours.later.clone(), ..ours } } else { ours };
    keep(&case.name, &reference, &ours)?;

    let comparison = compare(expected, &ours.deployed);
    let after = compare(&ours.deployed, &ours.later);
    println!("{}: {comparison}; Deployed after {:.1} s, reference {:.1} s", case.name, ours.seconds, reference.seconds);
    let fields = if options.verbose { usize::MAX } else { FIELDS };
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

async fn reference(case: &ParityCase, fresh: bool) -> Result<InstalledSnapshots> {
    let place = cache::path(case)?;
    if !fresh && let Some(kept) = cache::read(&place) {
        return Ok(kept);
    }
    let installed = installed::install(case, VirtOperator::reference()).await?;
    cache::write(&place, &installed)?;
    Ok(installed)
}

/// Both, for looking closely.
fn keep(case: &str, reference: &InstalledSnapshots, ours: &InstalledSnapshots) -> Result<()> {
    let folder = programs::target_dir()?.join("parity");
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let write = |what: &str, snapshot| cache::write(&folder.join(format!("{case}-{what}.json.gz")), snapshot);
    write("reference", &reference.later)?;
    write("ours", &ours.deployed)
}

fn file_name(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}
