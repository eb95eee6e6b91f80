//! `kubevirt-operator plan`: what the operator would write if a file were applied, field by field, and when it would take
//! effect. It reads and writes nothing. It is the operator's own plan over the cluster as it is now.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use api::machine::condition_type;
use api::{ObjectKey, Outcome, Stop, Target, Write};
use clap::{Args, ValueEnum};
use machine::Observed;
use runtime::client::{configuration, connect};
use runtime::metrics::Metrics;
use serde::Serialize;
use serde_json::Value;

use super::live::Live;
use super::render::machines_of;

#[derive(Debug, Clone, Args)]
pub(crate) struct PlanArguments {
    /// Files with Machines; - for standard input
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

/// What would become of one Machine.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Planned {
    machine: String,
    exists: bool,
    writes: Vec<PlannedWrite>,
    /// What its status would say now.
    phase: String,
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

#[derive(Debug, PartialEq, Serialize)]
struct FieldChange {
    field: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<Value>,
    effect: Effect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Effect {
    /// At once.
    Live,
    /// At once where KubeVirt can plug it in, else at the next start.
    LiveIfPossible,
    /// When the guest is started the next time.
    Restart,
}

pub(crate) fn run(arguments: &PlanArguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    let planned = runtime.block_on(plan(arguments))?;
    match arguments.output {
        Format::Json => println!("{}", serde_json::to_string_pretty(&planned)?),
        Format::Text => print!("{}", text(&planned, std::io::stdout().is_terminal())),
    }
    Ok(ExitCode::SUCCESS)
}

async fn plan(arguments: &PlanArguments) -> Result<Vec<Planned>> {
    let config = configuration(arguments.kubeconfig.as_deref()).await?;
    let agent = concat!("kubevirt-operator/", env!("CARGO_PKG_VERSION"));
    let clients = connect(&config, agent, None, &Arc::new(Metrics::new("plan")))?;
    let live = Live::new(clients.ordinary);
    let mut planned = Vec::new();
    for given in machines_of(&arguments.files, &config.default_namespace)? {
        let (machine, exists) = live.machine(given).await?;
        let observed = live.observe(machine).await?;
        planned.push(one(&observed, exists));
    }
    Ok(planned)
}

fn one(observed: &Observed, exists: bool) -> Planned {
    let plan = machine::plan(observed);
    let writes = plan.steps.iter().flat_map(|step| &step.writes).map(|write| planned_write(observed, write)).collect();
    let report = machine::report(observed, &plan, &Outcome { stop: Stop::Done, written: 0 });
    let status = report.status.map(|status| status.desired).unwrap_or_default();
    let conditions = status.get("conditions").and_then(Value::as_array);
    let ready =
        conditions.and_then(|all| all.iter().find(|have| have.get("type") == Some(&condition_type::READY.into())));
    let words = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    Planned {
        machine: ObjectKey::of(&observed.machine.metadata).to_string(),
        exists,
        writes,
        phase: words(status.get("phase")),
        reason: words(ready.and_then(|ready| ready.get("reason"))),
        message: words(ready.and_then(|ready| ready.get("message"))),
    }
}

fn planned_write(observed: &Observed, write: &Write) -> PlannedWrite {
    let target = write.target();
    let (action, changes) = match write {
        Write::Create { .. } => ("create", Vec::new()),
        Write::Delete { .. } => ("delete", Vec::new()),
        Write::Apply { .. } | Write::Status { .. } => {
            ("change", vec![change("metadata.finalizers", None, None, Effect::Live)])
        }
        Write::Patch { operations, .. } => {
            let all = operations
                .iter()
                .flat_map(|operation| changes_of(observed, target, &operation.path, operation.value.as_ref()));
            ("change", all.collect())
        }
    };
    PlannedWrite { action, kind: target.resource.kind.clone(), name: target.key.name().to_owned(), changes }
}

fn changes_of(observed: &Observed, target: &Target, pointer: &str, to: Option<&Value>) -> Vec<FieldChange> {
    let field = pointer.trim_start_matches('/').replace('/', ".").replace("~1", "/").replace("~0", "~");
    match (target.resource.kind.as_str(), pointer.strip_prefix("/spec")) {
        // What is in it is nobody's business here.
        ("Secret", _) => vec![change(&field, None, None, Effect::Restart)],
        ("VirtualMachine", Some(inner)) => {
            let before = observed.vm.as_ref().and_then(|vm| vm.spec.pointer(inner));
            let mut changes = Vec::new();
            differences(&field, before, to, &mut changes);
            changes
        }
        _ => vec![change(&field, None, to.cloned(), Effect::Live)],
    }
}

fn change(field: &str, from: Option<Value>, to: Option<Value>, effect: Effect) -> FieldChange {
    FieldChange { field: field.to_owned(), from, to, effect }
}

/// The leaves that differ. Things in lists are known by their names, as KubeVirt knows them.
fn differences(path: &str, from: Option<&Value>, to: Option<&Value>, found: &mut Vec<FieldChange>) {
    if from == to {
        return;
    }
    match (from, to) {
        (Some(Value::Object(from)), Some(Value::Object(to))) => {
            let mut names: Vec<&String> = from.keys().chain(to.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                differences(&format!("{path}.{name}"), from.get(name), to.get(name), found);
            }
        }
        (Some(Value::Array(from)), Some(Value::Array(to))) if named(from) && named(to) => {
            let find = |list: &'_ [Value], name: &str| list.iter().find(|item| name_of(item) == Some(name)).cloned();
            let mut names: Vec<&str> = from.iter().chain(to).filter_map(name_of).collect();
            names.sort_unstable();
            names.dedup();
            for name in names {
                let place = format!("{path}[{name}]");
                differences(&place, find(from, name).as_ref(), find(to, name).as_ref(), found);
            }
        }
        (from, to) => found.push(change(path, from.cloned(), to.cloned(), effect(path))),
    }
}

fn named(list: &[Value]) -> bool {
    list.iter().all(|item| name_of(item).is_some())
}

fn name_of(item: &Value) -> Option<&str> {
    item.get("name")?.as_str()
}

/// What KubeVirt does with a changed field of a VirtualMachine whose guest runs.
fn effect(path: &str) -> Effect {
    match path {
        "spec.runStrategy" => Effect::Live,
        "spec.template.spec.domain.cpu.sockets" | "spec.template.spec.domain.memory.guest" => Effect::LiveIfPossible,
        _ => Effect::Restart,
    }
}

fn text(planned: &[Planned], colour: bool) -> String {
    let mut out = String::new();
    let paint = |code: &str, words: &str| if colour { format!("\x1b[{code}m{words}\x1b[0m") } else { words.to_owned() };
    for machine in planned {
        let what = if machine.exists { "exists" } else { "does not exist yet" };
        let _ = writeln!(out, "Machine {} ({what})", machine.machine);
        for write in &machine.writes {
            let (sign, code) = match write.action {
                "create" => ("+", "32"),
                "delete" => ("-", "31"),
                _ => ("~", "33"),
            };
            let _ =
                writeln!(out, "  {}", paint(code, &format!("{sign} {} {} {}", write.action, write.kind, write.name)));
            for change in &write.changes {
                let _ = writeln!(out, "      {}", line(change));
            }
        }
        if machine.writes.is_empty() {
            let _ = writeln!(out, "  nothing to write");
        }
        let _ = writeln!(out, "  {}: {} {}", machine.phase, machine.reason, machine.message);
    }
    out
}

fn line(change: &FieldChange) -> String {
    let when = match change.effect {
        Effect::Live => "live",
        Effect::LiveIfPossible => "live where KubeVirt can plug it in, else at restart",
        Effect::Restart => "at restart",
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
    use serde_json::json;

    #[test]
    fn fields_are_told_one_by_one() {
        let before = json!({"runStrategy": "Always", "template": {"spec": {
            "domain": {"cpu": {"cores": 2, "sockets": 1}, "memory": {"guest": "4Gi"}},
            "volumes": [{"name": "root", "x": 1}, {"name": "gone", "x": 1}],
        }}});
        let after = json!({"runStrategy": "Halted", "template": {"spec": {
            "domain": {"cpu": {"cores": 4, "sockets": 1}, "memory": {"guest": "8Gi"}},
            "volumes": [{"name": "new", "x": 1}, {"name": "root", "x": 2}],
        }}});
        let mut changes = Vec::new();
        differences("spec", Some(&before), Some(&after), &mut changes);
        let lines: Vec<String> = changes.iter().map(line).collect();
        let expected = [
            "spec.runStrategy: \"Always\" → \"Halted\" (live)",
            "spec.template.spec.domain.cpu.cores: 2 → 4 (at restart)",
            "spec.template.spec.domain.memory.guest: \"4Gi\" → \"8Gi\" (live where KubeVirt can plug it in, else at restart)",
            "spec.template.spec.volumes[gone]: {\"name\":\"gone\",\"x\":1} is removed (at restart)",
            "spec.template.spec.volumes[new]: {\"name\":\"new\",\"x\":1} (at restart)",
            "spec.template.spec.volumes[root].x: 1 → 2 (at restart)",
        ];
        assert_eq!(lines, expected);
    }
}
