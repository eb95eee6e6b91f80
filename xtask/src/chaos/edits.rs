//! `cargo xtask chaos edits`: random edits of a KubeVirt resource. After each chain of edits the live objects must equal
//! a fresh installation of the last resource.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rand::{Rng, SeedableRng, rngs::StdRng};
use vitivirt_install::testing::random_spec;
use vitivirt_lab::{EditedInstallation, VirtOperator};

use crate::programs;

const CHAIN: usize = 8;
const MAX_FIELDS: usize = 5;

pub(super) struct EditCampaign<'a> {
    pub(super) pairs: usize,
    pub(super) chains: usize,
    pub(super) seed: u64,
    pub(super) replay: &'a [String],
}

/// One edit: the number of a random resource, and how long to wait for the installation of it. `None`: until it is complete.
struct Edit {
    seed: u64,
    replaced_after: Option<Duration>,
}

impl Edit {
    /// `5` or `5@300`: resource 5, replaced after 300 milliseconds.
    fn parse(text: &str) -> Result<Self> {
        let (seed, after) = text.split_once('@').map_or((text, None), |(seed, after)| (seed, Some(after)));
        let replaced_after = after.map(str::parse).transpose()?.map(Duration::from_millis);
        Ok(Self { seed: seed.parse()?, replaced_after })
    }

    fn text(&self) -> String {
        match self.replaced_after {
            None => self.seed.to_string(),
            Some(after) => format!("{}@{}", self.seed, after.as_millis()),
        }
    }
}

pub(super) async fn run(campaign: EditCampaign<'_>) -> Result<()> {
    let chains = chains(&campaign)?;
    let operator = VirtOperator::ours(programs::stage("debug", "virt-operator")?);
    let (mut failed, clock) = (0, Instant::now());
    for (number, chain) in chains.iter().enumerate() {
        let text = chain.iter().map(Edit::text).collect::<Vec<_>>().join(",");
        let result = Box::pin(check(&operator, chain)).await;
        eprintln!("{} of {} after {:.0} s: {text}", number + 1, chains.len(), clock.elapsed().as_secs_f64());
        if let Err(error) = result {
            failed += 1;
            println!("failed: cargo xtask chaos edits --replay {text}\n{error:#}");
        }
    }
    ensure!(failed == 0, "{failed} of {} chains of edits left a difference", chains.len());
    println!("{} chains of edits, every result equals a fresh installation", chains.len());
    Ok(())
}

fn chains(campaign: &EditCampaign<'_>) -> Result<Vec<Vec<Edit>>> {
    if !campaign.replay.is_empty() {
        let chain = campaign.replay.iter().map(|edit| Edit::parse(edit).with_context(|| format!("--replay {edit}")));
        return Ok(vec![chain.collect::<Result<_>>()?]);
    }
    let mut random = StdRng::seed_from_u64(campaign.seed);
    let mut chain = |length: usize| -> Vec<Edit> {
        let mut edit = |index: usize| {
            // The first one is installed, and the last one is compared.
            let is_replaced = index > 0 && index + 1 < length && random.random_bool(0.4);
            let replaced_after = is_replaced.then(|| Duration::from_millis(random.random_range(0..3000)));
            Edit { seed: random.random_range(0..1_000_000), replaced_after }
        };
        (0..length).map(&mut edit).collect()
    };
    let pairs = (0..campaign.pairs).map(|_| 2).chain((0..campaign.chains).map(|_| CHAIN));
    Ok(pairs.map(&mut chain).collect())
}

async fn check(operator: &VirtOperator, chain: &[Edit]) -> Result<()> {
    let [first, edits @ ..] = chain else { bail!("a chain needs at least one resource") };
    let installation = EditedInstallation::start(operator.clone(), &random_spec(first.seed)).await?;
    let mut last = first;
    for edit in edits {
        let context = || format!("resource {}", edit.text());
        installation.edit(&random_spec(edit.seed)).await.with_context(context)?;
        match edit.replaced_after {
            Some(after) => tokio::time::sleep(after).await,
            None => installation.wait_until_complete().await.with_context(context)?,
        }
        last = edit;
    }
    let comparison = installation.compare_with_fresh(&random_spec(last.seed)).await?;
    ensure!(comparison.is_equal(), "{comparison}\n{}", comparison.details(MAX_FIELDS));
    let writes = installation.writes_of_a_new_leader().await?;
    ensure!(writes.is_empty(), "nothing changed, but a restarted operator wrote {writes:?}");
    installation.lab.stop().await
}
