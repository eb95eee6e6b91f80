//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kubevirt_operator::plugin::PlanArguments;
use vitivirt_cli::{ClusterArguments, CompletionsArguments, EXIT_STATUS, PlanFormat, namespace_name};

#[derive(Debug, Parser)]
#[command(
    name = "kubectl-vmachine",
    bin_name = "kubectl vmachine",
    version = vitivirt_cli::version(),
    about = "Manages Machines (machines.vitistack.io) from the command line"
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List Machines, with the reason for each one that is not ready
    List(ListArguments),
    /// Show one Machine as a tree: VirtualMachine, VMI, pods, disks, networks
    Describe(DescribeArguments),
    /// Start Machines: set spec.powerState to Running
    Start(NameArguments),
    /// Shut Machines down: set spec.powerState to Stopped
    Stop(NameArguments),
    /// Restart the guests of Machines, which also applies changes that need a restart
    Restart(NameArguments),
    /// Open the serial console of a Machine with virtctl
    Console(VirtctlArguments),
    /// Open an SSH session to a Machine with virtctl
    Ssh(SshArguments),
    /// Open the graphical console of a Machine with virtctl
    Vnc(VirtctlArguments),
    /// Show what applying Machines from files would change; writes nothing
    ///
    /// The same as `kubevirt-operator plan`.
    #[command(after_help = EXIT_STATUS)]
    Plan(PlanArguments),
    /// Let a Machine take over PVCs and other objects of an earlier Machine
    ///
    /// Adds the annotation vitistack.io/adopt to the Machine, and vitistack.io/adopt-by to PVCs and Secrets that are
    /// adopted by name. Without items, it adopts everything that the Machine can take over. Use it after a
    /// restore from a backup, or to reuse a retained disk.
    Adopt(AdoptArguments),
    /// Write a compressed archive for a bug report, without Secrets or user data
    CollectDebugInfo(DebugInfoArguments),
    /// Print a shell completion script
    Completions(CompletionsArguments),
}

/// The cluster, and one namespace of it.
#[derive(Debug, Clone, Args)]
pub(crate) struct NamespaceArguments {
    #[command(flatten)]
    pub(crate) cluster: ClusterArguments,
    /// Namespace. Default: the namespace of the kubeconfig context
    #[arg(short, long, value_name = "NAME", value_parser = namespace_name)]
    pub(crate) namespace: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ListFormat {
    #[default]
    Text,
    /// As text, with the diagnosis of each Machine that is not ready
    Wide,
    Json,
    Yaml,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ListArguments {
    #[command(flatten)]
    pub(crate) namespace: NamespaceArguments,
    /// List the Machines of all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", value_enum, default_value_t)]
    pub(crate) output: ListFormat,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct DescribeArguments {
    /// Name of the Machine
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) namespace: NamespaceArguments,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", value_enum, default_value_t)]
    pub(crate) output: PlanFormat,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct NameArguments {
    /// Names of the Machines
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    #[command(flatten)]
    pub(crate) namespace: NamespaceArguments,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct VirtctlArguments {
    /// Name of the Machine
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) options: VirtctlOptions,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct SshArguments {
    /// Machine to connect to: NAME or USER@NAME
    #[arg(value_name = "NAME")]
    pub(crate) target: String,
    #[command(flatten)]
    pub(crate) options: VirtctlOptions,
}

/// What `console`, `ssh` and `vnc` pass to virtctl.
#[derive(Debug, Clone, Args)]
pub(crate) struct VirtctlOptions {
    #[command(flatten)]
    pub(crate) namespace: NamespaceArguments,
    /// Additional arguments for virtctl
    #[arg(last = true, value_name = "ARGUMENT")]
    pub(crate) arguments: Vec<String>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct AdoptArguments {
    /// Name of the Machine
    pub(crate) name: String,
    /// UID of an earlier Machine, pvc/NAME or secret/NAME
    #[arg(value_name = "ITEM")]
    pub(crate) items: Vec<String>,
    #[command(flatten)]
    pub(crate) namespace: NamespaceArguments,
    /// Print the annotations and write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct DebugInfoArguments {
    #[command(flatten)]
    pub(crate) namespace: NamespaceArguments,
    /// Collect the Machines of all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,
    /// Namespace of kubevirt-operator, for its logs
    #[arg(long, value_name = "NAME", default_value = kubevirt_operator::rbac::NAMESPACE)]
    pub(crate) operator_namespace: String,
    /// File to write; - for standard output
    #[arg(short, long, value_name = "FILE", default_value = "vmachine-debug-info.tar.gz")]
    pub(crate) filename: PathBuf,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_definition_is_consistent_and_its_help_is_short() {
        Arguments::command().debug_assert();
        assert_eq!(vitivirt_cli::overlong_help(&Arguments::command()), Vec::<String>::new());
    }
}
