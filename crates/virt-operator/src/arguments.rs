//! The command line and the environment variables of the program, and the settings that follow from them. The names are
//! those of upstream virt-operator, so that either can replace the other in a Deployment.

use std::{fmt::Display, net::IpAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use anyhow::Result;
use clap::{Args, Parser, Subcommand, value_parser};
use vitivirt_cli::{
    CHECK_EXIT_STATUS, CheckArguments, CompletionsArguments, EXIT_STATUS, RENDER_EXIT_STATUS, Setting,
    optional_namespace, setting,
};
use vitivirt_runtime::{
    client::Rate,
    health::Bind,
    telemetry::{LogFormat, LogLevel},
};

use crate::commands::{
    images::ImagesArguments,
    manifests::ManifestsArguments,
    plan::PlanArguments,
    render::RenderArguments,
    uninstall::{UNINSTALL_EXIT_STATUS, UninstallArguments},
};

#[derive(Debug, Parser)]
#[command(
    name = "virt-operator",
    version = vitivirt_cli::version(),
    about = "Installs, configures and repairs KubeVirt",
    long_about = "Installs, configures and repairs KubeVirt according to the KubeVirt resource \
                  (kubevirts.kubevirt.io).\n\nWithout a command it runs as the operator. It connects with \
                  --kubeconfig, otherwise KUBECONFIG, otherwise ~/.kube/config, otherwise the service account of its \
                  pod.",
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
    /// Run the operator until it receives SIGTERM or SIGINT (the default)
    Run(RunArguments),
    /// Print the CRD of the KubeVirt resource, as YAML
    Crds,
    /// Print the operator's Deployment and everything it needs, for kubectl apply
    Manifests(ManifestsArguments),
    /// Print every object that is installed for a KubeVirt resource, without a cluster
    ///
    /// The files must contain exactly one KubeVirt resource. The output is for reading and comparing, not for kubectl
    /// apply: it has no certificates, because the operator creates them when it runs. A resource without a namespace
    /// gets the one from --namespace, or the namespace kubevirt.
    #[command(after_help = RENDER_EXIT_STATUS)]
    Render(RenderArguments),
    /// Show what applying a KubeVirt resource would change; writes nothing
    ///
    /// The files must contain exactly one KubeVirt resource. The plan shows every write until the installation is
    /// complete, which pods restart, what happens to VMs, and what would block the operator. Use it to rehearse an
    /// upgrade. A resource without a namespace gets the one from --namespace, or the namespace kubevirt.
    #[command(after_help = EXIT_STATUS)]
    Plan(PlanArguments),
    /// Check that the cluster has what KubeVirt and its operator need; writes nothing
    ///
    /// Prints one line per check, with a remedy if it does not pass. It checks the permissions of the operator's
    /// service account; with --pre, those of your own account, which must be able to install the operator.
    #[command(after_help = CHECK_EXIT_STATUS)]
    Check(CheckArguments),
    /// Print every image that a KubeVirt resource needs, for mirroring
    ///
    /// The files must contain exactly one KubeVirt resource. The list contains the images of KubeVirt's components, of
    /// virtual machines and their sidecars, of exports, of virtctl guestfs, and of the operators.
    #[command(after_help = RENDER_EXIT_STATUS)]
    Images(ImagesArguments),
    /// Remove KubeVirt from the cluster, even if its operator no longer runs
    ///
    /// Prints what it found and what it will delete, asks for confirmation, and returns when everything is deleted. It
    /// uses your kubeconfig, so it works even after the operator or its namespace has been deleted. It does not delete the
    /// operator.
    #[command(after_help = UNINSTALL_EXIT_STATUS)]
    Uninstall(UninstallArguments),
    /// Print a shell completion script
    Completions(CompletionsArguments),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RunArguments {
    /// Port of /metrics, /healthz and /readyz
    #[arg(
        long,
        value_name = "NUMBER",
        default_value = "8186",
        value_parser = setting(value_parser!(u16), "must be a number from 0 to 65535")
    )]
    port: Setting<u16>,
    /// Address to listen on
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0.0.0.0",
        value_parser = setting(str::parse::<IpAddr>, "must be an IP address such as 0.0.0.0 or ::")
    )]
    listen: Setting<IpAddr>,
    /// Loopback address of the status page; 0 disables the page
    ///
    /// `kubectl port-forward` reaches the loopback of the pod.
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "STATUS_BIND_ADDRESS",
        default_value = "127.0.0.1:8082",
        value_parser = setting(vitivirt_page::loopback_address, vitivirt_page::ADDRESS_EXPECTED)
    )]
    status_bind_address: Setting<Option<Bind>>,
    /// Log verbosity: 0-2 info, 3-4 also every request, 5 or higher everything
    #[arg(
        short,
        long = "v",
        value_name = "NUMBER",
        default_value = "2",
        value_parser = setting(value_parser!(u8), "must be a number from 0 to 255")
    )]
    verbosity: Setting<u8>,
    /// Maximum number of API requests per second
    #[arg(
        long,
        value_name = "NUMBER",
        env = QPS,
        default_value = "200",
        value_parser = setting(requests_per_second, "must be a number greater than 0 and at most 100000")
    )]
    client_qps: Setting<f64>,
    /// Maximum burst of API requests
    #[arg(
        long,
        value_name = "NUMBER",
        env = BURST,
        default_value = "400",
        value_parser = setting(value_parser!(u32).range(BURSTS), "must be a number from 1 to 100000")
    )]
    client_burst: Setting<u32>,
    /// Path to the kubeconfig file
    ///
    /// Default: the file in KUBECONFIG, otherwise ~/.kube/config, otherwise the service account of the pod.
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Namespace of the operator
    ///
    /// Default: the namespace of its service account, otherwise kubevirt.
    #[arg(
        long,
        env = "NAMESPACE",
        default_value = "",
        hide_default_value = true,
        value_parser = setting(optional_namespace, "must be the name of a single namespace")
    )]
    pub(crate) namespace: Setting<Option<String>>,
    /// Format of log lines on standard error
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
    /// Write this release's install strategy to a ConfigMap and exit
    ///
    /// Used by the virt-operator of another release during an upgrade. TARGET_DEPLOYMENT_CONFIG selects what is
    /// installed.
    #[arg(long)]
    pub(crate) dump_install_strategy: bool,
    /// Seconds that a pod may need to serve a new certificate
    ///
    /// After this time the operator reports the pod, and after one and a half times this time it deletes a pod whose
    /// certificate is expired or not trusted.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value = "120",
        hide = true,
        value_parser = setting(value_parser!(u32).range(1..=86_400), "must be a number from 1 to 86400")
    )]
    certificate_reload_seconds: Setting<u32>,
    /// Name of this pod, for the Lease
    #[arg(long, env = "POD_NAME", hide = true)]
    pod_name: Option<String>,
}

/// The defaults of upstream virt-operator.
const DEFAULT_RATE: Rate = Rate { per_second: 200.0, burst: 400 };
const BURSTS: RangeInclusive<i64> = 1..=100_000;
const QPS: &str = "VIRT_OPERATOR_CLIENT_QPS";
const BURST: &str = "VIRT_OPERATOR_CLIENT_BURST";

/// Valid settings of `run`.
#[derive(Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) bind: Bind,
    /// `None`: no status page.
    pub(crate) status: Option<Bind>,
    pub(crate) log_format: LogFormat,
    pub(crate) log_level: LogLevel,
    pub(crate) rate: Rate,
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) namespace: Option<String>,
    pub(crate) pod_name: Option<String>,
    /// Settings that are ignored. To be logged when the log is configured.
    pub(crate) warnings: Vec<String>,
    pub(crate) certificate_reload_time: Duration,
}

impl Settings {
    /// `variable` reads an environment variable.
    pub(crate) fn new(arguments: RunArguments, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut warnings = Vec::new();
        let requests_per_second = |text: &str| requests_per_second(text).ok();
        let (default, from_variable) = (DEFAULT_RATE, |name: &str| variable(name).unwrap_or_default());
        let per_second = arguments.client_qps.get();
        let per_second =
            valid_or(per_second, requests_per_second(&from_variable(QPS)), default.per_second, &mut warnings);
        let burst = from_variable(BURST).parse().ok().filter(|burst| BURSTS.contains(burst));
        let burst = valid_or(arguments.client_burst.get().map(i64::from), burst, default.burst.into(), &mut warnings);
        Ok(Self {
            bind: Bind { address: Some(arguments.listen.get()?), port: arguments.port.get()? },
            status: arguments.status_bind_address.get()?,
            log_level: log_level(arguments.verbosity.get()?),
            rate: Rate { per_second, burst: u32::try_from(burst)? },
            log_format: arguments.log_format,
            kubeconfig: arguments.kubeconfig,
            namespace: arguments.namespace.get()?,
            pod_name: arguments.pod_name,
            certificate_reload_time: Duration::from_secs(arguments.certificate_reload_seconds.get()?.into()),
            warnings,
        })
    }
}

/// As upstream virt-operator: an invalid flag counts as no flag, and an invalid variable as no variable.
fn valid_or<T: Copy + Display>(given: Result<T>, variable: Option<T>, default: T, warnings: &mut Vec<String>) -> T {
    given.unwrap_or_else(|error| {
        let used = variable.unwrap_or(default);
        warnings.push(format!("{error}; using {used}"));
        used
    })
}

/// The log level for a verbosity of upstream virt-operator.
pub(crate) fn log_level(verbosity: u8) -> LogLevel {
    match verbosity {
        0..=2 => LogLevel::Info,
        3..=4 => LogLevel::Debug,
        5.. => LogLevel::Trace,
    }
}

fn requests_per_second(text: &str) -> Result<f64, &'static str> {
    let number = text.parse::<f64>().ok();
    number.filter(|number| *number > 0.0 && *number <= 100_000.0).ok_or("out of range")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Settings> {
        parse_with(words, &[])
    }

    /// clap reads the variables of the process, so a test passes their values as flags too.
    fn parse_with(words: &[&str], variables: &[(&str, &str)]) -> Result<Settings> {
        let arguments = Arguments::try_parse_from([&["virt-operator"], words].concat())?;
        let variable = |name: &str| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        match arguments.command {
            Some(Command::Run(run)) => Settings::new(run, variable),
            _ => Settings::new(arguments.run, variable),
        }
    }

    #[test]
    fn the_defaults_are_those_of_upstream() {
        let settings = parse(&[]).unwrap();
        assert_eq!(settings.bind.to_string(), "0.0.0.0:8186");
        assert_eq!(settings.status.unwrap().to_string(), "127.0.0.1:8082");
        assert_eq!(settings.rate, Rate { per_second: 200.0, burst: 400 });
        assert_eq!(settings.log_level, LogLevel::Info);
        assert_eq!(settings.certificate_reload_time, vitivirt_install::served::Served::RELOAD_TIME);
        assert_eq!(settings, parse(&["run"]).unwrap());
    }

    #[test]
    fn flags_are_those_of_upstream() {
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
    fn an_invalid_value_is_one_sentence_with_flag_and_variable() {
        for (words, expected) in [
            ("--port=x", "--port: invalid value \"x\": must be a number from 0 to 65535"),
            (
                "--listen=localhost",
                "--listen: invalid value \"localhost\": must be an IP address such as 0.0.0.0 or ::",
            ),
            (
                "--status-bind-address=:8082",
                "STATUS_BIND_ADDRESS (--status-bind-address): invalid value \":8082\": must be a loopback address",
            ),
            ("-v=loud", "-v: invalid value \"loud\": must be a number from 0 to 255"),
            (
                "--namespace=A_B",
                "NAMESPACE (--namespace): invalid value \"A_B\": must be the name of a single namespace",
            ),
        ] {
            let error = format!("{:#}", parse(&[words]).unwrap_err());
            assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn an_invalid_rate_is_reported_and_the_variable_or_the_default_is_used() {
        let qps = "VIRT_OPERATOR_CLIENT_QPS (--client-qps): invalid value";
        let burst = "VIRT_OPERATOR_CLIENT_BURST (--client-burst): invalid value";
        for (flag, variable, rate, warning) in [
            (
                "--client-qps=0",
                ("", ""),
                DEFAULT_RATE,
                format!("{qps} \"0\": must be a number greater than 0 and at most 100000; using 200"),
            ),
            ("--client-qps=", (QPS, ""), DEFAULT_RATE, format!("{qps} \"\": must be")),
            ("--client-qps=fast", (QPS, "fast"), DEFAULT_RATE, format!("{qps} \"fast\": must be")),
            ("--client-qps=1e9", (QPS, "NaN"), DEFAULT_RATE, format!("{qps} \"1e9\": must be")),
            ("--client-qps=0", (QPS, "30"), Rate { per_second: 30.0, ..DEFAULT_RATE }, "using 30".to_owned()),
            (
                "--client-burst=",
                (BURST, ""),
                DEFAULT_RATE,
                format!("{burst} \"\": must be a number from 1 to 100000; using 400"),
            ),
            ("--client-burst=-1", (BURST, "0"), DEFAULT_RATE, format!("{burst} \"-1\": must be")),
            ("--client-burst=0", (BURST, "9"), Rate { burst: 9, ..DEFAULT_RATE }, "using 9".to_owned()),
        ] {
            let settings = parse_with(&[flag], &[variable]).unwrap();
            assert_eq!(settings.rate, rate, "{flag}");
            let [only] = settings.warnings.as_slice() else { panic!("{:?}", settings.warnings) };
            assert!(only.contains(&warning), "{only}");
        }
        // A valid flag goes before the variable.
        let settings = parse_with(&["--client-qps=7"], &[(QPS, "30")]).unwrap();
        assert_eq!((settings.rate.per_second, settings.warnings), (7.0, Vec::new()));
    }

    /// Every command sees the environment of the Deployment. clap treats a variable like the flag that it belongs to.
    #[test]
    fn invalid_settings_of_the_operator_stop_only_run() {
        let words = ["virt-operator", "--port=x", "--namespace=A_B"];
        let arguments = Arguments::try_parse_from(words).unwrap();
        assert!(Settings::new(arguments.run, |_| None).is_err());
    }

    #[test]
    fn the_first_line_of_every_help_text_is_short() {
        use clap::CommandFactory;
        assert_eq!(vitivirt_cli::overlong_help(&Arguments::command()), Vec::<String>::new());
    }

    #[test]
    fn the_command_definition_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
