//! Runs the calling program in new Linux namespaces.
//!
//! Pods and Services have cluster addresses (10.x). Without isolation, the API server would send webhook and
//! aggregation calls to machines of the real network with these addresses. So a program that uses the lab runs itself
//! again as the first process of a new network, mount and PID namespace. That gives three guarantees that no clean-up
//! code can give: no packet leaves the machine, because the network namespace has no route; no process survives,
//! because the kernel kills all processes of a PID namespace when its first process exits; and no file or mount
//! survives, because the lab writes only to a tmpfs of that mount namespace. This holds for `kill -9`, panics and
//! Ctrl-C.

use std::{
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{prctl::set_pdeathsig, signal::Signal},
    unistd::{Gid, Uid},
};

use crate::{launch, netlink, paths, process_table};

/// Set for the inner process: the PID of the outer process, and its network namespace, which the inner one must not be
/// in.
const INSIDE: &str = "VITISTACK_LAB_INSIDE";
const NETWORK_NAMESPACE: &str = "/proc/self/ns/net";
/// This executable, even if a build has replaced the file in the meantime.
pub(crate) const OWN_FILE: &str = "/proc/self/exe";

/// Must be the first call in `main`, before the program reads its arguments. The lab also runs this executable to start
/// the process of a pod; then this function does not return.
pub fn begin() -> Result<()> {
    launch::exec_if_requested()
}

/// Runs `outside` in the network of the machine, then `inside` in new namespaces, and returns the exit code. It must be
/// called while the process has a single thread, because only then the kernel allows new namespaces.
pub fn run(outside: impl FnOnce() -> Result<()>, inside: impl FnOnce() -> Result<ExitCode>) -> ExitCode {
    run_with(outside, |_| Ok(()), inside)
}

/// Like [`run`]. The outer process calls `started` with the PID of the inner process.
pub(crate) fn run_with(
    outside: impl FnOnce() -> Result<()>,
    started: impl FnOnce(u32) -> Result<()>,
    inside: impl FnOnce() -> Result<ExitCode>,
) -> ExitCode {
    let result = if std::env::var_os(INSIDE).is_some() {
        set_up_namespaces().and_then(|()| inside())
    } else {
        outside().and_then(|()| spawn_inside(started))
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// The outer process: it only waits. If it exits, the kernel kills the inner process and with it the whole lab.
fn spawn_inside(started: impl FnOnce(u32) -> Result<()>) -> Result<ExitCode> {
    let outer_network = network_namespace()?;
    new_namespaces()?;
    let mut child = Command::new(OWN_FILE)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, format!("{} {outer_network}", std::process::id()))
        .spawn()
        .context("starting the inner process in the new namespaces")?;
    if let Err(error) = started(child.id()) {
        let _ = child.kill();
        return Err(error);
    }
    let status = child.wait().context("waiting for the lab")?;
    Ok(exit_code(status))
}

/// Makes `command` start as if this process were outside of a lab, so that it creates its own namespaces.
pub fn outside(command: &mut Command) {
    command.env_remove(INSIDE);
}

/// The exit code, or like a shell 128 + the number of the signal that ended the process.
pub(crate) fn exit_code(status: std::process::ExitStatus) -> ExitCode {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

fn new_namespaces() -> Result<()> {
    let (uid, gid) = (Uid::current(), Gid::current());
    let flags = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID;
    if uid.is_root() && unshare(flags).is_ok() {
        return Ok(());
    }
    match unshare(flags | CloneFlags::CLONE_NEWUSER) {
        Ok(()) => {}
        Err(error @ (Errno::EPERM | Errno::ENOSPC | Errno::EACCES)) => bail!(
            "this machine does not allow unprivileged user namespaces ({error}), and the lab needs its own network: \
             allow them (for example `sysctl -w user.max_user_namespaces=10000`, and on Ubuntu \
             `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`) or run as root"
        ),
        Err(error) => return Err(error).context("creating the lab's namespaces with unshare(2)"),
    }
    write("/proc/self/setgroups", "deny")?;
    write("/proc/self/uid_map", &format!("0 {uid} 1"))?;
    write("/proc/self/gid_map", &format!("0 {gid} 1"))
}

/// The inner process, before anything else: the kernel kills it when the outer process exits, and it gets its own
/// `/proc`, network and tmpfs.
fn set_up_namespaces() -> Result<()> {
    set_pdeathsig(Signal::SIGKILL).context("requesting SIGKILL at the exit of the outer process")?;
    let marker = std::env::var(INSIDE).unwrap_or_default();
    let Some((outer, outer_network)) = marker.split_once(' ') else {
        bail!("{INSIDE} is for internal use; unset it and try again")
    };
    // Checked before the first mount: if the variable was left in the environment, the mounts would change the machine.
    if network_namespace()? == outer_network || std::process::id() != 1 {
        bail!("{INSIDE} is set, but this process is not in its own namespaces; unset it and try again");
    }
    // `/proc` is still the outer one. If the outer process exited before set_pdeathsig, nothing would kill this
    // process.
    if outer.parse().ok().and_then(process_table::find).is_none() {
        bail!("the process that started the lab has exited");
    }
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .context("making the lab's mounts private")?;
    mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), None::<&str>).context(
        "mounting /proc for the lab's processes; in a container this requires --privileged or an unmasked /proc",
    )?;
    netlink::bring_up_loopback_with_local_route().context("setting up the lab's network")?;
    let run = paths::run_dir()?;
    std::fs::create_dir_all(&run).with_context(|| format!("creating {}", run.display()))?;
    mount(Some("lab"), &run, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
        .with_context(|| format!("mounting a tmpfs on {}", run.display()))?;
    Ok(())
}

/// A new folder with this name on the tmpfs of these namespaces. It disappears with them.
pub fn scratch_folder(name: &str) -> Result<PathBuf> {
    require_inside()?;
    let folder = paths::run_dir()?.join("scratch").join(name);
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

/// Fails if this process is not in the namespaces of a lab.
pub(crate) fn require_inside() -> Result<()> {
    let marker = std::env::var(INSIDE).unwrap_or_default();
    match marker.split_once(' ') {
        Some((_, outer)) if network_namespace()? != outer => Ok(()),
        _ => bail!(
            "a lab must be started in its own network namespace: call `vitivirt_lab::isolate::run` in `main`, \
             or use `cargo xtask test` or `cargo xtask lab up`"
        ),
    }
}

fn network_namespace() -> Result<String> {
    let link: PathBuf = std::fs::read_link(NETWORK_NAMESPACE).context("reading /proc/self/ns/net")?;
    Ok(link.to_string_lossy().into_owned())
}

fn write(path: &str, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {path}"))
}
