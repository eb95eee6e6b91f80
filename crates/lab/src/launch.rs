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

use anyhow::{Context, Result, ensure};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    unistd::{Gid, Uid, setgid, setgroups, setuid},
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
    /// The program is a file of an image. None for a program of this machine.
    pub(crate) container: Option<ContainerRoot>,
}

/// What a program of an image runs in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ContainerRoot {
    /// The unpacked image.
    pub(crate) files: PathBuf,
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) read_only: bool,
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
        let program = match &self.container {
            Some(container) => {
                container.mount(&self.root)?;
                container.set_group()?;
                self.program.clone()
            }
            None => {
                self.mount_machine()?;
                PROGRAM.into()
            }
        };
        nix::unistd::chroot(&self.root).context("changing the root folder")?;
        std::env::set_current_dir("/").context("changing to the new root folder")?;
        if let Some(container) = &self.container {
            setuid(Uid::from_raw(container.user)).context("changing the user")?;
        }
        let error =
            Command::new(program).arg0(&self.name).args(&self.arguments).env_clear().envs(self.environment).exec();
        Err(error).with_context(|| format!("starting {}", self.program.display()))
    }

    /// Mounts the folders of the machine and the program into the pod's root.
    fn mount_machine(&self) -> Result<()> {
        for folder in SHARED {
            share(Path::new(folder), &self.root)?;
        }
        let inside = PROGRAM.trim_start_matches('/');
        std::fs::write(self.root.join(inside), "").context("creating the program's mount point")?;
        bind(&self.program, &self.root.join(inside))
    }
}

impl ContainerRoot {
    /// Mounts the files of the image into the pod's root, which contains the pod's volumes.
    fn mount(&self, root: &Path) -> Result<()> {
        // Only a mount can be read-only.
        bind(root, root)?;
        let files = std::fs::read_dir(&self.files).with_context(|| format!("reading {}", self.files.display()))?;
        for file in files {
            let file = file.context("reading the files of the image")?;
            let inside = root.join(file.file_name());
            if file.file_type().context("reading a file type")?.is_dir() {
                std::fs::create_dir_all(&inside).with_context(|| format!("creating {}", inside.display()))?;
                ensure!(
                    std::fs::read_dir(&inside).is_ok_and(|mut folder| folder.next().is_none()),
                    "the lab cannot run an image with files in /{}, where the pod has volumes",
                    file.file_name().display()
                );
            } else {
                std::fs::write(&inside, "").with_context(|| format!("creating {}", inside.display()))?;
            }
            bind(&file.path(), &inside)?;
            if self.read_only {
                make_read_only(&inside)?;
            }
        }
        for folder in ["/dev", "/proc"] {
            share(Path::new(folder), root)?;
        }
        if self.read_only { make_read_only(root) } else { Ok(()) }
    }

    /// Changes the group. A user namespace with one user, as an ordinary user gets it, has no other group or user: then
    /// this process enters another one, in which its own user has the number of the container's.
    fn set_group(&self) -> Result<()> {
        match setgid(Gid::from_raw(self.group)) {
            Ok(()) => setgroups(&[]).context("leaving the groups of this user"),
            Err(Errno::EINVAL) => {
                let (user, group) = (Uid::current(), Gid::current());
                unshare(CloneFlags::CLONE_NEWUSER).context("creating a user namespace")?;
                let write = |file: &str, text: String| {
                    let file = Path::new("/proc/self").join(file);
                    std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))
                };
                write("setgroups", "deny".to_owned())?;
                write("uid_map", format!("{} {user} 1", self.user))?;
                write("gid_map", format!("{} {group} 1", self.group))
            }
            Err(error) => Err(error).context("changing the group"),
        }
    }
}

fn make_read_only(path: &Path) -> Result<()> {
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(None::<&str>, path, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("making {} read-only", path.display()))
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
