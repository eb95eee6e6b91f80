//! Runs this test binary again as a user would: outside of any lab, in a process that a test may kill.

use std::{
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
};

use anyhow::{Context, Result, bail};
use vitivirt_lab::{
    Lab, LabOptions, components, daemon, isolate,
    process_table::{self, ProcessInfo},
};

pub(crate) const TASK: &str = "LAB_TEST_TASK";
/// Starts a lab, prints a line when it is ready, and keeps it running.
pub(crate) const KEEP_LAB: &str = "keep-lab";
/// Starts a lab while the port of its API server is in use.
pub(crate) const PORT_IN_USE: &str = "port-in-use";
/// Runs a background lab. The variable `NAME` contains its name.
pub(crate) const BACKGROUND_LAB: &str = "background-lab";
/// Listens, enters the network of the background lab with the name `NAME`, and connects one client to its API server.
pub(crate) const ENTER_NETWORK: &str = "enter-network";
/// Runs kubectl in the background lab with the name `NAME`, as `cargo xtask lab exec` does.
pub(crate) const EXEC: &str = "exec";
/// The process of a pod: answers every HTTP request on port 8080 of its address with the content of a file.
pub(crate) const SERVE_FILE: &str = "serve-file";
pub(crate) const SERVED_PORT: u16 = 8080;
/// Variables of `SERVE_FILE`.
pub(crate) const ADDRESS: &str = "LAB_TEST_ADDRESS";
pub(crate) const FILE: &str = "LAB_TEST_FILE";
pub(crate) const NAME: &str = "LAB_TEST_NAME";
const READY: &str = "ready";

/// The main function of the nested process. Does nothing in any other process.
pub(crate) fn run_if_requested() -> Option<ExitCode> {
    let task = std::env::var(TASK).ok()?;
    if task == SERVE_FILE {
        return Some(serve_file().map_or_else(|_| ExitCode::FAILURE, |()| ExitCode::SUCCESS));
    }
    if let Err(error) = isolate::begin() {
        eprintln!("error: {error:#}");
        return Some(ExitCode::FAILURE);
    }
    if task == BACKGROUND_LAB {
        let name = std::env::var(NAME).unwrap_or_default();
        return Some(daemon::run(&name, || Ok(LabOptions { nodes: 1, ..LabOptions::default() }), async |_| Ok(())));
    }
    let failed = |error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    };
    if task == ENTER_NETWORK {
        return Some(enter_network().map_or_else(failed, |()| ExitCode::SUCCESS));
    }
    if task == EXEC {
        let command = ["sh", "-c", "kubectl get nodes -o name >&2; exit 7"].map(str::to_owned);
        return Some(daemon::exec(&std::env::var(NAME).unwrap_or_default(), &command).unwrap_or_else(failed));
    }
    Some(isolate::run(
        || components::ensure(&components::STANDARD),
        || {
            let runtime = tokio::runtime::Runtime::new()?;
            runtime.block_on(async {
                let _listener =
                    if task == PORT_IN_USE { Some(std::net::TcpListener::bind("10.1.0.1:6443")?) } else { None };
                let _lab = Lab::start(LabOptions { nodes: 1, ..LabOptions::default() }).await?;
                println!("{READY}");
                std::future::pending::<Result<ExitCode>>().await
            })
        },
    ))
}

fn serve_file() -> Result<()> {
    let (address, file) = (std::env::var(ADDRESS)?, std::env::var(FILE)?);
    for stream in std::net::TcpListener::bind((address.as_str(), SERVED_PORT))?.incoming() {
        let mut stream = stream?;
        // One request per connection. A client that disconnects must not end the process.
        let _ = BufReader::new(&stream).read_line(&mut String::new());
        let content = std::fs::read_to_string(&file).unwrap_or_default();
        let _ = write!(
            stream,
            "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{content}",
            content.len()
        );
    }
    Ok(())
}

fn enter_network() -> Result<()> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let kubeconfig = daemon::enter_network(&std::env::var(NAME)?)?;
    println!("{}", listener.local_addr()?);
    let kubeconfig = std::fs::read_to_string(kubeconfig)?;
    let server = kubeconfig.split_once("https://").context("the kubeconfig has no server")?.1;
    let end = server.find(|character: char| !character.is_ascii_digit() && !matches!(character, '.' | ':'));
    let server = server.get(..end.unwrap_or(server.len())).context("the kubeconfig has no server")?.to_owned();
    // On another thread, because a process that has joined a PID namespace cannot start one.
    let connection = std::thread::spawn(move || -> Result<()> {
        let (mut client, _) = listener.accept()?;
        let mut server = std::net::TcpStream::connect(server.as_str()).with_context(|| server.clone())?;
        server.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        std::io::copy(&mut server, &mut client)?;
        Ok(())
    });
    connection.join().map_err(|_| anyhow::anyhow!("the thread panicked"))?
}

/// Runs `ENTER_NETWORK`, connects to its listener, and returns the answer.
pub(crate) fn connect_through(mut command: Command) -> Result<String> {
    let mut child = command.spawn()?;
    let mut address = String::new();
    BufReader::new(child.stdout.take().context("no standard output")?).read_line(&mut address)?;
    let mut answer = String::new();
    if let Ok(mut stream) = std::net::TcpStream::connect(address.trim()) {
        stream.read_to_string(&mut answer)?;
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(answer)
}

/// A command that runs a task of this binary outside of any lab.
pub(crate) fn command(program: &Path, task: &str) -> Command {
    let mut command = Command::new(program);
    isolate::outside(&mut command);
    command.env(TASK, task).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts `command` and waits until its lab is ready.
pub(crate) async fn start(mut command: Command) -> Result<Child> {
    tokio::task::spawn_blocking(move || {
        let mut child = command.spawn().context("starting the nested process")?;
        let stdout = child.stdout.take().context("the nested process has no standard output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        if line.trim() != READY {
            let output = child.wait_with_output()?;
            bail!("the nested lab did not start: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(child)
    })
    .await?
}

/// Runs `command` and returns its exit code and its standard error.
pub(crate) async fn run_to_end(mut command: Command) -> Result<(Option<i32>, String)> {
    let output = tokio::task::spawn_blocking(move || command.output()).await??;
    Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

/// The running descendants of a process, with their command lines.
pub(crate) fn descendants(pid: u32) -> Vec<(u32, String)> {
    let mut descendants = Vec::new();
    let mut parents = vec![pid];
    let processes: Vec<(u32, ProcessInfo)> = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, process_table::find(pid)?)))
        .collect();
    while let Some(parent) = parents.pop() {
        for (child, _) in processes.iter().filter(|(_, process)| process.parent == parent) {
            let command = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
            descendants.push((*child, String::from_utf8_lossy(&command).replace('\0', " ")));
            parents.push(*child);
        }
    }
    descendants
}

pub(crate) fn is_alive(pid: u32) -> bool {
    process_table::find(pid).is_some()
}
