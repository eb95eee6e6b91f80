//! Runs the shell commands of the documentation, page by page, on a lab that is empty at the beginning. Those of the Helm
//! charts run on another one, because a chart refuses to replace what kubectl has installed.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use tokio::{process::Command, time::timeout};
use vitivirt_api::IMAGE_NAME;
use vitivirt_lab::{
    Extension, Lab, LabOptions, OwnProgram, components,
    harness::{SharedLabs, Suite},
    shell_blocks::{BlockRun, ShellBlock, shell_blocks},
};

/// In the order in which a user reads them. The commands of a page may need those of the pages before.
const PAGES: [&str; 11] = [
    "docs/installation.md",
    "docs/first-machine.md",
    "docs/gitops.md",
    "docs/faq.md",
    "docs/tenants.md",
    "docs/backup-and-restore.md",
    "docs/installing-kubevirt.md",
    "docs/upgrade.md",
    "docs/monitoring.md",
    "README.md",
    "docs/uninstall.md",
];
/// The pages of the charts. They continue the commands of other pages that install the charts.
const CHART_PAGES: [&str; 3] =
    ["charts/kubevirt-operator/README.md", "charts/kubevirt/README.md", "charts/virt-operator/README.md"];
const PATIENCE: Duration = Duration::from_secs(180);

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        the_commands_of_the_documentation_work,
        the_helm_commands_of_the_documentation_work,
    );
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

async fn the_commands_of_the_documentation_work(_: Arc<SharedLabs>) -> Result<()> {
    let blocks = blocks_of(&PAGES)?;
    run_blocks(blocks.into_iter().filter(|(_, block)| block.run != BlockRun::Helm).collect()).await
}

async fn the_helm_commands_of_the_documentation_work(_: Arc<SharedLabs>) -> Result<()> {
    let mut blocks = blocks_of(&PAGES)?;
    blocks.retain(|(_, block)| block.run == BlockRun::Helm);
    ensure!(!blocks.is_empty(), "no page installs the charts");
    blocks.extend(blocks_of(&CHART_PAGES)?);
    run_blocks(blocks).await
}

/// The blocks of some pages, each with its place.
fn blocks_of(pages: &[&str]) -> Result<Vec<(String, ShellBlock)>> {
    let mut blocks = Vec::new();
    for page in pages {
        let text = std::fs::read_to_string(root().join(page)).with_context(|| format!("reading {page}"))?;
        blocks.extend(shell_blocks(&text).into_iter().map(|block| (format!("{page}:{}", block.line), block)));
    }
    Ok(blocks)
}

/// Runs blocks on a new lab.
async fn run_blocks(blocks: Vec<(String, ShellBlock)>) -> Result<()> {
    let ours = PathBuf::from(env!("CARGO_BIN_EXE_kubevirt-operator"));
    let programs = ours.parent().context("the program has no folder")?.to_owned();
    let theirs = programs.join("virt-operator");
    ensure!(theirs.exists(), "{} does not exist; run `cargo build --workspace --bins`", theirs.display());
    let lab = Box::pin(Lab::start(LabOptions {
        extensions: vec![Extension::Multus, Extension::Cdi, Extension::Monitoring],
        own_programs: [ours, theirs].map(|file| OwnProgram { image: IMAGE_NAME.to_owned(), file }).to_vec(),
        ..LabOptions::default()
    }))
    .await?;
    let mut last = Vec::new();
    for (place, block) in blocks {
        match block.run {
            BlockRun::No { .. } => {}
            BlockRun::Last => last.push((place, block.commands)),
            BlockRun::Helm => run(&lab, &programs, &place, &block.commands).await?,
            BlockRun::Yes { set_up } => {
                let commands = format!("{}\n{}", set_up.unwrap_or_default(), block.commands);
                run(&lab, &programs, &place, &commands).await?;
            }
        }
    }
    for (place, commands) in last {
        run(&lab, &programs, &place, &commands).await?;
    }
    lab.stop().await
}

/// Runs commands as a user does in the folder of the repository, and fails with their output.
async fn run(lab: &Lab, programs: &Path, place: &str, commands: &str) -> Result<()> {
    let folders = [programs.to_owned(), components::kubectl_dir()?, components::helm_dir()?];
    let path = std::env::join_paths(folders.into_iter().chain(["/usr/bin".into(), "/bin".into()]))?;
    let work = Command::new("bash")
        .args(["-euo", "pipefail", "-c", commands])
        .current_dir(root())
        .env("PATH", path)
        .env("KUBECONFIG", lab.kubeconfig())
        // Helm writes its cache there.
        .env("HOME", lab.folder())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let Ok(output) = timeout(PATIENCE, work).await else { bail!("{place}: no end after {PATIENCE:?}:\n{commands}") };
    let output = output.context("running bash")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        output.status.success(),
        "{place}: {}:\n{commands}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    Ok(())
}
