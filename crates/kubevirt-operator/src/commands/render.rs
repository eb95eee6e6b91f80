//! `kubevirt-operator render`: the objects that a Machine becomes, without a cluster.
//!
//! It is the plan of a Machine in a cluster that has everything and holds nothing but what the files say, so it shows
//! what the operator would write and cannot drift from it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use vitivirt_api::{Body, ObjectKey, Outcome, Stop, Target, Write};
use vitivirt_cli::{print, to_yaml, warn};
use vitivirt_machine::Assessed;

use super::files::{Files, placeholder};
use super::ready_condition;

const DEFAULT_NAMESPACE: &str = "default";

#[derive(Debug, Clone, Args)]
pub(crate) struct RenderArguments {
    /// Files with Machines and what they refer to: NetworkConfigurations, Secrets, StorageClasses; - for standard input
    #[arg(short = 'f', long = "filename", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// How the objects are written
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    #[default]
    Yaml,
    Json,
}

/// Objects on standard output, problems on standard error.
pub(crate) fn run(arguments: &RenderArguments) -> Result<ExitCode> {
    let files = Files::of(&vitivirt_cli::read(&arguments.files)?, DEFAULT_NAMESPACE)?;
    warn(&files.warnings);
    let Rendered { objects, problems, .. } = render(files)?;
    for problem in &problems {
        eprintln!("{problem}");
    }
    if !objects.is_empty() {
        print(&write(&objects, arguments.output)?)?;
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write(objects: &[Value], format: Format) -> Result<String> {
    match format {
        Format::Yaml => to_yaml(objects),
        Format::Json => {
            let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
            Ok(format!("{}\n", serde_json::to_string_pretty(&list)?))
        }
    }
}

#[derive(Default)]
struct Rendered {
    objects: Vec<Value>,
    /// Where each stands, by its name.
    places: BTreeMap<String, usize>,
    problems: Vec<String>,
}

impl Rendered {
    /// Two Machines of one network need one object for it.
    fn add(&mut self, object: Value) {
        if let Entry::Vacant(place) = self.places.entry(name_of(&object)) {
            place.insert(self.objects.len());
            self.objects.push(object);
        }
    }

    fn has_another(&self, object: &Value) -> bool {
        let place = self.places.get(&name_of(object)).and_then(|place| self.objects.get(*place));
        place.is_some_and(|other| other != object)
    }
}

fn name_of(object: &Value) -> String {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    format!("{} {}/{}", text("/kind"), text("/metadata/namespace"), text("/metadata/name"))
}

fn render(mut files: Files) -> Result<Rendered> {
    for (number, machine) in files.machines.iter_mut().enumerate() {
        machine.metadata.uid.get_or_insert_with(|| placeholder(number));
    }
    let mut rendered = Rendered::default();
    for machine in &files.machines {
        let assessed = Assessed::new(files.observed(machine.clone())?);
        let plan = vitivirt_machine::plan(&assessed)?;
        let made = plan.steps.iter().flat_map(|step| &step.writes).filter_map(|write| match write {
            Write::Create { target, body } => Some(complete(target, body)),
            _ => None,
        });
        let made: Vec<Value> = made.collect();
        let problem = match made.iter().find(|object| rendered.has_another(object)) {
            Some(object) => Some(format!("NameTaken: another Machine of the files has a {} too", name_of(object))),
            None if made.is_empty() => problem(&assessed, &plan),
            None => None,
        };
        match problem {
            Some(problem) => rendered.problems.push(format!("Machine {}: {problem}", ObjectKey::of(&machine.metadata))),
            None => made.into_iter().for_each(|object| rendered.add(object)),
        }
    }
    Ok(rendered)
}

/// What the status of the Machine would say.
fn problem(assessed: &Assessed, plan: &vitivirt_api::Plan) -> Option<String> {
    let report = vitivirt_machine::report(assessed, plan, &Outcome { stop: Stop::Done, written: 0 });
    let status = report.status?.desired;
    let ready = ready_condition(&status)?;
    Some(format!("{}: {}", ready.reason, ready.message))
}

/// The body with its kind and its name, as the executor sends it.
fn complete(target: &Target, body: &Body) -> Value {
    let mut object = json!({
        "apiVersion": target.resource.api_version,
        "kind": target.resource.kind,
        "metadata": {"name": target.key.name(), "namespace": target.key.namespace()},
    });
    if let (Value::Object(object), Value::Object(fields)) = (&mut object, body.json().clone()) {
        for (name, value) in fields {
            match (object.get_mut(&name), value) {
                (Some(Value::Object(have)), Value::Object(more)) => have.extend(more),
                (_, value) => {
                    object.insert(name, value);
                }
            }
        }
    }
    // A class without a name is the cluster's default, whose name only the cluster knows.
    if let Some(Value::Object(spec)) = object.get_mut("spec")
        && spec.get("storageClassName") == Some(&"".into())
    {
        spec.remove("storageClassName");
    }
    object
}

#[cfg(test)]
mod tests;
