//! The two operators, built by cargo.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, bail};

/// Builds both operators and returns the folder with their files.
pub(crate) fn build(release: bool) -> Result<PathBuf> {
    let mut command = cargo();
    if release {
        // Only what is shipped, with only the features that it asks for.
        command.args(["build", "--quiet", "--release", "--package", "kubevirt-operator", "--package", "virt-operator"]);
    } else {
        // With everything, so that dependencies are built as for every other command.
        command.args(["build", "--quiet", "--workspace", "--bins"]);
    }
    if !command.status().context("running cargo build")?.success() {
        bail!("the operators do not compile; cargo says why above");
    }
    Ok(target_dir()?.join(if release { "release" } else { "debug" }))
}

pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // `cargo run` tells a program about its own package. A cargo below it would take that for a change of environment
    // and build half of the dependencies again.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")) {
            command.env_remove(name);
        }
    }
    command
}

/// The file of a built program, copied to where it ends with the lab: a build that somebody starts meanwhile must not
/// change what runs in it.
pub(crate) fn stage(profile: &str, name: &str) -> Result<PathBuf> {
    let folder = vitivirt_lab::paths::run_dir()?.join("programs").join(profile);
    let staged = folder.join(name);
    if !staged.exists() {
        std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let built = target_dir()?.join(profile).join(name);
        std::fs::copy(&built, &staged).with_context(|| format!("copying {}", built.display()))?;
    }
    Ok(staged)
}

/// The workspace's root folder.
pub(crate) fn root() -> PathBuf {
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    own.parent().map(PathBuf::from).unwrap_or(own)
}

/// Where cargo builds: this program lies in it.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program's own file")?;
    let target = own.parent().and_then(|profile| profile.parent()).context("this program lies in no target folder")?;
    Ok(target.to_owned())
}
