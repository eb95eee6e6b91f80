//! The lab's folders. Built components are kept on disk; everything else is on the lab's own tmpfs.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// `$XDG_CACHE_HOME/vitistack-lab`, else `~/.cache/vitistack-lab`.
pub fn cache_dir() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .filter(|dir| !dir.is_empty())
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .context("XDG_CACHE_HOME and HOME are not set; set one of them: the lab stores its built components there")?;
    Ok(base.join("vitistack-lab"))
}

/// The built Go components, one folder per group and set of module versions.
pub(crate) fn components_dir() -> Result<PathBuf> {
    Ok(cache_dir()?.join("parts"))
}

/// An empty folder on disk. Each lab mounts its own tmpfs over it, in its own mount namespace.
pub fn run_dir() -> Result<PathBuf> {
    Ok(cache_dir()?.join("run"))
}

/// Logs of labs that a test has stopped, by name of the test: they are needed if the test fails later.
pub fn stopped_labs_dir(test: &str) -> Result<PathBuf> {
    Ok(run_dir()?.join("ended").join(test))
}

/// Logs of labs whose test failed. They are on disk, so that they can be read afterwards.
pub(crate) fn failures_dir() -> Result<PathBuf> {
    Ok(cache_dir()?.join("failures"))
}
