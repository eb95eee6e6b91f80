//! `cargo xtask image`: builds the image that contains both programs, without a container engine, and the archives of the
//! kubectl plugin.
//!
//! `shipped` builds the programs, `layout` the image, `plugin` the archives of the plugin, `sbom` the lists of
//! dependencies. `check` tests the result.

mod check;
mod layout;
mod plugin;
mod sbom;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use layout::{ImageFile, Layout, PROGRAM_FOLDER, Variant, sha256};
use plugin::PLUGIN;
use vitivirt_api::IMAGE;
use vitivirt_lab::{
    components::{self, ComponentGroup},
    isolate,
};

use crate::{
    programs,
    shipped::{self, ImageArchitecture, PROGRAMS, Profile, Source, Workspace},
};

/// Larger images take long to pull.
const MAXIMUM_SIZE: usize = 30_000_000;

#[derive(Args)]
pub(crate) struct ImageOptions {
    /// Architectures of the image. Default: that of this machine
    ///
    /// Another architecture needs a C compiler (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross).
    #[arg(long, value_delimiter = ',')]
    arch: Vec<ImageArchitecture>,
    /// Folder of the archives and the SBOMs. Default: target/image
    #[arg(long)]
    output: Option<PathBuf>,
    /// Build without SBOMs, which need cargo-cyclonedx and cargo-auditable
    #[arg(long)]
    no_sbom: bool,
    /// How the programs are compiled
    #[arg(long, value_enum, default_value_t = Profile::Release)]
    profile: Profile,
    /// Check the result: registry, digests, both operators on the lab, the plugin
    #[arg(long)]
    check: bool,
    /// Build the commit again in another folder and compare the bytes
    #[arg(long)]
    reproduce: bool,
}

pub(crate) fn run(options: &ImageOptions) -> ExitCode {
    if !options.check {
        return crate::finish(build(options));
    }
    let outside = || {
        let groups = [components::STANDARD.as_slice(), &components::HELM, &[ComponentGroup::Packaging]].concat();
        components::ensure(&groups)?;
        build(options)
    };
    isolate::run(outside, || {
        let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
        let plugin = plugin::file_name(ImageArchitecture::host()?);
        let folder = folder(options)?;
        runtime.block_on(check::run(&folder.join(image_name()), &folder.join(plugin))).map(|()| ExitCode::SUCCESS)
    })
}

fn build(options: &ImageOptions) -> Result<()> {
    let source = Source::find()?;
    let workspace = Workspace::current(options.profile)?;
    let archives = build_archives(options, &source, &workspace)?;
    if options.reproduce {
        reproduce(options, &source, &archives)?;
    }
    Ok(())
}

/// Builds the image and the plugin, writes archives and SBOMs, and returns the archives by file name.
fn build_archives(options: &ImageOptions, source: &Source, workspace: &Workspace) -> Result<BTreeMap<String, Vec<u8>>> {
    let (mut variants, mut plugins) = (Vec::new(), BTreeMap::new());
    for architecture in architectures(&options.arch)? {
        eprintln!("→ build {} for {} …", PROGRAMS.join(" and "), architecture.name());
        variants.push(variant(workspace, architecture, source, !options.no_sbom)?);
        eprintln!("→ build {PLUGIN} for {} …", architecture.name());
        plugins.insert(plugin::file_name(architecture), plugin(workspace, architecture, source, !options.no_sbom)?);
    }
    let layout = Layout::new(&variants, IMAGE, source)?;
    let archive = layout.archive()?;
    let folder = folder(options)?;
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    for (name, content) in variants.iter().flat_map(|variant| &variant.sboms) {
        write(&folder.join(name), content)?;
    }
    let path = folder.join(image_name());
    write(&path, &archive)?;
    println!("image    {IMAGE}");
    println!("digest   {}", layout.digest);
    println!("commit   {}", source.revision);
    println!("archive  {} ({:.1} MB)", path.display(), archive.len() as f64 / 1e6);
    for (name, content) in &plugins {
        write(&folder.join(name), content)?;
        println!("plugin   {} (sha256 {})", folder.join(name).display(), sha256(content));
    }
    ensure!(
        options.profile != Profile::Release || archive.len() <= MAXIMUM_SIZE * variants.len(),
        "the image has {} bytes; at most {MAXIMUM_SIZE} are allowed for each architecture",
        archive.len()
    );
    plugins.insert(image_name(), archive);
    Ok(plugins)
}

/// This machine's architecture first, then the others by name.
fn architectures(given: &[ImageArchitecture]) -> Result<Vec<ImageArchitecture>> {
    let host = ImageArchitecture::host()?;
    let mut architectures = if given.is_empty() { vec![host] } else { given.to_vec() };
    architectures.sort_by_key(|architecture| (*architecture != host, *architecture));
    architectures.dedup();
    Ok(architectures)
}

fn variant(workspace: &Workspace, architecture: ImageArchitecture, source: &Source, sbom: bool) -> Result<Variant> {
    if sbom {
        sbom::check_tools()?;
    }
    let folder = shipped::build(workspace, architecture, source, sbom, &PROGRAMS)?;
    let mut files = Vec::new();
    for program in PROGRAMS {
        files.push(ImageFile {
            path: format!("{PROGRAM_FOLDER}/{program}"),
            mode: 0o755,
            content: read(&folder.join(program))?,
        });
    }
    files.push(ImageFile { path: "licenses/LICENSE".to_owned(), mode: 0o644, content: license(workspace)? });
    let sboms = if sbom { sbom::create(workspace, architecture, source)? } else { Vec::new() };
    Ok(Variant { architecture, files, sboms })
}

/// The archive of the plugin. Cargo builds it separately, so that its dependencies do not change those of the operators.
fn plugin(workspace: &Workspace, architecture: ImageArchitecture, source: &Source, audited: bool) -> Result<Vec<u8>> {
    let folder = shipped::build(workspace, architecture, source, audited, &[PLUGIN])?;
    plugin::pack(read(&folder.join(PLUGIN))?, license(workspace)?, source)
}

fn license(workspace: &Workspace) -> Result<Vec<u8>> {
    read(&workspace.root.join("LICENSE"))
}

/// The folder of the archives and the SBOMs.
fn folder(options: &ImageOptions) -> Result<PathBuf> {
    match &options.output {
        Some(folder) => Ok(folder.clone()),
        None if options.profile == Profile::Quick => Ok(programs::target_dir()?.join("image-quick")),
        None => Ok(programs::target_dir()?.join("image")),
    }
}

/// The file name of the image.
fn image_name() -> String {
    let name = IMAGE.rsplit('/').next().unwrap_or(IMAGE).replace(':', "-");
    format!("{name}.tar")
}

/// Builds the commit again from a clone in another folder, with an empty target folder.
fn reproduce(options: &ImageOptions, source: &Source, archives: &BTreeMap<String, Vec<u8>>) -> Result<()> {
    ensure!(!source.revision.ends_with("-dirty"), "files differ from the commit; commit them, then use --reproduce");
    let folder = tempfile::tempdir().context("creating a folder for the clone")?;
    let clone = folder.path().join("another-folder");
    let mut git = std::process::Command::new("git");
    let status =
        git.args(["clone", "--quiet"]).arg(programs::root()).arg(&clone).status().context("running git clone")?;
    ensure!(status.success(), "git clone failed");
    let workspace = Workspace { target: folder.path().join("target"), root: clone, profile: options.profile };
    let again = ImageOptions {
        arch: options.arch.clone(),
        output: Some(folder.path().join("image")),
        no_sbom: options.no_sbom,
        profile: options.profile,
        check: false,
        reproduce: false,
    };
    eprintln!("→ build again in another folder …");
    let second = build_archives(&again, source, &workspace)?;
    let differs = |(name, content): &(&String, &Vec<u8>)| second.get(*name) != Some(*content);
    let differing: Vec<&str> = archives.iter().filter(differs).map(|(name, _)| name.as_str()).collect();
    ensure!(differing.is_empty(), "the second build has other bytes in {}", differing.join(", "));
    println!("both builds have the same bytes");
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("reading {}", path.display()))
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    fs::write(path, content).with_context(|| format!("writing {}", path.display()))
}
