//! What can be said on the command line and in the environment, and its one translation into settings.
//!
//! Values are taken as text and checked here, so that a bad one is told in one sentence with both of its names.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use vitivirt_runtime::{
    health::Bind,
    program::namespace,
    telemetry::{LogFormat, LogLevel},
};

use crate::commands::{plan::PlanArguments, render::RenderArguments};

#[derive(Debug, Parser)]
#[command(
    name = "kubevirt-operator",
    version,
    about = "Turns Machines of Viti Stack into virtual machines of KubeVirt, and keeps them so.",
    long_about = "Turns Machines of Viti Stack (machines.vitistack.io) into virtual machines of KubeVirt, with their \
                  disks, networks and cloud-init, and keeps them so.\n\nWithout a command it runs as the operator. \
                  In a pod it finds the cluster by itself; elsewhere it uses KUBECONFIG or --kubeconfig.",
    args_conflicts_with_subcommands = true
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) run: RunArguments,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the operator until it is told to stop (the default)
    Run(RunArguments),
    /// Print the resource definitions that the operator needs, as YAML
    Crds,
    /// Print the objects that Machines in files become, without a cluster
    ///
    /// It is for reading and comparing: what only a cluster gives, such as UIDs and what is derived from them, are
    /// placeholders. Ends with 1 if a Machine has a problem, which is told on standard error.
    Render(RenderArguments),
    /// Show what applying Machines would change in the cluster, and when it takes effect; writes nothing
    ///
    /// Ends with 1 if something of it is refused or cannot be, with 0 if all would be as the files say.
    Plan(PlanArguments),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RunArguments {
    /// File that says how to reach the cluster [env: KUBECONFIG; in a pod: its service account]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Longest time that a change nobody told us about goes unnoticed; comparing costs no request
    #[arg(long, value_name = "DURATION", env = "RECONCILE_INTERVAL", default_value = "30s")]
    reconcile_interval: String,
    /// How many Machines are worked on at the same time
    #[arg(long, value_name = "NUMBER", env = "MAX_CONCURRENT_RECONCILES", default_value = "5")]
    max_concurrent_reconciles: String,
    /// Where /metrics is served
    #[arg(long, value_name = "ADDRESS", env = "METRICS_BIND_ADDRESS", default_value = ":8080")]
    metrics_bind_address: String,
    /// Where /healthz and /readyz are served
    #[arg(long, value_name = "ADDRESS", env = "HEALTH_PROBE_BIND_ADDRESS", default_value = ":8081")]
    health_probe_bind_address: String,
    /// Whether replicas agree by a Lease on one that works
    #[arg(
        long,
        value_name = "BOOLEAN",
        env = "LEADER_ELECTION",
        default_value = "true",
        num_args = 0..=1,
        default_missing_value = "true"
    )]
    leader_election: String,
    /// The operator's own namespace, for its Lease [default: that of its service account, else kubevirt-operator-system]
    #[arg(long, env = "NAMESPACE")]
    namespace: Option<String>,
    /// The only namespace whose Machines are looked at; all when empty
    #[arg(long, env = "WATCH_NAMESPACE", default_value = "")]
    watch_namespace: String,
    /// How log lines on standard error are written
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
    /// The least important log lines that are written: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", env = "LOG_LEVEL", default_value = "info")]
    log_level: String,
    /// The name of this pod, for the Lease
    #[arg(long, env = "POD_NAME", hide = true)]
    pod_name: Option<String>,
}

/// The same, checked.
#[derive(Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) reconcile_interval: Duration,
    pub(crate) workers: usize,
    pub(crate) metrics: Bind,
    pub(crate) health: Bind,
    pub(crate) leader_election: bool,
    pub(crate) namespace: Option<String>,
    /// `None`: all.
    pub(crate) watch_namespace: Option<String>,
    pub(crate) log_format: LogFormat,
    pub(crate) log_level: LogLevel,
    pub(crate) pod_name: Option<String>,
}

impl TryFrom<RunArguments> for Settings {
    type Error = anyhow::Error;

    fn try_from(arguments: RunArguments) -> Result<Self> {
        let bind = |value: &str, name: &'static str| value.parse::<Bind>().context(name);
        let settings = Self {
            reconcile_interval: duration(&arguments.reconcile_interval)?,
            workers: workers(&arguments.max_concurrent_reconciles)?,
            metrics: bind(&arguments.metrics_bind_address, "METRICS_BIND_ADDRESS (--metrics-bind-address)")?,
            health: bind(
                &arguments.health_probe_bind_address,
                "HEALTH_PROBE_BIND_ADDRESS (--health-probe-bind-address)",
            )?,
            leader_election: boolean(&arguments.leader_election)?,
            namespace: namespace(arguments.namespace, "NAMESPACE (--namespace)")?,
            watch_namespace: namespace(Some(arguments.watch_namespace), "WATCH_NAMESPACE (--watch-namespace)")?,
            kubeconfig: arguments.kubeconfig,
            log_format: arguments.log_format,
            log_level: log_level(&arguments.log_level)?,
            pod_name: arguments.pod_name,
        };
        Ok(settings)
    }
}

fn duration(text: &str) -> Result<Duration> {
    const SHORTEST: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
    let parsed = text.parse::<jiff::SignedDuration>().ok().and_then(|parsed| Duration::try_from(parsed).ok());
    match parsed {
        Some(parsed) if (SHORTEST..=LONGEST).contains(&parsed) => Ok(parsed),
        _ => bail!(
            "RECONCILE_INTERVAL (--reconcile-interval) must be a duration from 1s to 24h such as 30s or 5m, \
             and {text:?} is not"
        ),
    }
}

fn workers(text: &str) -> Result<usize> {
    match text.parse() {
        Ok(number @ 1..=1000) => Ok(number),
        _ => bail!(
            "MAX_CONCURRENT_RECONCILES (--max-concurrent-reconciles) must be a number from 1 to 1000, and {text:?} is not"
        ),
    }
}

/// What Go programs take for a boolean, because that is what people are used to write here.
fn boolean(text: &str) -> Result<bool> {
    match text {
        "1" | "t" | "T" | "true" | "True" | "TRUE" => Ok(true),
        "0" | "f" | "F" | "false" | "False" | "FALSE" => Ok(false),
        _ => bail!("LEADER_ELECTION (--leader-election) must be true or false, and {text:?} is neither"),
    }
}

/// In capital letters too, as other programs take it.
fn log_level(text: &str) -> Result<LogLevel> {
    match LogLevel::from_str(text, true) {
        Ok(level) => Ok(level),
        Err(_) => {
            bail!("LOG_LEVEL (--log-level) must be error, warn, info, debug or trace, and {text:?} is none of them")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Settings> {
        let arguments = Arguments::try_parse_from([&["kubevirt-operator"], words].concat())?;
        match arguments.command {
            Some(Command::Run(run)) => run.try_into(),
            _ => arguments.run.try_into(),
        }
    }

    #[test]
    fn the_seeds_defaults() {
        let settings = parse(&[]).unwrap();
        assert_eq!(settings.reconcile_interval, Duration::from_secs(30));
        assert_eq!(settings.workers, 5);
        assert_eq!(settings.metrics.to_string(), ":8080");
        assert_eq!(settings.health.to_string(), ":8081");
        assert!(settings.leader_election);
        assert_eq!(settings.watch_namespace, None);
        assert_eq!(settings, parse(&["run"]).unwrap());
    }

    #[test]
    fn flags_work_with_and_without_the_command() {
        for words in [
            &["--leader-election=false", "--reconcile-interval", "1m30s"][..],
            &["run", "--leader-election=false", "--reconcile-interval", "1m30s"],
        ] {
            let settings = parse(words).unwrap();
            assert!(!settings.leader_election);
            assert_eq!(settings.reconcile_interval, Duration::from_secs(90));
        }
        assert!(parse(&["--leader-election"]).unwrap().leader_election);
    }

    #[test]
    fn a_bad_value_is_told_in_one_sentence_with_both_names() {
        for (words, expected) in [
            (["--reconcile-interval", "soon"], "RECONCILE_INTERVAL (--reconcile-interval) must be a duration"),
            (["--reconcile-interval", "-5s"], "RECONCILE_INTERVAL"),
            (["--reconcile-interval", "30"], "RECONCILE_INTERVAL"),
            (["--max-concurrent-reconciles", "0"], "MAX_CONCURRENT_RECONCILES (--max-concurrent-reconciles)"),
            (["--metrics-bind-address", "8080"], "METRICS_BIND_ADDRESS (--metrics-bind-address): \"8080\" is not"),
            (["--health-probe-bind-address", ":x"], "HEALTH_PROBE_BIND_ADDRESS"),
            (["--leader-election", "maybe"], "LEADER_ELECTION (--leader-election) must be true or false"),
            (
                ["--namespace", "Not A Name"],
                "NAMESPACE (--namespace): invalid value \"Not A Name\": must be the name of one namespace",
            ),
            (["--watch-namespace", "a,b"], "WATCH_NAMESPACE (--watch-namespace)"),
            (
                ["--log-level", "loud"],
                "LOG_LEVEL (--log-level) must be error, warn, info, debug or trace, and \"loud\"",
            ),
        ] {
            let words = [&format!("{}={}", words[0], words[1])[..]];
            let error = format!("{:#}", parse(&words).unwrap_err());
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_log_level_may_be_written_in_capital_letters() {
        for (text, expected) in [("info", LogLevel::Info), ("INFO", LogLevel::Info), ("Debug", LogLevel::Debug)] {
            assert_eq!(parse(&["--log-level", text]).unwrap().log_level, expected);
        }
    }

    /// The environment is that of the Deployment; a command that only prints must not stumble over it.
    #[test]
    fn settings_of_the_operator_are_judged_when_it_runs() {
        let words = ["kubevirt-operator", "--log-level=loud", "--namespace=A_B", "--leader-election=maybe"];
        assert!(Arguments::try_parse_from(words).is_ok());
    }

    #[test]
    fn clap_agrees_with_itself() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
