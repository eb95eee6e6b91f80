//! Builds the programs that the image contains. The benchmarks run the same ones. The kubectl plugin is built in the same
//! way.
//!
//! They are static: the image contains no C library. musl comes with the Rust target, so a build needs no other C library
//! either. Only ring has C code, and it calls nothing but `memcpy` and its like: any C compiler for the architecture can
//! compile it.
//!
//! The same commit and the same compilers give the same bytes in every folder: no path of the machine gets into a
//! program.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::programs;

/// The programs in the image.
pub(crate) const PROGRAMS: [&str; 2] = ["kubevirt-operator", "virt-operator"];

/// A processor architecture, with the name that images use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum ImageArchitecture {
    Amd64,
    Arm64,
}

impl ImageArchitecture {
    /// That of this machine.
    pub(crate) fn host() -> Result<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Ok(ImageArchitecture::Amd64),
            "aarch64" => Ok(ImageArchitecture::Arm64),
            other => bail!("architecture {other:?} is not supported; supported values: x86_64, aarch64"),
        }
    }

    /// The name in an image.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ImageArchitecture::Amd64 => "amd64",
            ImageArchitecture::Arm64 => "arm64",
        }
    }

    pub(crate) fn target(self) -> &'static str {
        match self {
            ImageArchitecture::Amd64 => "x86_64-unknown-linux-musl",
            ImageArchitecture::Arm64 => "aarch64-unknown-linux-musl",
        }
    }

    /// A C compiler that creates code for this architecture, and its packages with the headers of a C library, by
    /// Debian's names.
    fn c_compiler(self) -> Result<(&'static str, &'static str)> {
        Ok(match self {
            _ if self == Self::host()? => ("cc", "gcc"),
            ImageArchitecture::Amd64 => ("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu libc6-dev-amd64-cross"),
            ImageArchitecture::Arm64 => ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
        })
    }

    /// A variable of the C compiler for this architecture only, such as `CC_x86_64_unknown_linux_musl`.
    fn variable(self, name: &str) -> String {
        format!("{name}_{}", self.target().replace('-', "_"))
    }
}

/// The commit that the programs report, and the time that everything in the image has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// The full hash. It ends with `-dirty` if files differ from the commit.
    pub(crate) revision: String,
    /// Seconds since 1970.
    pub(crate) time: u64,
}

impl Source {
    /// From the variables VITIVIRT_COMMIT and SOURCE_DATE_EPOCH, else from git.
    pub(crate) fn find() -> Result<Self> {
        let git = |arguments: &[&str]| {
            let output = Command::new("git").arg("-C").arg(programs::root()).args(arguments).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let given = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let revision = given("VITIVIRT_COMMIT").or_else(|| {
            let dirty = git(&["status", "--porcelain"])?;
            Some(git(&["rev-parse", "HEAD"])? + if dirty.is_empty() { "" } else { "-dirty" })
        });
        let time = given("SOURCE_DATE_EPOCH").or_else(|| git(&["log", "-1", "--format=%ct"]));
        let (Some(revision), Some(time)) = (revision, time) else {
            bail!("this is not a git repository; set VITIVIRT_COMMIT to the commit and SOURCE_DATE_EPOCH to its time")
        };
        let time = time.parse();
        let time = time.with_context(|| "SOURCE_DATE_EPOCH: must be a number of seconds since 1970".to_owned())?;
        Ok(Source { revision, time })
    }

    /// The commit as `--version` shows it.
    fn short(&self) -> String {
        let (commit, dirty) = self.revision.split_once('-').unwrap_or((&self.revision, ""));
        let short: String = commit.chars().take(8).collect();
        if dirty.is_empty() { short } else { format!("{short}-{dirty}") }
    }
}

/// How the programs are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Profile {
    /// The programs of a release
    Release,
    /// Compiled faster, larger and slower: for tests of the image
    Quick,
}

impl Profile {
    fn name(self) -> &'static str {
        match self {
            Profile::Release => "release",
            Profile::Quick => "quick",
        }
    }
}

/// Where the code is, and where cargo puts what it builds.
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) profile: Profile,
}

impl Workspace {
    /// That of this program.
    pub(crate) fn current(profile: Profile) -> Result<Self> {
        Ok(Workspace { root: programs::root(), target: programs::target_dir()?, profile })
    }

    /// Where [`build`] puts the programs.
    pub(crate) fn folder(&self, architecture: ImageArchitecture) -> PathBuf {
        self.target.join(architecture.target()).join(self.profile.name())
    }
}

/// Builds the programs of packages, which have the same names, and returns their folder. `audited` adds the list of their
/// dependencies, for scanners.
pub(crate) fn build(
    workspace: &Workspace,
    architecture: ImageArchitecture,
    source: &Source,
    audited: bool,
    packages: &[&str],
) -> Result<PathBuf> {
    let target = architecture.target();
    check_target(target)?;
    let compiler = check_compiler(architecture, |name| std::env::var_os(name).is_some(), programs::is_installed)?;
    let mut command = programs::cargo();
    command.current_dir(&workspace.root);
    if audited {
        command.arg("auditable");
    }
    // Only the released packages, so that cargo enables only their own features.
    command.args(["build", "--quiet", "--locked", "--profile", workspace.profile.name(), "--target", target]);
    command.args(packages.iter().flat_map(|package| ["--package", package]));
    command.arg("--target-dir").arg(&workspace.target);
    command.env("VITIVIRT_COMMIT", source.short()).env("SOURCE_DATE_EPOCH", source.time.to_string());
    command.env("CARGO_ENCODED_RUSTFLAGS", rust_flags(workspace, architecture)?);
    for name in ["RUSTFLAGS", "CARGO_BUILD_RUSTFLAGS"] {
        command.env_remove(name);
    }
    let set_default = |command: &mut Command, name: String, value: &str| {
        if std::env::var_os(&name).is_none() {
            command.env(name, value);
        }
    };
    set_default(&mut command, architecture.variable("CC"), compiler);
    // Some distributions let gcc call functions of glibc that check sizes. musl has none of them.
    set_default(&mut command, architecture.variable("CFLAGS"), "-U_FORTIFY_SOURCE");
    if !command.status().context("running cargo build")?.success() {
        bail!("the static programs for {} do not compile; see the output of cargo above", architecture.name());
    }
    let folder = workspace.folder(architecture);
    for program in packages {
        let file = folder.join(program);
        let content = std::fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        let folders = remapped(workspace)?.into_iter().map(|(folder, _)| folder);
        if let Some(found) = contained_path(&content, folders) {
            bail!(
                "{program} contains the path {} of this machine, so another folder would give other bytes",
                found.display()
            );
        }
    }
    Ok(folder)
}

/// Returns the default C compiler. Fails before anything is built if it is missing and no variable names another one.
fn check_compiler(
    architecture: ImageArchitecture,
    is_set: impl Fn(&str) -> bool,
    is_installed: impl Fn(&str) -> bool,
) -> Result<&'static str> {
    let (compiler, packages) = architecture.c_compiler()?;
    let variable = architecture.variable("CC");
    ensure!(
        is_set(&variable) || is_installed(compiler),
        "C compiler {compiler} for {} not found; install it (Debian: {packages}), or set {variable} to another one",
        architecture.name()
    );
    Ok(compiler)
}

/// The first of these folders that is named in a program.
fn contained_path(program: &[u8], mut folders: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    let text = String::from_utf8_lossy(program);
    folders.find(|folder| text.contains(&*folder.to_string_lossy()))
}

/// Installs the target if it is missing. It is not in rust-toolchain.toml, because all other commands work without it.
pub(crate) fn check_target(target: &str) -> Result<()> {
    let is_installed =
        || -> Result<bool> { Ok(Path::new(&rustc(&["--print", "target-libdir", "--target", target])?).is_dir()) };
    if is_installed()? {
        return Ok(());
    }
    let added = Command::new("rustup").current_dir(programs::root()).args(["target", "add", target]).status();
    ensure!(
        added.is_ok_and(|status| status.success()) && is_installed()?,
        "the Rust target {target} is not installed, and `rustup target add {target}` failed; connect to the internet, \
         or install the target from a mirror (RUSTUP_DIST_SERVER)"
    );
    Ok(())
}

fn rustc(arguments: &[&str]) -> Result<String> {
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output =
        Command::new(compiler).current_dir(programs::root()).args(arguments).output().context("running rustc")?;
    ensure!(output.status.success(), "rustc {arguments:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Flags that replace every path of this machine, and that link without a C compiler. Cargo separates them by 0x1f.
fn rust_flags(workspace: &Workspace, architecture: ImageArchitecture) -> Result<OsString> {
    let mut flags = OsString::new();
    for (from, to) in remapped(workspace)? {
        flags.push("--remap-path-prefix=");
        flags.push(from);
        flags.push(format!("={to}\x1f"));
    }
    if architecture != ImageArchitecture::host()? {
        // Rust's own linker and start files: the cross compiler links against glibc.
        flags.push("-Clinker=rust-lld\x1f");
    }
    flags.push("-Ctarget-feature=+crt-static");
    Ok(flags)
}

/// The folders whose names would get into panic messages, and what replaces them.
fn remapped(workspace: &Workspace) -> Result<Vec<(PathBuf, String)>> {
    let home = match std::env::var_os("CARGO_HOME") {
        Some(home) => PathBuf::from(home),
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cargo"),
    };
    let commit = rustc(&["--verbose", "--version"])?;
    let commit = commit.lines().find_map(|line| line.strip_prefix("commit-hash: ")).unwrap_or("unknown");
    let library = PathBuf::from(rustc(&["--print", "sysroot"])?).join("lib/rustlib/src/rust");
    // rustc applies the last prefix that matches, and the folder of a registry is inside of Cargo's.
    let mut folders = vec![
        (home.clone(), "/cargo".to_owned()),
        (library, format!("/rustc/{commit}")),
        (workspace.target.clone(), "/target".to_owned()),
        (workspace.root.clone(), "/vitivirt".to_owned()),
    ];
    // The name of a registry's folder differs where a mirror replaces crates.io.
    let registries = std::fs::read_dir(home.join("registry/src")).into_iter().flatten().flatten();
    folders.extend(registries.map(|folder| (folder.path(), "/cargo/registry".to_owned())));
    Ok(folders)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_a_program_has_a_short_commit() {
        let short = |revision: &str| Source { revision: revision.to_owned(), time: 0 }.short();
        assert_eq!(short("1a2b3c4d5e6f7081920a1b2c3d4e5f6071829304"), "1a2b3c4d");
        assert_eq!(short("1a2b3c4d5e6f7081920a1b2c3d4e5f6071829304-dirty"), "1a2b3c4d-dirty");
    }

    #[test]
    fn a_path_in_a_program_is_found() {
        let folders = || ["/home/user/.cargo", "/home/user/vitivirt"].map(PathBuf::from).into_iter();
        let found = contained_path(b"\x7fELF\xff\xfe/home/user/vitivirt/crates/a.rs\xff", folders());
        assert_eq!(found, Some("/home/user/vitivirt".into()));
        assert_eq!(contained_path(b"\x7fELF\xff/vitivirt/crates/a.rs", folders()), None);
    }

    #[test]
    fn a_missing_c_compiler_is_named_with_its_packages() {
        let check = |is_set: bool, is_installed: bool| {
            let other = match ImageArchitecture::host().unwrap() {
                ImageArchitecture::Amd64 => ImageArchitecture::Arm64,
                ImageArchitecture::Arm64 => ImageArchitecture::Amd64,
            };
            check_compiler(other, |_| is_set, |_| is_installed).map_err(|error| error.to_string())
        };
        assert!(check(true, false).is_ok() && check(false, true).is_ok());
        let error = check(false, false).unwrap_err();
        assert!(
            error.contains("-linux-gnu-gcc") && error.contains("Debian: gcc-") && error.contains("libc6-dev-"),
            "{error}"
        );
        assert!(error.contains("_unknown_linux_musl"), "{error}");
    }

    #[test]
    fn the_source_of_the_workspace_is_found() {
        let source = Source::find().unwrap();
        assert!(source.revision.len() >= 8 && source.time > 1_700_000_000, "{source:?}");
    }
}
