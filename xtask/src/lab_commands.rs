//! `cargo xtask lab …`: a lab that keeps running, for experiments and debugging.
//!
//! `up` starts a background process that owns the lab; `exec` runs a command in its namespaces; `down` stops the
//! process and with it the lab; `page` leads to the status page of an operator. A file in the cache folder describes each
//! running lab.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use vitivirt_lab::{
    Extension, KubeVirtInstaller, LabOptions, Pace, PodRule, components,
    daemon::{self, DaemonState, LabDaemon},
};

use crate::{
    finish, kubevirt_operator,
    lab_page::{self, PageOptions},
    programs,
};

#[derive(Subcommand)]
pub(crate) enum LabCommand {
    /// Start a lab in the background
    Up(UpOptions),
    /// List the labs that run
    List,
    /// Run a command in a lab: cargo xtask lab exec -- kubectl get nodes
    Exec {
        /// Name of the lab
        #[arg(long, default_value = "default")]
        name: String,
        /// Command and arguments. kubectl is in PATH and KUBECONFIG is set
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Open the status page of an operator in a lab: listens on 127.0.0.1 of this machine
    Page(PageOptions),
    /// Stop a lab and remove its files
    Down {
        /// Name of the lab
        #[arg(long, default_value = "default")]
        name: String,
    },
    /// Build the components of the lab (other commands build them when needed)
    Build,
    #[command(hide = true)]
    Serve(UpOptions),
}

#[derive(Args, Clone)]
pub(crate) struct UpOptions {
    /// Name of the lab
    #[arg(long, default_value = "default")]
    name: String,
    /// Number of nodes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=250))]
    nodes: u8,
    /// How KubeVirt is installed
    #[arg(long, value_enum, default_value_t = KubeVirtChoice::None)]
    kubevirt: KubeVirtChoice,
    /// Run kubevirt-operator too. Default: true with --kubevirt ours
    #[arg(long, value_name = "BOOLEAN", num_args = 0..=1, default_missing_value = "true")]
    machines: Option<bool>,
    /// File with a KubeVirt resource (YAML). Default: the resource of the release
    #[arg(long, value_name = "FILE")]
    custom_resource: Option<PathBuf>,
    /// Delays of pods, endpoints, PVCs and VMs
    #[arg(long, value_enum, default_value_t = PaceChoice::Instant)]
    pace: PaceChoice,
    /// Number that chooses the delay of each object
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds until a pod is ready. Default: the delay of the pace
    #[arg(long, value_name = "SECONDS")]
    pods_ready_after: Option<f64>,
    /// Seconds until a VM has booted. Default: the delay of the pace
    #[arg(long, value_name = "SECONDS")]
    vms_boot_after: Option<f64>,
    /// Report that VMs cannot be live-migrated
    #[arg(long)]
    no_live_migration: bool,
    /// Additional CRDs to install
    #[arg(long, value_enum, value_delimiter = ',')]
    with: Vec<ExtensionChoice>,
    /// Run the programs of this project in pods with their image
    #[arg(long, hide = true)]
    programs: bool,
    /// Crash pods whose image contains this text
    #[arg(long, value_name = "IMAGE")]
    crash: Vec<String>,
    /// Keep pods unready whose image contains this text
    #[arg(long, value_name = "IMAGE")]
    never_ready: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum KubeVirtChoice {
    /// Not installed
    None,
    /// By the reference operator
    Reference,
    /// By our virt-operator
    Ours,
    /// Only the CRDs and simulated status, for benchmarks
    Simulated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PaceChoice {
    /// No delays
    Instant,
    /// Pods are ready up to 3 s before they listen, endpoints and PVCs lag by 1 s, VMs need up to 2 s
    Quick,
    /// As quick, with pods that need 5 to 20 s and VMs that need up to 10 s
    Real,
}

#[derive(Clone, Copy, ValueEnum)]
enum ExtensionChoice {
    Multus,
    Monitoring,
    Cdi,
    Openshift,
    Snapshots,
}

pub(crate) fn run(command: LabCommand) -> ExitCode {
    match command {
        LabCommand::Up(options) => finish(up(&options, std::env::args_os().skip(3).collect())),
        LabCommand::List => finish(list()),
        LabCommand::Exec { name, command } => daemon::exec(&name, &command).unwrap_or_else(|error| crate::fail(&error)),
        LabCommand::Page(options) => finish(lab_page::run(&options)),
        LabCommand::Down { name } => finish(daemon::down(&name).map(|()| eprintln!("Lab {name:?} has been stopped."))),
        LabCommand::Build => finish(components::ensure(&components::STANDARD)),
        LabCommand::Serve(options) => serve(&options),
    }
}

fn list() -> Result<()> {
    let labs = LabDaemon::all()?;
    if labs.is_empty() {
        eprintln!("No lab is running; start one with `cargo xtask lab up`.");
    }
    for (name, daemon) in labs {
        let state = match daemon.state {
            DaemonState::Starting => "starting",
            DaemonState::Ready { .. } => "ready",
        };
        println!("{name}\t{state}\tprocess {}", daemon.pid);
    }
    Ok(())
}

/// Starts an empty lab for `cargo xtask demo --keep`.
pub(crate) fn start_for_demo(name: &str) -> Result<()> {
    #[derive(Parser)]
    struct Up {
        #[command(flatten)]
        options: UpOptions,
    }
    let arguments = ["--name", name, "--programs", "--with", "multus"];
    let up_options = Up::try_parse_from(std::iter::once("up").chain(arguments)).context("options of the lab")?.options;
    up(&up_options, arguments.map(OsString::from).to_vec())
}

/// `arguments` are those of the background process.
fn up(options: &UpOptions, arguments: Vec<OsString>) -> Result<()> {
    // Until the new lab can be found by its name, no other command may start a lab of that name.
    let _lock = daemon::lock(&options.name)?;
    if let Some(running) = LabDaemon::find(&options.name)? {
        bail!(
            "lab {name:?} is already running (process {}); use it with `cargo xtask lab exec --name {name}`, stop it with \
             `cargo xtask lab down --name {name}`, or start another one with another --name",
            running.pid,
            name = options.name
        );
    }
    lab_options(options)?;
    components::ensure(&components::STANDARD)?;
    if options.needs_own_programs() {
        programs::build(false)?;
    }
    let log = daemon::log_file(&options.name)?;
    let sink = std::fs::File::create(&log).with_context(|| format!("creating {}", log.display()))?;
    let program = std::env::current_exe().context("finding the path of this program")?;
    let mut process = Command::new(program)
        .args(["lab", "serve"])
        .args(arguments)
        // The process stops if this pipe closes before the lab is ready: after Ctrl-C, or if this command fails.
        .stdin(Stdio::piped())
        .stdout(sink.try_clone().context("sharing the log file")?)
        .stderr(sink)
        .spawn()
        .context("starting the lab's process")?;
    eprintln!("→ starting lab {:?} …", options.name);
    let started = Instant::now();
    loop {
        if let Some(status) = process.try_wait().context("waiting for the lab")? {
            let output = std::fs::read_to_string(&log).unwrap_or_default();
            let cause = output.lines().find_map(|line| line.strip_prefix("error: ")).unwrap_or("no error message");
            bail!("lab {:?} did not start ({status}): {cause}", options.name);
        }
        match LabDaemon::find(&options.name)? {
            Some(LabDaemon { state: DaemonState::Ready { .. }, .. }) => break,
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
    eprintln!("  ready after {:.1} s", started.elapsed().as_secs_f64());
    let name = if options.name == "default" { String::new() } else { format!("--name {} ", options.name) };
    eprintln!("\nCommand:  cargo xtask lab exec {name}-- kubectl get pods --all-namespaces");
    eprintln!("Shell:    cargo xtask lab exec {name}-- bash");
    if options.runs_kubevirt_operator() || matches!(options.kubevirt, KubeVirtChoice::Ours) {
        eprintln!("Page:     cargo xtask lab page {name}   # then open http://localhost:{}", lab_page::PORT);
    }
    eprintln!("Stop:     cargo xtask lab down {name}");
    Ok(())
}

/// The background process that owns the lab. It has no terminal and runs until `down`.
fn serve(options: &UpOptions) -> ExitCode {
    daemon::run(
        &options.name,
        || lab_options(options),
        async |lab| {
            if options.runs_kubevirt_operator() {
                kubevirt_operator::install(lab).await?;
                lab.create(&kubevirt_operator::deployment()?).await?;
            }
            Ok(())
        },
    )
}

fn lab_options(options: &UpOptions) -> Result<LabOptions> {
    let custom_resource = options.custom_resource.as_deref().map(read_custom_resource).transpose()?;
    let kubevirt = match options.kubevirt {
        KubeVirtChoice::None => KubeVirtInstaller::None,
        KubeVirtChoice::Simulated => KubeVirtInstaller::Simulated,
        KubeVirtChoice::Reference => KubeVirtInstaller::Reference { custom_resource },
        KubeVirtChoice::Ours => {
            KubeVirtInstaller::Ours { program: programs::target_dir()?.join("debug/virt-operator"), custom_resource }
        }
    };
    let mut lab =
        LabOptions { nodes: options.nodes, seed: options.seed, kubevirt, ..LabOptions::at(options.pace.into()) };
    if let Some(delay) = options.pods_ready_after {
        lab.pods.ready_after = seconds(delay)?.into();
    }
    if let Some(delay) = options.vms_boot_after {
        lab.guests.boots_after = seconds(delay)?.into();
    }
    if options.needs_own_programs() {
        lab.own_programs = kubevirt_operator::own_programs()?;
    }
    lab.guests.live_migratable = !options.no_live_migration;
    lab.extensions = options.with.iter().map(|extension| (*extension).into()).collect();
    for (images, fate) in
        [(&options.crash, vitivirt_lab::PodFate::Crashes), (&options.never_ready, vitivirt_lab::PodFate::NeverReady)]
    {
        lab.pods.rules.extend(images.iter().map(|image| PodRule { image_contains: image.clone(), fate }));
    }
    Ok(lab)
}

fn seconds(value: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(value).with_context(|| format!("invalid number of seconds {value}"))
}

pub(crate) fn read_custom_resource(path: &std::path::Path) -> Result<serde_json::Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let mut documents = vitivirt_lab::manifests::parse(&text).with_context(|| format!("reading {}", path.display()))?;
    match (documents.pop(), documents.is_empty()) {
        (Some(document), true) if document.get("kind").is_some_and(|kind| kind == "KubeVirt") => Ok(document),
        _ => bail!("{} must contain exactly one KubeVirt resource", path.display()),
    }
}

impl UpOptions {
    fn runs_kubevirt_operator(&self) -> bool {
        self.machines.unwrap_or(matches!(self.kubevirt, KubeVirtChoice::Ours))
    }

    /// Whether the lab runs programs of this project.
    fn needs_own_programs(&self) -> bool {
        self.programs || self.runs_kubevirt_operator() || matches!(self.kubevirt, KubeVirtChoice::Ours)
    }
}

impl From<PaceChoice> for Pace {
    fn from(choice: PaceChoice) -> Self {
        match choice {
            PaceChoice::Instant => Pace::Instant,
            PaceChoice::Quick => Pace::Quick,
            PaceChoice::Real => Pace::Real,
        }
    }
}

impl From<ExtensionChoice> for Extension {
    fn from(choice: ExtensionChoice) -> Self {
        match choice {
            ExtensionChoice::Multus => Extension::Multus,
            ExtensionChoice::Monitoring => Extension::Monitoring,
            ExtensionChoice::Cdi => Extension::Cdi,
            ExtensionChoice::Openshift => Extension::OpenShift,
            ExtensionChoice::Snapshots => Extension::Snapshots,
        }
    }
}
