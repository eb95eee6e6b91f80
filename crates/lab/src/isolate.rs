//! Puts the calling program into namespaces of its own before it does anything else.
//!
//! Pods and Services have cluster addresses (10.x). Without isolation the API server would send webhook and aggregation
//! calls for them to whatever machine has such an address on the real network. So a program that uses the lab runs
//! itself again as the first process of a new network, mount and process namespace. That buys three things that no
//! clean-up code can promise: nothing can leave the machine, because there is no way out; no process survives, because
//! the kernel ends a process namespace with its first process; and no file or mount survives, because everything that
//! the lab writes lies on a tmpfs of that mount namespace. A `kill -9`, a panic and Ctrl-C all end the same way.

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

/// Tells the second incarnation which process it belongs to and which network namespace it must not be in.
const INSIDE: &str = "VITISTACK_LAB_INSIDE";
const NETWORK_NAMESPACE: &str = "/proc/self/ns/net";
/// This program, even if a build has put another file in its place meanwhile.
pub(crate) const OWN_FILE: &str = "/proc/self/exe";

/// Must be the very first call of `main`, before arguments are read: the lab also runs this program's file to start a
/// pod's process, and in that incarnation it does not return.
pub fn begin() -> Result<()> {
    launch::take_over_if_asked()
}

/// Runs `outside` with the machine's own network, then `inside` in a fresh set of namespaces, and returns the exit
/// code of whichever ended. It must be called while the process has a single thread: namespaces can only be changed then.
pub fn run(outside: impl FnOnce() -> Result<()>, inside: impl FnOnce() -> Result<ExitCode>) -> ExitCode {
    run_with(outside, |_| Ok(()), inside)
}

/// As [`run`]; the outer process hears the number of the inner one as the machine sees it.
pub(crate) fn run_with(
    outside: impl FnOnce() -> Result<()>,
    started: impl FnOnce(u32) -> Result<()>,
    inside: impl FnOnce() -> Result<ExitCode>,
) -> ExitCode {
    let result = if std::env::var_os(INSIDE).is_some() {
        settle().and_then(|()| inside())
    } else {
        outside().and_then(|()| spawn_inside(started))
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// The outer incarnation: it only waits. If it dies, the kernel kills the inner one and with it everything else.
fn spawn_inside(started: impl FnOnce(u32) -> Result<()>) -> Result<ExitCode> {
    let outer_network = network_namespace()?;
    new_namespaces()?;
    let mut child = Command::new(OWN_FILE)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, format!("{} {outer_network}", std::process::id()))
        .spawn()
        .context("starting again inside the new namespaces")?;
    if let Err(error) = started(child.id()) {
        let _ = child.kill();
        return Err(error);
    }
    let status = child.wait().context("waiting for the lab")?;
    Ok(exit_code(status))
}

/// Lets `command` start as if this process were in no lab: it will make namespaces of its own.
pub fn outside(command: &mut Command) {
    command.env_remove(INSIDE);
}

/// 128 + the signal's number, as a shell reports a process that a signal ended.
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
            "this machine does not let an ordinary user make user namespaces ({error}): allow it (for example \
             `sysctl -w user.max_user_namespaces=10000`, and on Ubuntu \
             `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`) or run as root; \
             the lab needs a network of its own"
        ),
        Err(error) => return Err(error).context("making the lab's namespaces with unshare(2)"),
    }
    write("/proc/self/setgroups", "deny")?;
    write("/proc/self/uid_map", &format!("0 {uid} 1"))?;
    write("/proc/self/gid_map", &format!("0 {gid} 1"))
}

/// The inner incarnation, before anything else happens: tied to the outer one's life, then given `/proc`, a network
/// and a place for its files.
fn settle() -> Result<()> {
    set_pdeathsig(Signal::SIGKILL).context("asking to be ended with the outer process")?;
    let marker = std::env::var(INSIDE).unwrap_or_default();
    let Some((outer, outer_network)) = marker.split_once(' ') else {
        bail!("{INSIDE} is for internal use; unset it and start again")
    };
    // Before the first mount: with a marker that somebody left in the environment it would change the machine itself.
    if network_namespace()? == outer_network || std::process::id() != 1 {
        bail!("{INSIDE} is set, but this process is in no namespaces of its own; unset it and start again");
    }
    // `/proc` is still the outer one here. Had the outer process died before the first line, nobody would end this one.
    if outer.parse().ok().and_then(process_table::find).is_none() {
        bail!("the process that started the lab is gone");
    }
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .context("making mounts private to the lab")?;
    mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), None::<&str>).context(
        "mounting /proc for the lab's processes; inside a container this needs --privileged or an unmasked /proc",
    )?;
    netlink::bring_up_loopback_with_local_route().context("setting up the lab's network")?;
    let run = paths::run_dir()?;
    std::fs::create_dir_all(&run).with_context(|| format!("creating {}", run.display()))?;
    mount(Some("lab"), &run, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
        .with_context(|| format!("mounting a tmpfs on {}", run.display()))?;
    Ok(())
}

/// Whether this process runs where it may talk to a lab.
pub(crate) fn require_inside() -> Result<()> {
    let marker = std::env::var(INSIDE).unwrap_or_default();
    match marker.split_once(' ') {
        Some((_, outer)) if network_namespace()? != outer => Ok(()),
        _ => bail!(
            "a lab can only be started inside its own network namespace: begin `main` with `lab::isolate::run`, \
             or use `cargo xtask test`, `cargo xtask lab up`"
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
