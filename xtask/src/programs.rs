//! Builds the two operators with cargo.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, bail};

use crate::shipped::{self, ImageArchitecture, Profile, Source, Workspace};

/// Builds both operators and returns the folder with the executables. The release build is the one of the image.
pub(crate) fn build(release: bool) -> Result<PathBuf> {
    if release {
        return shipped::build(
            &Workspace::current(Profile::Release)?,
            ImageArchitecture::host()?,
            &Source::find()?,
            false,
            &shipped::PROGRAMS,
        );
    }
    let mut command = cargo();
    // The whole workspace, so that dependencies have the same features as in other commands.
    command.args(["build", "--quiet", "--workspace", "--bins"]);
    if !command.status().context("running cargo build")?.success() {
        bail!("the operators do not compile; see the output of cargo above");
    }
    folder("debug")
}

/// The folder with the executables of a profile (debug or release).
pub(crate) fn folder(profile: &str) -> Result<PathBuf> {
    match profile {
        "release" => Ok(Workspace::current(Profile::Release)?.folder(ImageArchitecture::host()?)),
        profile => Ok(target_dir()?.join(profile)),
    }
}

pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // `cargo run` sets variables with the package of the program. A nested cargo would treat them as a change of the
    // environment and rebuild many dependencies.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")) {
            command.env_remove(name);
        }
    }
    command
}

/// Copies a built program into the lab's tmpfs, so that a build in the meantime does not change what runs in the lab.
pub(crate) fn stage(profile: &str, name: &str) -> Result<PathBuf> {
    let folder = vitivirt_lab::paths::run_dir()?.join("programs").join(profile);
    let staged = folder.join(name);
    if !staged.exists() {
        std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let built = self::folder(profile)?.join(name);
        std::fs::copy(&built, &staged).with_context(|| format!("copying {}", built.display()))?;
    }
    Ok(staged)
}

/// The workspace's root folder.
pub(crate) fn root() -> PathBuf {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    package.parent().map(PathBuf::from).unwrap_or(package)
}

/// The target folder of cargo, which contains this program.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let program = std::env::current_exe().context("finding the path of this program")?;
    let target =
        program.parent().and_then(|profile| profile.parent()).context("this program is not in a target folder")?;
    Ok(target.to_owned())
}

/// Whether a program is on the `PATH`.
pub(crate) fn is_installed(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}
