//! Starts a pod's program as a container engine would: a hostname of its own, a root folder of its own with only its
//! volumes in it, its environment and nothing else.
//!
//! A program cannot change its root and hostname before `exec` without unsafe code, so the lab runs its own file again
//! with the wish in the environment; that short-lived incarnation arranges everything and becomes the program.
//! The hostname matters: KubeVirt's components use it as their identity in leader election.

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
/// What a dynamically linked program and the Go runtime may want from the machine.
const SHARED: [&str; 8] = ["/bin", "/dev", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/usr"];
const PROGRAM: &str = "/program";

#[derive(Serialize, Deserialize)]
pub(crate) struct Launch {
    pub(crate) hostname: String,
    pub(crate) root: PathBuf,
    pub(crate) program: PathBuf,
    /// What the program sees as its own name.
    pub(crate) name: String,
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
}

impl Launch {
    /// The program and the environment that make this wish come true.
    pub(crate) fn command(&self) -> Result<(PathBuf, Vec<(String, String)>)> {
        let wish = serde_json::to_string(self).context("writing the launch wish")?;
        Ok((OWN_FILE.into(), vec![(LAUNCH.to_owned(), wish)]))
    }

    fn become_program(self) -> Result<std::convert::Infallible> {
        unshare(CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWNS).context("making the pod's namespaces")?;
        // Were a mount above the root shared, the machine's folders would appear in the lab too, below a folder that the
        // lab removes with all it holds.
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .context("making mounts private to the pod")?;
        nix::unistd::sethostname(&self.hostname).context("setting the pod's hostname")?;
        for folder in SHARED {
            share(Path::new(folder), &self.root)?;
        }
        let inside = PROGRAM.trim_start_matches('/');
        std::fs::write(self.root.join(inside), "").context("making the program's mount point")?;
        bind(&self.program, &self.root.join(inside))?;
        nix::unistd::chroot(&self.root).context("changing the root folder")?;
        std::env::set_current_dir("/").context("changing to the new root folder")?;
        let error =
            Command::new(PROGRAM).arg0(&self.name).args(&self.arguments).env_clear().envs(self.environment).exec();
        Err(error).with_context(|| format!("starting {}", self.program.display()))
    }
}

/// A folder of the machine appears in the pod's root; a symbolic link (`/lib` → `usr/lib`) stays one.
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
        .with_context(|| format!("binding {} to {}", from.display(), to.display()))
}

/// In the short-lived incarnation: becomes the program and does not return. In any other: nothing.
pub(crate) fn take_over_if_asked() -> Result<()> {
    let Some(wish) = std::env::var_os(LAUNCH) else { return Ok(()) };
    let launch: Launch = serde_json::from_str(&wish.to_string_lossy()).context("reading the launch wish")?;
    match launch.become_program()? {}
}
