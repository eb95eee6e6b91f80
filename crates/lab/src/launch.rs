//! Starts the program of a pod like a container runtime: with its own hostname, its own root folder with its volumes,
//! and only its own environment.
//!
//! A process cannot change root and hostname of its child before `exec` without unsafe code. So the lab runs its own
//! executable again with the configuration in the environment, and that process sets up everything and executes the
//! program. KubeVirt's components use the hostname as their identity in leader election.

use std::{
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use serde::{Deserialize, Serialize};

use crate::isolate::OWN_FILE;

const LAUNCH: &str = "VITISTACK_LAB_LAUNCH";
/// Folders of the machine that a dynamically linked program and the Go runtime need.
const SHARED: [&str; 8] = ["/bin", "/dev", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/usr"];
const PROGRAM: &str = "/program";

#[derive(Serialize, Deserialize)]
pub(crate) struct Launch {
    pub(crate) hostname: String,
    pub(crate) root: PathBuf,
    pub(crate) program: PathBuf,
    /// The program's `argv[0]`.
    pub(crate) name: String,
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
}

impl Launch {
    /// The executable and the environment that start this program.
    pub(crate) fn command(&self) -> Result<(PathBuf, Vec<(String, String)>)> {
        let configuration = serde_json::to_string(self).context("serializing the launch configuration")?;
        Ok((OWN_FILE.into(), vec![(LAUNCH.to_owned(), configuration)]))
    }

    fn become_program(self) -> Result<std::convert::Infallible> {
        unshare(CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWNS).context("creating the pod's namespaces")?;
        // If a mount above the root were shared, the machine's folders would also appear in the lab's mount namespace,
        // below a folder that the lab removes recursively.
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .context("making the pod's mounts private")?;
        nix::unistd::sethostname(&self.hostname).context("setting the pod's hostname")?;
        for folder in SHARED {
            share(Path::new(folder), &self.root)?;
        }
        let inside = PROGRAM.trim_start_matches('/');
        std::fs::write(self.root.join(inside), "").context("creating the program's mount point")?;
        bind(&self.program, &self.root.join(inside))?;
        nix::unistd::chroot(&self.root).context("changing the root folder")?;
        std::env::set_current_dir("/").context("changing to the new root folder")?;
        let error =
            Command::new(PROGRAM).arg0(&self.name).args(&self.arguments).env_clear().envs(self.environment).exec();
        Err(error).with_context(|| format!("starting {}", self.program.display()))
    }
}

/// Mounts a folder of the machine into the pod's root. A symbolic link (`/lib` → `usr/lib`) stays a link.
fn share(folder: &Path, root: &Path) -> Result<()> {
    let inside = root.join(folder.strip_prefix("/").unwrap_or(folder));
    if let Ok(target) = std::fs::read_link(folder) {
        if !inside.is_symlink() {
            std::os::unix::fs::symlink(target, &inside).with_context(|| format!("linking {}", inside.display()))?;
        }
        return Ok(());
    }
    if folder.is_dir() {
        std::fs::create_dir_all(&inside).with_context(|| format!("creating {}", inside.display()))?;
        bind(folder, &inside)?;
    }
    Ok(())
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
        .with_context(|| format!("bind-mounting {} to {}", from.display(), to.display()))
}

/// If this process is to start a pod's program, executes it and does not return. Otherwise does nothing.
pub(crate) fn exec_if_requested() -> Result<()> {
    let Some(configuration) = std::env::var_os(LAUNCH) else { return Ok(()) };
    let launch: Launch =
        serde_json::from_str(&configuration.to_string_lossy()).context("parsing the launch configuration")?;
    match launch.become_program()? {}
}
