//! What can be said on the command line and in the environment, and its one translation into settings. The names are
//! those of the reference operator, so that either can take the other's place in a Deployment.
//!
//! Values are taken as text and checked here, so that a bad one is told in one sentence with all of its names.

use std::{net::IpAddr, path::PathBuf};

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand};
use vitivirt_runtime::{
    client::Rate,
    health::Bind,
    program::namespace,
    telemetry::{LogFormat, LogLevel},
};

use crate::commands::{manifests::ManifestsArguments, plan::PlanArguments, render::RenderArguments};

#[derive(Debug, Parser)]
#[command(
    name = "virt-operator",
    version,
    about = "Installs, configures and repairs KubeVirt.",
    long_about = "Installs, configures and repairs KubeVirt as the KubeVirt resource \
                  (kubevirts.kubevirt.io) says.\n\nWithout a command it runs as the operator. In a pod it finds the \
                  cluster by itself; elsewhere it uses KUBECONFIG or --kubeconfig.",
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
    /// Print the definition of the KubeVirt resource, as YAML
    Crds,
    /// Print what must exist before the operator runs, and its Deployment, as YAML for kubectl apply
    Manifests(ManifestsArguments),
    /// Print every object of the installation that a KubeVirt resource in a file asks for, without a cluster
    ///
    /// It is for reading and comparing: certificates are made when the operator runs. Ends with 1 if the resource cannot
    /// be installed.
    Render(RenderArguments),
    /// Print what the operator would do in the cluster for a KubeVirt resource in a file; nothing is written
    ///
    /// Ends with 1 if the resource cannot be installed, with 0 if it can.
    Plan(PlanArguments),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RunArguments {
    /// Port of /metrics, /healthz and /readyz
    #[arg(long, value_name = "NUMBER", default_value = "8186")]
    port: String,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0")]
    listen: String,
    /// How much is logged: 0 to 2 the usual, 3 and 4 also every request, 5 and more everything
    #[arg(short, long = "v", value_name = "NUMBER", default_value = "2")]
    verbosity: String,
    /// Requests per second to the API server in the long run
    #[arg(long, value_name = "NUMBER", env = "VIRT_OPERATOR_CLIENT_QPS", default_value = "200")]
    client_qps: String,
    /// Requests to the API server that may come at once after a rest
    #[arg(long, value_name = "NUMBER", env = "VIRT_OPERATOR_CLIENT_BURST", default_value = "400")]
    client_burst: String,
    /// File that says how to reach the cluster [env: KUBECONFIG; in a pod: its service account]
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The operator's own namespace [default: that of its service account, else kubevirt]
    #[arg(long, env = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// How log lines on standard error are written
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
    /// Leave the text of what this release consists of in a ConfigMap, and end: what an operator of another release
    /// runs this program for [env: TARGET_DEPLOYMENT_CONFIG]
    #[arg(long)]
    pub(crate) dump_install_strategy: bool,
    /// The name of this pod, for the Lease
    #[arg(long, env = "POD_NAME", hide = true)]
    pod_name: Option<String>,
}

/// The same, checked.
#[derive(Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) bind: Bind,
    pub(crate) log_format: LogFormat,
    pub(crate) log_level: LogLevel,
    pub(crate) rate: Rate,
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) namespace: Option<String>,
    pub(crate) pod_name: Option<String>,
}

impl TryFrom<RunArguments> for Settings {
    type Error = anyhow::Error;

    fn try_from(arguments: RunArguments) -> Result<Self> {
        Ok(Self {
            bind: bind(&arguments.listen, &arguments.port)?,
            log_level: verbosity(&arguments.verbosity)?,
            rate: rate(&arguments.client_qps, &arguments.client_burst)?,
            log_format: arguments.log_format,
            kubeconfig: arguments.kubeconfig,
            namespace: namespace(arguments.namespace, "NAMESPACE (--namespace)")?,
            pod_name: arguments.pod_name,
        })
    }
}

fn bind(listen: &str, port: &str) -> Result<Bind> {
    let Ok(port) = port.parse() else {
        bail!("--port must be a number from 0 to 65535, and {port:?} is not");
    };
    match listen.parse::<IpAddr>() {
        Ok(address) => Ok(Bind { address: Some(address), port }),
        Err(_) => bail!("--listen must be an IP address such as 0.0.0.0 or ::, and {listen:?} is not"),
    }
}

fn verbosity(text: &str) -> Result<LogLevel> {
    match text.parse() {
        Ok(verbosity) => Ok(level(verbosity)),
        Err(_) => bail!("-v must be a number from 0 to 255, and {text:?} is not"),
    }
}

/// What the reference's verbosity means here.
pub(crate) fn level(verbosity: u8) -> LogLevel {
    match verbosity {
        0..=2 => LogLevel::Info,
        3..=4 => LogLevel::Debug,
        5.. => LogLevel::Trace,
    }
}

fn rate(qps: &str, burst: &str) -> Result<Rate> {
    let per_second = match qps.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 100_000.0 => number,
        _ => bail!(
            "VIRT_OPERATOR_CLIENT_QPS (--client-qps) must be a number above 0 and not above 100000, and {qps:?} is not"
        ),
    };
    let Ok(burst @ 1..=100_000) = burst.parse::<u32>() else {
        bail!("VIRT_OPERATOR_CLIENT_BURST (--client-burst) must be a number from 1 to 100000, and {burst:?} is not");
    };
    Ok(Rate { per_second, burst })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Settings> {
        let arguments = Arguments::try_parse_from([&["virt-operator"], words].concat())?;
        match arguments.command {
            Some(Command::Run(run)) => run.try_into(),
            _ => arguments.run.try_into(),
        }
    }

    #[test]
    fn the_releases_defaults() {
        let settings = parse(&[]).unwrap();
        assert_eq!(settings.bind.to_string(), "0.0.0.0:8186");
        assert_eq!(settings.rate, Rate { per_second: 200.0, burst: 400 });
        assert_eq!(settings.log_level, LogLevel::Info);
        assert_eq!(settings, parse(&["run"]).unwrap());
    }

    #[test]
    fn flags_as_the_reference_takes_them() {
        let words =
            ["--port", "8443", "--listen", "10.1.2.3", "-v", "3", "--client-qps", "12.5", "--client-burst", "20"];
        let settings = parse(&words).unwrap();
        assert_eq!(settings.bind.to_string(), "10.1.2.3:8443");
        assert_eq!(settings.log_level, LogLevel::Debug);
        assert_eq!(settings.rate, Rate { per_second: 12.5, burst: 20 });
        assert_eq!(parse(&["run", "--v=5"]).unwrap().log_level, LogLevel::Trace);
        assert_eq!(parse(&["--listen", "::"]).unwrap().bind.to_string(), "[::]:8186");
    }

    #[test]
    fn a_bad_value_is_told_in_one_sentence() {
        for (words, expected) in [
            ("--port=x", "--port must be a number"),
            ("--listen=localhost", "--listen must be an IP address"),
            ("-v=loud", "-v must be a number"),
            ("--client-qps=0", "VIRT_OPERATOR_CLIENT_QPS (--client-qps) must be a number above 0"),
            ("--client-qps=1e9", "must be a number above 0 and not above 100000, and \"1e9\" is not"),
            ("--client-qps=NaN", "VIRT_OPERATOR_CLIENT_QPS"),
            ("--client-burst=-1", "VIRT_OPERATOR_CLIENT_BURST (--client-burst)"),
            ("--namespace=A_B", "NAMESPACE (--namespace) must be the name of one namespace, and \"A_B\" cannot be one"),
        ] {
            let error = format!("{:#}", parse(&[words]).unwrap_err());
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn clap_agrees_with_itself() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
