//! Where the lab keeps its files: built parts outlive a lab, everything else lies on the lab's own tmpfs.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// `$XDG_CACHE_HOME/vitistack-lab`, else `~/.cache/vitistack-lab`.
pub fn cache_dir() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .filter(|dir| !dir.is_empty())
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME is set: set one, the lab keeps its built parts there")?;
    Ok(base.join("vitistack-lab"))
}

/// The built Go parts, one folder per group and set of module versions.
pub(crate) fn parts_dir() -> Result<PathBuf> {
    Ok(cache_dir()?.join("parts"))
}

/// An empty folder on disk; every lab's mount namespace has a tmpfs of its own over it.
pub fn run_dir() -> Result<PathBuf> {
    Ok(cache_dir()?.join("run"))
}

/// Logs of labs that a test has ended itself, by the test's name: nobody knows yet whether the test will fail.
pub fn ended_dir(test: &str) -> Result<PathBuf> {
    Ok(run_dir()?.join("ended").join(test))
}

/// Logs of labs whose test failed: on disk, so that they can be read afterwards.
pub(crate) fn failures_dir() -> Result<PathBuf> {
    Ok(cache_dir()?.join("failures"))
}
