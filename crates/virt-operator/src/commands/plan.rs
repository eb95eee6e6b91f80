//! `virt-operator plan`: what the operator would do in this cluster for a KubeVirt resource in a file. It decides with
//! the operator's own code, and writes nothing.

use std::{
    collections::BTreeMap, fmt::Write as _, io::IsTerminal, path::PathBuf, process::ExitCode, sync::Arc,
    time::SystemTime,
};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Operation, Plan, Write, kubevirt::KubeVirt};
use vitivirt_cli::print;
use vitivirt_install::{DeploymentConfig, Desired, Environment, Observed, desired_installation};

use super::{
    cluster::Reader,
    render::{environment, read},
};
use crate::{
    desired::{renew_certificates, timestamp, with_certificates},
    observe::architecture,
};

#[derive(Debug, Clone, Args)]
pub(crate) struct PlanArguments {
    /// File with the KubeVirt resource; - for standard input
    #[arg(short = 'f', long = "filename", value_name = "FILE")]
    file: PathBuf,
    /// How the plan is written
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
    /// File that says how to reach the cluster [env: KUBECONFIG]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    #[default]
    Text,
    Json,
}

#[derive(Debug, Serialize)]
struct Planned {
    writes: Vec<PlannedWrite>,
    /// What is wrong with the resource, or with this cluster for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    warnings: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct PlannedWrite {
    action: &'static str,
    kind: String,
    name: String,
    /// Where it differs, without values: they may be secret.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    fields: Vec<String>,
}

pub(crate) fn run(arguments: &PlanArguments) -> Result<ExitCode> {
    let given = read(&arguments.file)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    let planned = runtime.block_on(plan(arguments, given))?;
    match arguments.output {
        Format::Json => print(&format!("{}\n", serde_json::to_string_pretty(&planned)?))?,
        Format::Text => print(&text(&planned, std::io::stdout().is_terminal()))?,
    }
    Ok(if planned.problem.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn plan(arguments: &PlanArguments, given: KubeVirt) -> Result<Planned> {
    let reader = Reader::connect(arguments.kubeconfig.as_deref()).await?;
    let environment = environment(std::env::vars())?;
    let key = ObjectKey::of(&given.metadata);
    let (own, others): (Vec<KubeVirt>, Vec<KubeVirt>) =
        reader.kubevirts().await?.into_iter().partition(|kubevirt| ObjectKey::of(&kubevirt.metadata) == key);
    let kubevirt = as_if_applied(given, own.into_iter().next());
    let config = DeploymentConfig::new(&kubevirt, &environment);
    let found = reader.find(&config).await?;
    let now = SystemTime::now();
    let namespace = key.namespace().unwrap_or_default();
    let observed = Observed {
        first_kubevirt: others.first().map(|other| ObjectKey::of(&other.metadata)),
        operator_namespace: namespace.to_owned(),
        architecture: architecture(),
        now: timestamp(now),
        cluster: found.cluster,
        synchronization_addresses: Vec::new(),
        namespace: reader.namespace(namespace).await?,
        objects: found.objects,
        caches_complete: true,
        crds_with_objects: Default::default(),
        kubevirt,
    };
    let desired = desired(&observed, &environment).unwrap_or_else(Desired::Invalid);
    let plan = vitivirt_install::plan(&observed, &desired)?;
    Ok(planned(&observed, &desired, &plan))
}

/// As the operator computes it, but with the install strategy of another release always pending.
fn desired(observed: &Observed, environment: &Environment) -> Result<Desired, Failure> {
    let Some(installation) = desired_installation(observed, environment, None)? else {
        let config = DeploymentConfig::new(&observed.kubevirt, environment);
        return Ok(Desired::StrategyPending(Arc::new(config)));
    };
    let certificates = renew_certificates(&installation, observed)?;
    Ok(with_certificates(Arc::new(installation), certificates, Arc::default()))
}

/// The resource as the server would have it after `kubectl apply`.
fn as_if_applied(mut given: KubeVirt, live: Option<KubeVirt>) -> KubeVirt {
    if let Some(live) = live {
        let changed = live.spec != given.spec;
        given.metadata = live.metadata;
        given.status = live.status;
        given.metadata.generation = given.metadata.generation.map(|generation| generation + i64::from(changed));
    } else {
        given.metadata.uid.get_or_insert_default();
        given.metadata.generation = Some(1);
    }
    given
}

fn planned(observed: &Observed, desired: &Desired, plan: &Plan) -> Planned {
    let problem = vitivirt_install::problem(observed, desired);
    let installation = desired.installation().map(|installation| &**installation);
    Planned {
        writes: plan.steps.iter().flat_map(|step| &step.writes).map(|write| describe(observed, write)).collect(),
        problem,
        warnings: vitivirt_install::warnings(&observed.kubevirt, installation),
    }
}

fn describe(observed: &Observed, write: &Write) -> PlannedWrite {
    let target = write.target();
    let (action, fields) = match write {
        Write::Create { .. } => ("create", Vec::new()),
        Write::Delete { .. } => ("delete", Vec::new()),
        Write::Lazy { verb, .. } => (if *verb == "create" { "create" } else { "change" }, Vec::new()),
        Write::Apply { .. } | Write::Status { .. } => ("change", Vec::new()),
        Write::Patch { operations, .. } => {
            let fields: Vec<String> =
                operations.iter().flat_map(|operation| fields(observed, write, operation)).collect();
            let restarts = fields.iter().any(|field| field.starts_with("spec.template."));
            (if restarts { "restart" } else { "change" }, fields)
        }
    };
    PlannedWrite { action, kind: target.resource.kind.clone(), name: target.key.to_string(), fields }
}

/// The places below a replaced field at which something really differs.
fn fields(observed: &Observed, write: &Write, operation: &Operation) -> Vec<String> {
    let target = write.target();
    let place =
        operation.path.trim_start_matches('/').split('/').map(|part| part.replace("~1", "/").replace("~0", "~"));
    let place: Vec<String> = place.collect();
    let live = vitivirt_install::Kind::from_name(&target.resource.kind)
        .and_then(|kind| observed.objects.get(kind, &target.key))
        .and_then(|live| live.content());
    match (&operation.value, live.as_ref().and_then(|live| live.get(place.first()?))) {
        (Some(new), Some(old)) if place.len() == 1 => {
            let mut differences = Vec::new();
            differing(&place.join("."), old, new, &mut differences);
            differences
        }
        _ => vec![place.join(".")],
    }
}

fn differing(path: &str, old: &Value, new: &Value, into: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let nothing = Value::Null;
            // What only the server has it has by default.
            for (key, value) in new {
                differing(&format!("{path}.{key}"), old.get(key).unwrap_or(&nothing), value, into);
            }
        }
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() => {
            for (index, (old, new)) in old.iter().zip(new).enumerate() {
                differing(&format!("{path}[{index}]"), old, new, into);
            }
        }
        (old, new) if old != new => into.push(path.to_owned()),
        _ => {}
    }
}

const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";

fn text(planned: &Planned, colour: bool) -> String {
    let paint = |code: &str, text: &str| match colour {
        true => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
        false => text.to_owned(),
    };
    let mut out = String::new();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for write in &planned.writes {
        *counts.entry(write.action).or_default() += 1;
        let code = match write.action {
            "create" => GREEN,
            "delete" | "restart" => RED,
            _ => YELLOW,
        };
        let _ = writeln!(out, "{:>8} {} {}", paint(code, write.action), write.kind, write.name);
        for field in &write.fields {
            let _ = writeln!(out, "           {field}");
        }
    }
    for warning in &planned.warnings {
        let _ = writeln!(out, "{} {warning}", paint(YELLOW, "warning:"));
    }
    match &planned.problem {
        Some(problem) => {
            let _ = writeln!(out, "{} {problem}", paint(RED, "problem:"));
        }
        None if planned.writes.is_empty() => out.push_str("Nothing would change.\n"),
        None => {
            let counts: Vec<String> = counts.iter().map(|(action, count)| format!("{count} to {action}")).collect();
            let _ = writeln!(out, "{}.", counts.join(", "));
        }
    }
    out
}
