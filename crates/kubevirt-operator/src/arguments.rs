//! The command line and the environment variables of the program, and the settings that follow from them.

use std::{convert::Infallible, path::PathBuf, time::Duration};

use anyhow::{Result, bail};
use clap::{
    Args, Parser, Subcommand,
    builder::{BoolishValueParser, EnumValueParser},
    value_parser,
};
use vitivirt_api::text::is_subdomain;
use vitivirt_cli::{
    CHECK_EXIT_STATUS, CheckArguments, CompletionsArguments, DurationParser, EXIT_STATUS, RENDER_EXIT_STATUS, Setting,
    optional_namespace, setting,
};
use vitivirt_runtime::{
    health::Bind,
    telemetry::{LogFormat, LogLevel},
};

use crate::{
    commands::{plan::PlanArguments, render::RenderArguments},
    rbac,
};

const INTERVAL: DurationParser =
    DurationParser { least: Duration::from_secs(1), most: Duration::from_secs(24 * 60 * 60) };
const NAMESPACE_EXPECTED: &str = "must be the name of a single namespace";
const ADDRESS_EXPECTED: &str = "must be an address and a port such as 127.0.0.1:8080, or a port alone such as :8080";

/// A path, or none when the text is empty, as a variable of a Deployment can be.
fn optional_folder(text: &str) -> Result<Option<PathBuf>, Infallible> {
    Ok((!text.is_empty()).then(|| text.into()))
}

fn service_account_name(text: &str) -> Result<String, &'static str> {
    let is_name = is_subdomain(text);
    is_name.then(|| text.to_owned()).ok_or("must consist of lower-case letters, digits, hyphens and periods")
}

#[derive(Debug, Parser)]
#[command(
    name = "kubevirt-operator",
    version = vitivirt_cli::version(),
    about = "Creates KubeVirt virtual machines from Machines and keeps them in sync",
    long_about = "Creates KubeVirt virtual machines from Machines (machines.vitistack.io), with their disks, networks \
                  and cloud-init data, and keeps them in sync.\n\nWithout a command it runs as the operator. It \
                  connects with --kubeconfig, otherwise KUBECONFIG, otherwise ~/.kube/config, otherwise the service \
                  account of its pod.",
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
    Run(Box<RunArguments>),
    /// Print the CRDs that the operator needs, as YAML
    Crds,
    /// Print the objects that the operator creates for Machines, without a cluster
    ///
    /// The files contain Machines and the objects that they refer to: NetworkConfigurations, Secrets and
    /// StorageClasses. The output is for reading and comparing, not for kubectl apply: values that a cluster assigns,
    /// such as UIDs, and values derived from them are placeholders. Problems with a Machine are printed to standard
    /// error. Objects without a namespace get the one from --namespace, or the namespace default.
    #[command(after_help = RENDER_EXIT_STATUS)]
    Render(RenderArguments),
    /// Show what applying Machines would change in the cluster; writes nothing
    ///
    /// The files contain Machines, and NetworkConfigurations and Secrets that are applied with them. For each field
    /// that changes, the plan shows whether a running guest sees the change immediately or after a restart. Objects
    /// without a namespace get the one from --namespace, or the namespace of the kubeconfig context.
    #[command(after_help = EXIT_STATUS)]
    Plan(PlanArguments),
    /// Check that the cluster has what the operator and Machines need; writes nothing
    ///
    /// Prints one line per check, with a remedy if it does not pass. It checks the permissions of the operator's
    /// service account; with --pre, those of your own account, which must be able to install the operator.
    #[command(after_help = CHECK_EXIT_STATUS)]
    Check(OperatorCheckArguments),
    /// Print a shell completion script
    Completions(CompletionsArguments),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct OperatorCheckArguments {
    #[command(flatten)]
    pub(crate) common: CheckArguments,
    /// Namespace whose Machines are reconciled; empty for all namespaces
    ///
    /// The operator's account then needs its permissions in this namespace only. If it has them in all namespaces, the
    /// check warns.
    #[arg(
        long,
        value_name = "NAMESPACE",
        env = "WATCH_NAMESPACE",
        default_value = "",
        hide_default_value = true,
        value_parser = setting(optional_namespace, NAMESPACE_EXPECTED)
    )]
    pub(crate) watch_namespace: Setting<Option<String>>,
    /// Name of the operator's service account. Default: the one in its manifests
    #[arg(long, value_name = "NAME", value_parser = service_account_name, conflicts_with = "pre")]
    pub(crate) service_account: Option<String>,
}

impl OperatorCheckArguments {
    /// The name of the operator's service account.
    pub(crate) fn account(&self) -> &str {
        self.service_account.as_deref().unwrap_or(rbac::ACCOUNT)
    }
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RunArguments {
    /// Path to the kubeconfig file
    ///
    /// Default: the file in KUBECONFIG, otherwise ~/.kube/config, otherwise the service account of the pod.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// How often each Machine is reconciled even if nothing has changed
    ///
    /// Each of these reconciles compares the Machine with the caches, in case a watch event was missed. It sends no API
    /// requests unless something differs.
    #[arg(
        long,
        value_name = "DURATION",
        env = "RECONCILE_INTERVAL",
        default_value = "30s",
        value_parser = setting(INTERVAL, "must be a duration from 1s to 24h, such as 30s or 5m")
    )]
    reconcile_interval: Setting<Duration>,
    /// Maximum number of Machines reconciled at the same time
    #[arg(
        long,
        value_name = "NUMBER",
        env = "MAX_CONCURRENT_RECONCILES",
        default_value = "5",
        value_parser = setting(value_parser!(u16).range(1..=1000), "must be a number from 1 to 1000")
    )]
    max_concurrent_reconciles: Setting<u16>,
    /// Address of /metrics
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "METRICS_BIND_ADDRESS",
        default_value = ":8080",
        value_parser = setting(str::parse::<Bind>, ADDRESS_EXPECTED)
    )]
    metrics_bind_address: Setting<Bind>,
    /// Serve /metrics over TLS
    ///
    /// /healthz and /readyz always use plain HTTP, on --health-probe-bind-address.
    #[arg(
        long,
        value_name = "BOOLEAN",
        env = "METRICS_TLS",
        default_value = "false",
        num_args = 0..=1,
        default_missing_value = "true",
        value_parser = setting(BoolishValueParser::new(), "must be true or false")
    )]
    metrics_tls: Setting<bool>,
    /// Folder with the certificate of /metrics: tls.crt and tls.key
    ///
    /// Usually a mounted Secret. The operator loads new files without a restart. Default: a self-signed certificate that
    /// is created at each start.
    #[arg(
        long,
        value_name = "FOLDER",
        env = "METRICS_TLS_CERT_DIR",
        default_value = "",
        hide_default_value = true,
        value_parser = setting(optional_folder, "must be the path of a folder")
    )]
    metrics_tls_cert_dir: Setting<Option<PathBuf>>,
    /// Serve /metrics only to clients that are allowed to get the URL /metrics
    ///
    /// The API server checks each bearer token (TokenReview) and the permission of its user (SubjectAccessReview). The
    /// operator's service account needs permission to create both. Requires --metrics-tls.
    #[arg(
        long,
        value_name = "BOOLEAN",
        env = "METRICS_AUTHORIZATION",
        default_value = "false",
        num_args = 0..=1,
        default_missing_value = "true",
        value_parser = setting(BoolishValueParser::new(), "must be true or false")
    )]
    metrics_authorization: Setting<bool>,
    /// Address of /healthz and /readyz
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "HEALTH_PROBE_BIND_ADDRESS",
        default_value = ":8081",
        value_parser = setting(str::parse::<Bind>, ADDRESS_EXPECTED)
    )]
    health_probe_bind_address: Setting<Bind>,
    /// Loopback address of the status page; 0 disables the page
    ///
    /// `kubectl port-forward` reaches the loopback of the pod. The page shows the Machines of all watched namespaces.
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "STATUS_BIND_ADDRESS",
        default_value = "127.0.0.1:8082",
        value_parser = setting(vitivirt_page::loopback_address, vitivirt_page::ADDRESS_EXPECTED)
    )]
    status_bind_address: Setting<Option<Bind>>,
    /// Enable leader election, so that only one replica is active
    #[arg(
        long,
        value_name = "BOOLEAN",
        env = "LEADER_ELECTION",
        default_value = "true",
        num_args = 0..=1,
        default_missing_value = "true",
        value_parser = setting(BoolishValueParser::new(), "must be true or false")
    )]
    leader_election: Setting<bool>,
    /// Namespace of the operator, for its Lease
    ///
    /// Default: the namespace of its service account, otherwise kubevirt-operator-system.
    #[arg(
        long,
        env = "NAMESPACE",
        default_value = "",
        hide_default_value = true,
        value_parser = setting(optional_namespace, NAMESPACE_EXPECTED)
    )]
    namespace: Setting<Option<String>>,
    /// Namespace whose Machines are reconciled; empty for all namespaces
    #[arg(
        long,
        value_name = "NAMESPACE",
        env = "WATCH_NAMESPACE",
        default_value = "",
        value_parser = setting(optional_namespace, NAMESPACE_EXPECTED)
    )]
    watch_namespace: Setting<Option<String>>,
    /// Format of log lines on standard error
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
    /// Minimum level of log lines
    #[arg(
        long,
        value_name = "LEVEL",
        env = "LOG_LEVEL",
        default_value = "info",
        ignore_case = true,
        value_parser = setting(EnumValueParser::<LogLevel>::new(), "must be a log level")
    )]
    log_level: Setting<LogLevel>,
    /// Name of this pod, for the Lease
    #[arg(long, env = "POD_NAME", hide = true)]
    pod_name: Option<String>,
}

/// Valid settings of `run`.
#[derive(Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) reconcile_interval: Duration,
    pub(crate) workers: usize,
    pub(crate) metrics: Bind,
    /// `None`: plain HTTP.
    pub(crate) secure_metrics: Option<SecureMetrics>,
    pub(crate) health: Bind,
    /// `None`: no status page.
    pub(crate) status: Option<Bind>,
    pub(crate) leader_election: bool,
    pub(crate) namespace: Option<String>,
    /// `None`: all namespaces.
    pub(crate) watch_namespace: Option<String>,
    pub(crate) log_format: LogFormat,
    pub(crate) log_level: LogLevel,
    pub(crate) pod_name: Option<String>,
}

/// Metrics over TLS.
#[derive(Debug, PartialEq)]
pub(crate) struct SecureMetrics {
    /// The folder of the certificate. `None`: a self-signed certificate.
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) authorization: bool,
}

impl SecureMetrics {
    fn from_arguments(tls: bool, certificate: Option<PathBuf>, authorization: bool) -> Result<Option<Self>> {
        match (tls, certificate, authorization) {
            (true, certificate, authorization) => Ok(Some(Self { certificate, authorization })),
            (false, _, true) => bail!(
                "METRICS_AUTHORIZATION (--metrics-authorization): requires METRICS_TLS=true (--metrics-tls), because \
                 clients must not send tokens in plain text"
            ),
            (false, Some(_), _) => {
                bail!("METRICS_TLS_CERT_DIR (--metrics-tls-cert-dir): requires METRICS_TLS=true (--metrics-tls)")
            }
            (false, None, false) => Ok(None),
        }
    }
}

impl TryFrom<RunArguments> for Settings {
    type Error = anyhow::Error;

    fn try_from(arguments: RunArguments) -> Result<Self> {
        let (metrics, health) = (arguments.metrics_bind_address.get()?, arguments.health_probe_bind_address.get()?);
        let secure_metrics = SecureMetrics::from_arguments(
            arguments.metrics_tls.get()?,
            arguments.metrics_tls_cert_dir.get()?,
            arguments.metrics_authorization.get()?,
        )?;
        if secure_metrics.is_some() && metrics == health {
            bail!(
                "METRICS_TLS (--metrics-tls): requires different addresses of metrics and probes, because the kubelet's \
                 probes use plain HTTP; change METRICS_BIND_ADDRESS or HEALTH_PROBE_BIND_ADDRESS"
            );
        }
        Ok(Self {
            kubeconfig: arguments.kubeconfig,
            reconcile_interval: arguments.reconcile_interval.get()?,
            workers: usize::from(arguments.max_concurrent_reconciles.get()?),
            metrics,
            secure_metrics,
            health,
            status: arguments.status_bind_address.get()?,
            leader_election: arguments.leader_election.get()?,
            namespace: arguments.namespace.get()?,
            watch_namespace: arguments.watch_namespace.get()?,
            log_format: arguments.log_format,
            log_level: arguments.log_level.get()?,
            pod_name: arguments.pod_name,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Settings> {
        let arguments = Arguments::try_parse_from([&["kubevirt-operator"], words].concat())?;
        match arguments.command {
            Some(Command::Run(run)) => (*run).try_into(),
            _ => arguments.run.try_into(),
        }
    }

    #[test]
    fn the_defaults_are_those_of_the_specification() {
        let settings = parse(&[]).unwrap();
        assert_eq!(settings.reconcile_interval, Duration::from_secs(30));
        assert_eq!(settings.workers, 5);
        assert_eq!(settings.metrics.to_string(), ":8080");
        assert_eq!(settings.secure_metrics, None);
        assert_eq!(settings.health.to_string(), ":8081");
        assert_eq!(settings.status.unwrap().to_string(), "127.0.0.1:8082");
        assert!(settings.leader_election);
        assert_eq!(settings.watch_namespace, None);
        assert_eq!(settings, parse(&["run"]).unwrap());
    }

    fn check(words: &[&str]) -> Result<OperatorCheckArguments> {
        let arguments = Arguments::try_parse_from([&["kubevirt-operator", "check"], words].concat())?;
        match arguments.command {
            Some(Command::Check(check)) => Ok(check),
            other => bail!("{other:?}"),
        }
    }

    #[test]
    fn check_uses_the_account_of_the_manifests_unless_it_gets_another() {
        let default = check(&["--watch-namespace="]).unwrap();
        assert_eq!((default.account(), default.watch_namespace.clone().get().unwrap()), (rbac::ACCOUNT, None));
        let other = check(&["--watch-namespace", "shop", "--service-account", "machines"]).unwrap();
        assert_eq!((other.account(), other.watch_namespace.clone().get().unwrap()), ("machines", Some("shop".into())));
        assert!(check(&["--pre", "--watch-namespace", "shop"]).is_ok());
        for invalid in [&["--service-account", "A_B"][..], &["--pre", "--service-account", "machines"]] {
            assert!(check(invalid).is_err(), "{invalid:?}");
        }
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
    fn an_invalid_value_is_one_sentence_with_flag_and_variable() {
        for (words, expected) in [
            (
                "--reconcile-interval=soon",
                "RECONCILE_INTERVAL (--reconcile-interval): invalid value \"soon\": must be a duration from 1s to 24h, \
                 such as 30s or 5m",
            ),
            ("--reconcile-interval=-5s", "RECONCILE_INTERVAL (--reconcile-interval): invalid value \"-5s\""),
            ("--reconcile-interval=30", "RECONCILE_INTERVAL (--reconcile-interval): invalid value \"30\""),
            (
                "--max-concurrent-reconciles=0",
                "MAX_CONCURRENT_RECONCILES (--max-concurrent-reconciles): invalid value \"0\": must be a number from 1 \
                 to 1000",
            ),
            (
                "--metrics-bind-address=8080",
                "METRICS_BIND_ADDRESS (--metrics-bind-address): invalid value \"8080\": must be an address and a port",
            ),
            (
                "--health-probe-bind-address=:x",
                "HEALTH_PROBE_BIND_ADDRESS (--health-probe-bind-address): invalid value",
            ),
            (
                "--status-bind-address=0.0.0.0:8082",
                "STATUS_BIND_ADDRESS (--status-bind-address): invalid value \"0.0.0.0:8082\": must be a loopback address \
                 and a port such as 127.0.0.1:8082, or 0",
            ),
            (
                "--leader-election=maybe",
                "LEADER_ELECTION (--leader-election): unsupported value \"maybe\"; supported values: true, false",
            ),
            (
                "--namespace=Not A Name",
                "NAMESPACE (--namespace): invalid value \"Not A Name\": must be the name of a single namespace",
            ),
            ("--watch-namespace=a,b", "WATCH_NAMESPACE (--watch-namespace): invalid value \"a,b\": must be the name"),
            (
                "--log-level=loud",
                "LOG_LEVEL (--log-level): unsupported value \"loud\"; supported values: error, warn, info, debug, trace",
            ),
        ] {
            let error = format!("{:#}", parse(&[words]).unwrap_err());
            assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_log_level_may_be_written_in_capital_letters() {
        for (text, expected) in [("info", LogLevel::Info), ("INFO", LogLevel::Info), ("Debug", LogLevel::Debug)] {
            assert_eq!(parse(&["--log-level", text]).unwrap().log_level, expected);
        }
    }

    #[test]
    fn metrics_are_secured_by_tls_and_then_by_tokens() {
        let secure = |words: &[&str]| parse(words).unwrap().secure_metrics;
        let expected = |certificate: Option<&str>, authorization| {
            Some(SecureMetrics { certificate: certificate.map(PathBuf::from), authorization })
        };
        assert_eq!(secure(&["--metrics-tls=false", "--metrics-tls-cert-dir="]), None);
        assert_eq!(secure(&["--metrics-tls"]), expected(None, false));
        assert_eq!(secure(&["--metrics-tls", "--metrics-tls-cert-dir=/certs"]), expected(Some("/certs"), false));
        assert_eq!(secure(&["--metrics-tls", "--metrics-authorization"]), expected(None, true));
        for (words, reason) in [
            (&["--metrics-authorization"][..], "clients must not send tokens in plain text"),
            (&["--metrics-tls-cert-dir=/certs"], "METRICS_TLS_CERT_DIR (--metrics-tls-cert-dir): requires METRICS_TLS"),
            (&["--metrics-tls", "--metrics-bind-address=:8081"], "requires different addresses of metrics and probes"),
            (&["--metrics-tls=maybe"], "METRICS_TLS (--metrics-tls): unsupported value \"maybe\""),
        ] {
            let error = parse(words).unwrap_err().to_string();
            assert!(error.contains(reason) && !error.contains('\n'), "{error}");
        }
    }

    /// Every command sees the environment of the Deployment. clap treats a variable like the flag that it belongs to.
    #[test]
    fn invalid_settings_of_the_operator_stop_only_run() {
        let words = ["kubevirt-operator", "--log-level=loud", "--namespace=A_B", "--leader-election=maybe"];
        let arguments = Arguments::try_parse_from(words).unwrap();
        assert!(Settings::try_from(arguments.run).is_err());
    }

    #[test]
    fn help_shows_possible_values_and_short_first_lines() {
        use clap::CommandFactory;
        let mut command = Arguments::command();
        let help = command.render_long_help().to_string();
        assert!(help.contains("[possible values: error, warn, info, debug, trace]"), "{help}");
        assert!(help.contains("[possible values: true, false]"), "{help}");
        assert_eq!(vitivirt_cli::overlong_help(&command), Vec::<String>::new());
    }

    #[test]
    fn the_command_definition_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
