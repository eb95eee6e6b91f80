//! `cargo xtask chaos …`: long campaigns with a seed, so that a failure can be had again.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use jiff::Timestamp;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use vitivirt_lab::{
    Lab, LabOptions, OperatorProcess, components, isolate,
    leadership::{self, LeadershipSpan, Messages},
    proxy::Partition,
};
use vitivirt_runtime::lease::message;

use crate::{kubevirt_operator, programs};

#[derive(Subcommand)]
pub(crate) enum ChaosCommand {
    /// Kill, stop and cut off replicas of kubevirt-operator at random: never may two of them lead at once
    Lease {
        /// How many faults
        #[arg(long, default_value_t = 20)]
        rounds: usize,
        /// The same seed gives the same faults
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Kill kubevirt-operator after every single write of a Machine's life: the end must be the same as without
    Machines,
}

const TIMEOUT: Duration = Duration::from_secs(40);
const MESSAGES: Messages = Messages { begins: message::ACQUIRED, ends: message::WORK_STOPPED };

pub(crate) fn run(chaos: &ChaosCommand) -> ExitCode {
    let (rounds, seed) = match chaos {
        ChaosCommand::Lease { rounds, seed } => (rounds, seed),
        ChaosCommand::Machines => return crate::finish(machines()),
    };
    isolate::run(
        || {
            components::ensure(&components::STANDARD)?;
            programs::build(false).map(|_| ())
        },
        || {
            let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
            runtime.block_on(lease(*rounds, *seed)).map(|()| ExitCode::SUCCESS)
        },
    )
}

/// The test command tries a few of the writes; the same test tries all of them when it is told to.
fn machines() -> Result<()> {
    let status = programs::cargo()
        .args(["test", "--quiet", "--package", "kubevirt-operator", "--test", "cluster", "--", "a_crash_after_a_write"])
        .env("CRASH_AFTER_EVERY_WRITE", "1")
        .status()
        .context("running the crash test")?;
    if !status.success() {
        bail!("a crash left a trace; the test says which");
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum ReplicaFault {
    Kill,
    Terminate,
    CutOff,
    ApiServerAway,
}

/// Two replicas: one reaches the API server directly, the other through the proxy, which can be cut.
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
        let faults = [ReplicaFault::Kill, ReplicaFault::Terminate, ReplicaFault::CutOff, ReplicaFault::ApiServerAway];
        let fault = *faults.choose(&mut random).context("there are faults")?;
        let which = random.random_range(0..2);
        let pause = Duration::from_millis(random.random_range(0..3000));
        eprintln!("round {round} of {rounds}: {fault:?} of replica {which} after {pause:?}");
        campaign.wait_for_leader().await?;
        tokio::time::sleep(pause).await;
        campaign.strike(fault, which).await?;
        campaign.wait_for_leader().await?;
        leadership::never_two(campaign.spans()?).with_context(|| format!("in round {round} with seed {seed}"))?;
    }
    println!("{rounds} faults, {} reigns, never two leaders", campaign.spans()?.len());
    campaign.lab.stop().await
}

async fn start(lab: &Lab, which: usize) -> Result<OperatorProcess> {
    kubevirt_operator::start_through(lab, "debug", which == 1).await
}

impl Campaign {
    fn spans(&self) -> Result<Vec<LeadershipSpan>> {
        let mut all = self.past.clone();
        for (number, replica) in self.replicas.iter().enumerate() {
            all.extend(leadership::spans(&format!("replica {number}"), &replica.log_lines(), MESSAGES, None)?);
        }
        Ok(all)
    }

    async fn wait_for_leader(&self) -> Result<()> {
        let looking = async {
            while !self.spans()?.iter().any(|span| span.to.is_none()) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(TIMEOUT, looking).await {
            Ok(result) => result,
            Err(_) => bail!("nobody leads after {TIMEOUT:?}: {:?}", self.spans()?),
        }
    }

    async fn strike(&mut self, fault: ReplicaFault, which: usize) -> Result<()> {
        match fault {
            ReplicaFault::Kill => self.replace(which, nix::sys::signal::Signal::SIGKILL).await,
            ReplicaFault::Terminate => self.replace(which, nix::sys::signal::Signal::SIGTERM).await,
            ReplicaFault::CutOff => {
                self.lab.proxy().partition(Partition::BlackHole);
                tokio::time::sleep(Duration::from_secs(18)).await;
                self.lab.proxy().partition(Partition::None);
                Ok(())
            }
            ReplicaFault::ApiServerAway => {
                self.lab.stop_api_server().await?;
                tokio::time::sleep(Duration::from_secs(12)).await;
                self.lab.start_api_server().await
            }
        }
    }

    /// Ends a replica with a signal and starts another in its place.
    async fn replace(&mut self, which: usize, signal: nix::sys::signal::Signal) -> Result<()> {
        let fresh = start(&self.lab, which).await?;
        let place = self.replicas.get_mut(which).context("there are two replicas")?;
        let mut old = std::mem::replace(place, fresh);
        old.signal(signal)?;
        let died = Timestamp::now();
        old.wait(Duration::from_secs(10)).await?;
        self.past.extend(leadership::spans(
            &format!("a past replica {which}"),
            &old.log_lines(),
            MESSAGES,
            Some(died),
        )?);
        Ok(())
    }
}
