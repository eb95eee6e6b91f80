//! `cargo xtask bench …`: benchmarks. Counts and ratios are comparable between machines, durations are not.

mod install;
mod install_table;
mod machines;
mod processor_time;
mod readiness;
mod upgrade;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::Subcommand;
use jiff::Timestamp;
use serde::Serialize;
use vitivirt_lab::{components, isolate};

use crate::programs;

#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// Compare our virt-operator with the reference operator: time, memory, requests
    Install(install::InstallOptions),
    /// Compare upgrades from the previous release: time, requests, outage of virt-api
    Upgrade(upgrade::UpgradeOptions),
    /// Measure kubevirt-operator with many Machines (simulated KubeVirt)
    Machines(machines::MachinesOptions),
}

pub(crate) fn run(bench: &BenchCommand) -> ExitCode {
    let outside = || {
        components::ensure(match bench {
            BenchCommand::Upgrade(_) => components::WITH_PREVIOUS.as_slice(),
            _ => components::STANDARD.as_slice(),
        })?;
        // Benchmarks measure the release build.
        programs::build(true).map(|_| ())
    };
    isolate::run(outside, || {
        let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
        match bench {
            BenchCommand::Install(options) => runtime.block_on(install::run(options))?,
            BenchCommand::Upgrade(options) => runtime.block_on(upgrade::run(options))?,
            BenchCommand::Machines(options) => runtime.block_on(machines::run(options))?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

pub(crate) fn memory_mib(pid: &str, field: &str) -> u64 {
    memory_kib(pid, field) >> 10
}

/// A field of /proc/<pid>/status: VmHWM is the peak, VmRSS the resident memory now.
fn memory_kib(pid: &str, field: &str) -> u64 {
    let status = std::fs::read_to_string(PathBuf::from("/proc").join(pid).join("status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or_default()
}

fn write_results(name: &str, results: &impl Serialize) -> Result<()> {
    let folder = programs::target_dir()?.join("bench");
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let path = folder.join(format!("{name}-{}.json", Timestamp::now().strftime("%Y%m%dT%H%M%SZ")));
    std::fs::write(&path, serde_json::to_vec_pretty(results).context("writing the results")?)
        .with_context(|| format!("writing {}", path.display()))?;
    eprintln!("raw results: {}", path.display());
    Ok(())
}
