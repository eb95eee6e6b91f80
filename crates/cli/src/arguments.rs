//! Arguments that commands of both programs have, each defined once.

use std::path::PathBuf;

use clap::{Args, ColorChoice, Command};

use crate::{ObjectFormat, PlanFormat, setting::namespace_name};

/// The longest first line of a help text.
const LONGEST_HELP: usize = 80;

/// The last part of the help of `plan`.
pub const EXIT_STATUS: &str = "\
Exit status:
  0  Everything can be applied
  1  A change would be rejected or blocked, or the input is invalid
  2  The result is unknown: a file or the cluster cannot be read, or an argument is invalid";

/// The last part of the help of `render` and `images`, which read no cluster.
pub const RENDER_EXIT_STATUS: &str = "\
Exit status:
  0  Everything was printed
  1  The input is invalid, or an object in it would be rejected or blocked
  2  A file cannot be read, or an argument is invalid";

/// The objects that a command works on.
#[derive(Debug, Clone, Args)]
pub struct FileArguments {
    /// File or folder with objects, or - for standard input; can be repeated
    #[arg(short = 'f', long = "filename", value_name = "PATH", required = true)]
    pub files: Vec<PathBuf>,
    /// Namespace for objects in the files that do not specify one
    #[arg(short, long, value_parser = namespace_name)]
    pub namespace: Option<String>,
}

/// The cluster that a command reads.
#[derive(Debug, Clone, Default, Args)]
pub struct ClusterArguments {
    /// Path to the kubeconfig file
    ///
    /// Default: the file in KUBECONFIG, otherwise ~/.kube/config, otherwise the service account of the pod.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Name of the kubeconfig context. Default: the current context
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
}

#[derive(Debug, Clone, Default, Args)]
pub struct PlanOutput {
    /// Output format
    #[arg(short, long, value_name = "FORMAT", value_enum, default_value_t)]
    pub output: PlanFormat,
    /// When to color the text; auto honors NO_COLOR and CLICOLOR
    #[arg(long, value_name = "WHEN", value_enum, default_value_t)]
    pub color: ColorChoice,
}

impl PlanOutput {
    pub(crate) fn color_choice(&self) -> anstream::ColorChoice {
        match self.color {
            ColorChoice::Auto => anstream::ColorChoice::Auto,
            ColorChoice::Always => anstream::ColorChoice::Always,
            ColorChoice::Never => anstream::ColorChoice::Never,
        }
    }
}

#[derive(Debug, Clone, Default, Args)]
pub struct RenderOutput {
    /// Output format
    #[arg(short, long, value_name = "FORMAT", value_enum, default_value_t)]
    pub output: ObjectFormat,
}

/// Help texts of a program whose first line is longer than 80 characters: a check for its tests.
pub fn overlong_help(command: &Command) -> Vec<String> {
    let mut texts: Vec<String> = command.get_about().into_iter().map(ToString::to_string).collect();
    texts.extend(command.get_arguments().filter_map(|arg| arg.get_help()).map(ToString::to_string));
    texts.retain(|text| text.lines().next().is_some_and(|line| line.chars().count() > LONGEST_HELP));
    texts.extend(command.get_subcommands().flat_map(overlong_help));
    texts
}
