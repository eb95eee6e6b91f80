//! `cargo xtask chaos …`: long tests with random faults. `--seed` repeats a failure.

mod edits;
mod takeover;
mod tenants;

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use jiff::Timestamp;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use vitivirt_lab::{
    Lab, LabOptions, OperatorProcess, components,
    harness::TIMEOUT_VARIABLE,
    isolate,
    leadership::{self, LeadershipSpan, Messages},
    proxy::Partition,
};
use vitivirt_runtime::lease::message;

use crate::{kubevirt_operator, programs};

#[derive(Subcommand)]
pub(crate) enum ChaosCommand {
    /// Inject random faults into two replicas and check that at most one leads
    Lease {
        /// Number of faults
        #[arg(long, default_value_t = 20)]
        rounds: usize,
        /// Seed of the random faults
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Edit a KubeVirt resource at random and compare the result with fresh installations
    Edits {
        /// Number of pairs of resources: one is installed, then the other
        #[arg(long, default_value_t = 30)]
        pairs: usize,
        /// Number of chains of eight resources, some of which are replaced before they are complete
        #[arg(long, default_value_t = 5)]
        chains: usize,
        /// Seed of the random resources
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Seeds of one chain, as a failure prints them
        #[arg(long, value_delimiter = ',', conflicts_with_all = ["pairs", "chains", "seed"])]
        replay: Vec<String>,
    },
    /// Kill virt-operator after random writes of installation, rotation, upgrade and removal, and compare the results
    Install {
        /// Random writes per phase, in addition to each boundary between kinds of writes
        #[arg(long, default_value_t = 40)]
        writes: u32,
        /// Seed of the random writes
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// One write, as a failure prints it, such as install:17
        #[arg(long, value_name = "PHASE:NUMBER", conflicts_with_all = ["writes", "seed"])]
        replay: Option<String>,
    },
    /// Replace upstream virt-operator with ours, and back, in every state of an installation; writes docs/takeover.md
    Takeover,
    /// Undo each repair of a Deployment for three minutes and count the writes of virt-operator
    Fight,
    /// Kill kubevirt-operator after each write for a Machine and check the result
    Machines,
    /// Attack kubevirt-operator from one namespace and measure how long another one waits
    Tenants(tenants::TenantsOptions),
}

const TIMEOUT: Duration = Duration::from_secs(40);
const MESSAGES: Messages = Messages { begins: message::ACQUIRED, ends: message::WORK_STOPPED };

pub(crate) fn run(chaos: &ChaosCommand) -> ExitCode {
    match chaos {
        ChaosCommand::Lease { rounds, seed } => in_labs(lease(*rounds, *seed)),
        ChaosCommand::Edits { pairs, chains, seed, replay } => {
            in_labs(edits::run(edits::EditCampaign { pairs: *pairs, chains: *chains, seed: *seed, replay }))
        }
        ChaosCommand::Install { writes, seed, replay } => {
            let variable = match replay {
                Some(replay) => ("FAILOVER_REPLAY", replay.clone()),
                None => ("FAILOVER_WRITES_AND_SEED", format!("{writes},{seed}")),
            };
            crate::finish(long_test("virt-operator", "a_leader_that_dies_after_a_write", variable))
        }
        ChaosCommand::Takeover => crate::finish(takeover::run()),
        ChaosCommand::Tenants(options) => in_labs(tenants::run(options)),
        ChaosCommand::Fight => {
            let test = "a_fight_with_another_client_is_limited_and_reported";
            crate::finish(long_test("virt-operator", test, ("FIGHT_FOR_THREE_MINUTES", "1".to_owned())))
        }
        ChaosCommand::Machines => {
            let variable = ("CRASH_AFTER_EVERY_WRITE", "1".to_owned());
            crate::finish(long_test("kubevirt-operator", "a_crash_after_a_write", variable))
        }
    }
}

/// Runs a campaign that starts labs.
fn in_labs(campaign: impl Future<Output = Result<()>>) -> ExitCode {
    isolate::run(
        || {
            components::ensure(&components::STANDARD)?;
            programs::build(false).map(|_| ())
        },
        || {
            let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
            runtime.block_on(campaign).map(|()| ExitCode::SUCCESS)
        },
    )
}

/// A test on the lab of which `cargo xtask test` runs a short form. The environment variable demands the long one.
/// Longer than any campaign.
const CAMPAIGN_TIMEOUT: Duration = Duration::from_secs(6 * 3600);

fn long_test(package: &str, test: &str, (variable, value): (&str, String)) -> Result<()> {
    let status = programs::cargo()
        .args(["test", "--quiet", "--package", package, "--test", "cluster", "--", test])
        .env(variable, value)
        .env(TIMEOUT_VARIABLE, CAMPAIGN_TIMEOUT.as_secs().to_string())
        .status()
        .with_context(|| format!("running {test}"))?;
    if !status.success() {
        bail!("{test} failed; see its output above");
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum ReplicaFault {
    Kill,
    Terminate,
    Partition,
    ApiServerDown,
}

/// Two replicas: one connects to the API server directly, the other through the fault proxy.
struct Campaign {
    lab: Lab,
    replicas: [OperatorProcess; 2],
    past: Vec<LeadershipSpan>,
}

async fn lease(rounds: usize, seed: u64) -> Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    let lab = Lab::start(LabOptions { nodes: 1, ..LabOptions::default() }).await?;
    kubevirt_operator::install(&lab).await?;
    let replicas = [start(&lab, 0).await?, start(&lab, 1).await?];
    let mut campaign = Campaign { lab, replicas, past: Vec::new() };
    for round in 1..=rounds {
        let faults =
            [ReplicaFault::Kill, ReplicaFault::Terminate, ReplicaFault::Partition, ReplicaFault::ApiServerDown];
        let fault = *faults.choose(&mut random).context("the list of faults is empty")?;
        let replica = random.random_range(0..2);
        let pause = Duration::from_millis(random.random_range(0..3000));
        eprintln!("round {round} of {rounds}: {fault:?} for replica {replica} after {pause:?}");
        campaign.wait_for_leader().await?;
        tokio::time::sleep(pause).await;
        campaign.inject(fault, replica).await?;
        campaign.wait_for_leader().await?;
        leadership::require_one_leader(campaign.spans()?)
            .with_context(|| format!("in round {round} with seed {seed}"))?;
    }
    println!("{rounds} faults, {} leadership spans, never two leaders", campaign.spans()?.len());
    campaign.lab.stop().await
}

async fn start(lab: &Lab, replica: usize) -> Result<OperatorProcess> {
    kubevirt_operator::start_through(lab, "debug", replica == 1).await
}

impl Campaign {
    fn spans(&self) -> Result<Vec<LeadershipSpan>> {
        let mut spans = self.past.clone();
        for (number, replica) in self.replicas.iter().enumerate() {
            spans.extend(leadership::spans(&format!("replica {number}"), &replica.log_lines(), MESSAGES, None)?);
        }
        Ok(spans)
    }

    async fn wait_for_leader(&self) -> Result<()> {
        let search = async {
            while !self.spans()?.iter().any(|span| span.to.is_none()) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(TIMEOUT, search).await {
            Ok(result) => result,
            Err(_) => bail!("no replica leads after {TIMEOUT:?}: {:?}", self.spans()?),
        }
    }

    async fn inject(&mut self, fault: ReplicaFault, replica: usize) -> Result<()> {
        match fault {
            ReplicaFault::Kill => self.replace(replica, nix::sys::signal::Signal::SIGKILL).await,
            ReplicaFault::Terminate => self.replace(replica, nix::sys::signal::Signal::SIGTERM).await,
            ReplicaFault::Partition => {
                self.lab.proxy().partition(Partition::BlackHole);
                tokio::time::sleep(Duration::from_secs(18)).await;
                self.lab.proxy().partition(Partition::None);
                Ok(())
            }
            ReplicaFault::ApiServerDown => {
                self.lab.stop_api_server().await?;
                tokio::time::sleep(Duration::from_secs(12)).await;
                self.lab.start_api_server().await
            }
        }
    }

    /// Stops a replica with a signal and starts another one instead.
    async fn replace(&mut self, replica: usize, signal: nix::sys::signal::Signal) -> Result<()> {
        let new = start(&self.lab, replica).await?;
        let current = self.replicas.get_mut(replica).context("replica not found")?;
        let mut old = std::mem::replace(current, new);
        old.signal(signal)?;
        let died = Timestamp::now();
        old.wait(Duration::from_secs(10)).await?;
        self.past.extend(leadership::spans(
            &format!("an earlier replica {replica}"),
            &old.log_lines(),
            MESSAGES,
            Some(died),
        )?);
        Ok(())
    }
}
