//! Completion of `kubectl vmachine …` in the user's shell. kubectl runs the program `kubectl_complete-vmachine` with the words
//! so far. The answer has one line for each completion, and a last line with a number for the shell. This plugin is that
//! program, too, when it is called with that name.

use std::{ffi::OsString, process::ExitCode, time::Duration};

use clap::{CommandFactory, Parser};
use kube::api::ListParams;
use vitivirt_cli::{CommandResult, print};

use crate::{
    arguments::{Arguments, NamespaceArguments},
    cluster::NamespaceClient,
};

/// The name of the program that kubectl runs.
const PROGRAM: &str = "kubectl_complete-vmachine";
/// The command that does the same.
pub(crate) const COMMAND: &str = "__complete";
/// The shell must not offer file names.
const NO_FILES: u8 = 4;
/// The shell may offer file names.
const FILES: u8 = 0;
/// A shell that waits for longer disturbs its user.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Commands whose arguments are names of Machines.
const WITH_NAMES: [&str; 8] = ["describe", "start", "stop", "restart", "console", "ssh", "vnc", "adopt"];

/// The words of the command line, if this process is to complete them.
pub(crate) fn requested(mut arguments: impl Iterator<Item = OsString>) -> Option<Vec<String>> {
    let program = arguments.next()?;
    let mut words = arguments.map(|word| word.to_string_lossy().into_owned()).peekable();
    if !program.to_string_lossy().ends_with(PROGRAM) {
        words.next_if(|word| word == COMMAND)?;
    }
    Some(words.collect())
}

pub(crate) async fn run(words: &[String]) -> CommandResult<ExitCode> {
    let (last, before) = words.split_last().map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
    let (mut completions, directive) = candidates(before, last);
    if directive == NO_FILES && completions.is_empty() {
        completions = machine_names(before).await;
    }
    completions.retain(|completion| completion.starts_with(last));
    completions.sort();
    let lines: String = completions.iter().map(|completion| format!("{completion}\n")).collect();
    print(&format!("{lines}:{directive}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// What the command line itself offers. It is empty with `NO_FILES` where names of Machines belong.
fn candidates(before: &[String], last: &str) -> (Vec<String>, u8) {
    let command = Arguments::command();
    let Some(name) = before.first() else {
        return (command.get_subcommands().map(|command| command.get_name().to_owned()).collect(), NO_FILES);
    };
    let Some(subcommand) = command.find_subcommand(name) else { return (Vec::new(), FILES) };
    if last.starts_with('-') {
        let options = subcommand.get_arguments().filter_map(|argument| Some(format!("--{}", argument.get_long()?)));
        return (options.chain(["--help".to_owned()]).collect(), NO_FILES);
    }
    let takes_value = |word: &String| {
        let argument = subcommand.get_arguments().find(|argument| {
            let is_long = argument.get_long().is_some_and(|long| word.strip_prefix("--") == Some(long));
            is_long || argument.get_short().is_some_and(|short| *word == format!("-{short}"))
        });
        argument.filter(|argument| argument.get_action().takes_values())
    };
    if let Some(argument) = before.last().and_then(takes_value) {
        let values = argument.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect::<Vec<_>>();
        return (values, FILES);
    }
    (Vec::new(), if WITH_NAMES.contains(&name.as_str()) { NO_FILES } else { FILES })
}

/// The names in the namespace of the command line. Empty if the cluster does not answer: a completion has no place for an
/// error.
async fn machine_names(before: &[String]) -> Vec<String> {
    #[derive(Parser)]
    #[command(ignore_errors = true)]
    struct Words {
        #[command(flatten)]
        namespace: NamespaceArguments,
        #[arg(allow_hyphen_values = true)]
        _others: Vec<String>,
    }
    let Ok(words) = Words::try_parse_from(before) else { return Vec::new() };
    let names = async {
        let cluster = NamespaceClient::connect(&words.namespace).await.ok()?;
        let machines = cluster.machines().list_metadata(&ListParams::default().limit(500)).await.ok()?;
        Some(machines.items.into_iter().filter_map(|machine| machine.metadata.name).collect())
    };
    tokio::time::timeout(TIMEOUT, names).await.ok().flatten().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(ToOwned::to_owned).collect()
    }

    #[test]
    fn kubectl_asks_by_name_or_with_the_hidden_command() {
        let requested = |text: &str| requested(words(text).into_iter().map(OsString::from));
        assert_eq!(requested("/home/a/bin/kubectl_complete-vmachine stop w"), Some(words("stop w")));
        assert_eq!(requested("kubectl-vmachine __complete stop w"), Some(words("stop w")));
        assert_eq!(requested("kubectl-vmachine stop w"), None);
    }

    #[test]
    fn commands_options_and_values_are_offered() {
        let (commands, directive) = candidates(&[], "st");
        assert!(commands.contains(&"start".to_owned()) && directive == NO_FILES, "{commands:?}");
        let (options, _) = candidates(&words("list"), "--");
        assert!(options.contains(&"--namespace".to_owned()) && options.contains(&"--all-namespaces".to_owned()));
        assert_eq!(candidates(&words("list -o"), "").0, ["text", "wide", "json", "yaml"]);
        assert_eq!(candidates(&words("stop"), ""), (Vec::new(), NO_FILES));
        assert_eq!(candidates(&words("plan -f"), ""), (Vec::new(), FILES));
        assert_eq!(candidates(&words("none"), ""), (Vec::new(), FILES));
    }
}
