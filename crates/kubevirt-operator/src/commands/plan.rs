//! `kubevirt-operator plan`: what the operator would write if a file were applied, field by field, and when it would take
//! effect. It reads and writes nothing. It is the operator's own plan over the cluster as it is now.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use vitivirt_api::machine::MachinePhase;
use vitivirt_api::{Outcome, Stop, Write};
use vitivirt_cli::{print, warn};
use vitivirt_machine::changes::{Effect, FieldChange, RejectedChange, changes_of};
use vitivirt_machine::{Assessed, Observed};
use vitivirt_runtime::client::{configuration, connect};
use vitivirt_runtime::metrics::Metrics;

use super::cluster::ClusterReader;
use super::files::Files;
use super::ready_condition;

#[derive(Debug, Clone, Args)]
pub(crate) struct PlanArguments {
    /// Files with Machines, and NetworkConfigurations and Secrets that come with them; - for standard input
    #[arg(short = 'f', long = "filename", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// File that says how to reach the cluster [env: KUBECONFIG; in a pod: its service account]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// For people (text) or for programs (json)
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    #[default]
    Text,
    Json,
}

const BOLD: &str = "1";
const FAINT: &str = "2";
const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";

/// What would become of one Machine.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Planned {
    machine: String,
    exists: bool,
    writes: Vec<PlannedWrite>,
    /// What of the file can never become true.
    refused: Vec<RejectedChange>,
    /// What its status would say now.
    phase: String,
    ready: bool,
    /// Something is wrong; otherwise it only takes its time.
    error: bool,
    reason: String,
    message: String,
}

#[derive(Debug, Serialize)]
struct PlannedWrite {
    action: &'static str,
    kind: String,
    name: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    changes: Vec<FieldChange>,
}

pub(crate) fn run(arguments: &PlanArguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    let planned = runtime.block_on(plan(arguments))?;
    match arguments.output {
        Format::Json => print(&format!("{}\n", serde_json::to_string_pretty(&planned)?))?,
        Format::Text => print(&text(&planned, std::io::stdout().is_terminal()))?,
    }
    let wrong = planned.iter().any(|machine| machine.error || !machine.refused.is_empty());
    Ok(if wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn plan(arguments: &PlanArguments) -> Result<Vec<Planned>> {
    let documents = vitivirt_cli::read(&arguments.files)?;
    let config = configuration(arguments.kubeconfig.as_deref()).await?;
    let files = Files::of(&documents, &config.default_namespace)?;
    warn(&files.warnings);
    let agent = concat!("kubevirt-operator/", env!("CARGO_PKG_VERSION"));
    let clients = connect(&config, agent, None, &Arc::new(Metrics::new("plan")))?;
    let live = ClusterReader::new(clients.rate_limited);
    let mut planned = Vec::new();
    for given in &files.machines {
        let (machine, exists) = live.machine(given.clone()).await?;
        let mut observed = live.observe(machine).await?;
        files.add_to(&mut observed);
        planned.push(planned_machine(&Assessed::new(observed), exists)?);
    }
    Ok(planned)
}

fn planned_machine(assessed: &Assessed, exists: bool) -> Result<Planned> {
    let observed = assessed.observed();
    let plan = vitivirt_machine::plan(assessed)?;
    let writes = plan.steps.iter().flat_map(|step| &step.writes).map(|write| planned_write(observed, write)).collect();
    let report = vitivirt_machine::report(assessed, &plan, &Outcome { stop: Stop::Done, written: 0 });
    let error = report.error.is_some();
    let status = report.status.map(|status| status.desired).unwrap_or_default();
    let ready = ready_condition(&status);
    Ok(Planned {
        machine: observed.id.key().to_string(),
        exists,
        writes,
        refused: assessed.assessment().rejected_changes.clone(),
        phase: status.phase.map(MachinePhase::as_str).unwrap_or_default().to_owned(),
        ready: ready.is_some_and(|ready| ready.status == "True"),
        error,
        reason: ready.map(|ready| ready.reason.clone()).unwrap_or_default(),
        message: ready.map(|ready| ready.message.clone()).unwrap_or_default(),
    })
}

fn planned_write(observed: &Observed, write: &Write) -> PlannedWrite {
    let target = write.target();
    let action = match write {
        Write::Create { .. } => "create",
        Write::Delete { .. } => "delete",
        Write::Apply { .. } | Write::Patch { .. } | Write::Lazy { .. } | Write::Status { .. } => "change",
    };
    let changes = changes_of(observed, write);
    PlannedWrite { action, kind: target.resource.kind.clone(), name: target.key.name().to_owned(), changes }
}

fn text(planned: &[Planned], colour: bool) -> String {
    let mut out = String::new();
    let paint = |code: &str, words: &str| if colour { format!("\x1b[{code}m{words}\x1b[0m") } else { words.to_owned() };
    for machine in planned {
        let what = if machine.exists { "exists" } else { "does not exist yet" };
        let _ = writeln!(out, "{}", paint(BOLD, &format!("Machine {} ({what})", machine.machine)));
        for write in &machine.writes {
            let (sign, code) = match write.action {
                "create" => ("+", GREEN),
                "delete" => ("-", RED),
                _ => ("~", YELLOW),
            };
            let _ =
                writeln!(out, "  {}", paint(code, &format!("{sign} {} {} {}", write.action, write.kind, write.name)));
            for change in &write.changes {
                let _ = writeln!(out, "      {}", line(change));
                let of = change.machine_field.as_deref().map(|field| format!("{field}: ")).unwrap_or_default();
                let _ = writeln!(out, "        {}", paint(FAINT, &format!("{of}{}", change.why)));
            }
        }
        for refusal in &machine.refused {
            let _ = writeln!(out, "  {}", paint(RED, &format!("! refused {}: {}", refusal.field, refusal.reason)));
        }
        if machine.writes.is_empty() {
            let _ = writeln!(out, "  nothing to write");
        }
        let code = match (machine.ready, machine.error) {
            (true, _) => GREEN,
            (false, true) => RED,
            (false, false) => YELLOW,
        };
        let state = paint(code, if machine.ready { "Ready" } else { &machine.reason });
        let _ = writeln!(out, "  → phase {}, {state}: {}", machine.phase, machine.message);
    }
    out
}

fn line(change: &FieldChange) -> String {
    let when = match change.effect {
        Effect::Live => "live",
        Effect::LiveIfPossible => "live where KubeVirt can plug it in, else at restart",
        Effect::Restart => "at restart",
        Effect::Refused => "refused",
    };
    match (&change.from, &change.to) {
        (None, None) => format!("{} ({when})", change.field),
        (None, Some(to)) => format!("{}: {to} ({when})", change.field),
        (Some(from), None) => format!("{}: {from} is removed ({when})", change.field),
        (Some(from), Some(to)) => format!("{}: {from} → {to} ({when})", change.field),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn planned() -> Planned {
        let change = |field: &str, of: &str, from: Value, to: Value, effect| FieldChange {
            field: field.to_owned(),
            machine_field: Some(of.to_owned()),
            from: Some(from),
            to: Some(to),
            effect,
            why: "because",
        };
        Planned {
            machine: "ns/web".to_owned(),
            exists: true,
            writes: vec![PlannedWrite {
                action: "change",
                kind: "VirtualMachine".to_owned(),
                name: "web".to_owned(),
                changes: vec![
                    change("spec.runStrategy", "spec.powerState", json!("Always"), json!("Halted"), Effect::Live),
                    change("spec.x.cores", "spec.resources.cpu.cores", json!(1), json!(4), Effect::Restart),
                ],
            }],
            refused: vec![RejectedChange {
                field: "spec.disks[root].size".to_owned(),
                reason: "it cannot shrink".to_owned(),
            }],
            phase: "Running".to_owned(),
            ready: true,
            error: false,
            reason: "Running".to_owned(),
            message: "Machine is running".to_owned(),
        }
    }

    #[test]
    fn people_read_every_field_and_every_refusal() {
        let expected = "\
Machine ns/web (exists)
  ~ change VirtualMachine web
      spec.runStrategy: \"Always\" → \"Halted\" (live)
        spec.powerState: because
      spec.x.cores: 1 → 4 (at restart)
        spec.resources.cpu.cores: because
  ! refused spec.disks[root].size: it cannot shrink
  → phase Running, Ready: Machine is running
";
        assert_eq!(text(&[planned()], false), expected);
        let coloured = text(&[planned()], true);
        let plain: String =
            coloured.split('\x1b').map(|part| part.split_once('m').map_or(part, |(_, rest)| rest)).collect();
        assert!(coloured.contains("\x1b[31m! refused") && plain.contains("! refused"), "{coloured}");
    }

    #[test]
    fn programs_read_the_same() {
        let json = serde_json::to_value([planned()]).unwrap();
        assert_eq!(json[0]["writes"][0]["changes"][1]["effect"], "restart");
        assert_eq!(json[0]["writes"][0]["changes"][1]["machineField"], "spec.resources.cpu.cores");
        assert_eq!(json[0]["refused"][0]["field"], "spec.disks[root].size");
        assert_eq!((&json[0]["phase"], &json[0]["ready"]), (&json!("Running"), &json!(true)));
    }
}
