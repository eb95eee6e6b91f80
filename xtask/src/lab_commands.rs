//! `cargo xtask lab …`: a cluster that stays, for playing and for looking closely.
//!
//! `up` starts a process that holds the lab and outlives the command; `exec` enters that lab's namespaces; `down` ends
//! the process, and with it everything. What is known of a running lab is one small file in the cache folder.

use std::{
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use vitivirt_lab::{
    Extension, KubeVirtInstaller, LabOptions, PodRule, components,
    daemon::{self, DaemonState, LabDaemon},
};

use crate::{finish, programs};

#[derive(Subcommand)]
pub(crate) enum LabCommand {
    /// Start a lab and keep it running; says how to use it
    Up(UpOptions),
    /// Run a command inside a running lab, for example: cargo xtask lab exec -- kubectl get nodes
    Exec {
        /// Which lab
        #[arg(long, default_value = "default")]
        name: String,
        /// The command and its arguments; kubectl and KUBECONFIG are set up for it
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// End a running lab; nothing of it is left
    Down {
        /// Which lab
        #[arg(long, default_value = "default")]
        name: String,
    },
    /// Build the programs that a lab is made of (done by itself when needed)
    Build,
    #[command(hide = true)]
    Serve(UpOptions),
}

#[derive(Args, Clone)]
pub(crate) struct UpOptions {
    /// What to call it, if you want several
    #[arg(long, default_value = "default")]
    name: String,
    /// How many nodes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=250))]
    nodes: u8,
    /// MeasuredOperator installs KubeVirt
    #[arg(long, value_enum, default_value_t = KubeVirtChoice::None)]
    kubevirt: KubeVirtChoice,
    /// A KubeVirt custom resource (YAML) instead of the release's own
    #[arg(long, value_name = "FILE")]
    custom_resource: Option<PathBuf>,
    /// Seconds until a pod is ready
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS")]
    pods_ready_after: f64,
    /// Seconds until a virtual machine has booted
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS")]
    vms_boot_after: f64,
    /// Virtual machines cannot be migrated
    #[arg(long)]
    no_live_migration: bool,
    /// Resource definitions of neighbours to install
    #[arg(long, value_enum, value_delimiter = ',')]
    with: Vec<ExtensionChoice>,
    /// Pods with this text in an image crash
    #[arg(long, value_name = "IMAGE")]
    crash: Vec<String>,
    /// Pods with this text in an image never become ready
    #[arg(long, value_name = "IMAGE")]
    never_ready: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum KubeVirtChoice {
    /// Nobody: a plain Kubernetes
    None,
    /// KubeVirt's own Go operator
    Reference,
    /// Our virt-operator
    Ours,
    /// Only its resource definitions and simulated status, for scale
    Simulated,
}

#[derive(Clone, Copy, ValueEnum)]
enum ExtensionChoice {
    Multus,
    Monitoring,
    Cdi,
    Openshift,
}

pub(crate) fn run(command: LabCommand) -> ExitCode {
    match command {
        LabCommand::Up(options) => finish(up(&options)),
        LabCommand::Exec { name, command } => daemon::exec(&name, &command).unwrap_or_else(|error| crate::fail(&error)),
        LabCommand::Down { name } => finish(daemon::down(&name).map(|()| eprintln!("The lab {name:?} is gone."))),
        LabCommand::Build => finish(components::ensure(&components::STANDARD)),
        LabCommand::Serve(options) => serve(&options),
    }
}

fn up(options: &UpOptions) -> Result<()> {
    // Until the new lab can be found by its name, nobody else may start one of that name.
    let _lock = daemon::lock(&options.name)?;
    if let Some(running) = LabDaemon::find(&options.name)? {
        bail!(
            "a lab {:?} already runs (process {}): use it with `cargo xtask lab exec`, end it with `cargo xtask lab down`, \
             or start another with --name",
            options.name,
            running.pid
        );
    }
    lab_options(options)?;
    components::ensure(&components::STANDARD)?;
    if matches!(options.kubevirt, KubeVirtChoice::Ours) {
        programs::build(false)?;
    }
    let log = daemon::log_file(&options.name)?;
    let sink = std::fs::File::create(&log).with_context(|| format!("creating {}", log.display()))?;
    let own = std::env::current_exe().context("finding this program's own file")?;
    let mut holder = Command::new(own)
        .args(["lab", "serve"])
        .args(std::env::args_os().skip(3))
        // It ends if this pipe does before the lab is ready: with a Ctrl-C here, or any other end of this command.
        .stdin(Stdio::piped())
        .stdout(sink.try_clone().context("sharing the log file")?)
        .stderr(sink)
        .spawn()
        .context("starting the lab's process")?;
    eprintln!("→ starting the lab {:?} …", options.name);
    let started = Instant::now();
    loop {
        if let Some(status) = holder.try_wait().context("waiting for the lab")? {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let cause = said.lines().find_map(|line| line.strip_prefix("error: ")).unwrap_or("it said nothing");
            bail!("the lab did not start ({status}): {cause}");
        }
        match LabDaemon::find(&options.name)? {
            Some(LabDaemon { state: DaemonState::Ready { .. }, .. }) => break,
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
    eprintln!("  ready after {:.1} s", started.elapsed().as_secs_f64());
    let name = if options.name == "default" { String::new() } else { format!("--name {} ", options.name) };
    eprintln!("\nUse it:   cargo xtask lab exec {name}-- kubectl get pods --all-namespaces");
    eprintln!("A shell:  cargo xtask lab exec {name}-- bash");
    eprintln!("End it:   cargo xtask lab down {name}");
    Ok(())
}

/// The process that holds the lab: it belongs to no terminal and ends only by `down`.
fn serve(options: &UpOptions) -> ExitCode {
    daemon::run(&options.name, || lab_options(options))
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
    let mut lab = LabOptions { nodes: options.nodes, kubevirt, ..LabOptions::default() };
    lab.pods.ready_after = seconds(options.pods_ready_after)?;
    lab.guests.boots_after = seconds(options.vms_boot_after)?;
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
    Duration::try_from_secs_f64(value).with_context(|| format!("{value} is no number of seconds"))
}

pub(crate) fn read_custom_resource(path: &std::path::Path) -> Result<serde_json::Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let mut documents = vitivirt_lab::manifests::parse(&text).with_context(|| format!("reading {}", path.display()))?;
    match (documents.pop(), documents.is_empty()) {
        (Some(document), true) if document.get("kind").is_some_and(|kind| kind == "KubeVirt") => Ok(document),
        _ => bail!("{} must hold exactly one KubeVirt object", path.display()),
    }
}

impl From<ExtensionChoice> for Extension {
    fn from(choice: ExtensionChoice) -> Self {
        match choice {
            ExtensionChoice::Multus => Extension::Multus,
            ExtensionChoice::Monitoring => Extension::Monitoring,
            ExtensionChoice::Cdi => Extension::Cdi,
            ExtensionChoice::Openshift => Extension::OpenShift,
        }
    }
}
