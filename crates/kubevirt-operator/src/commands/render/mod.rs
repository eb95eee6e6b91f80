//! `kubevirt-operator render`: the objects that the operator creates for a Machine, without a cluster.
//!
//! It is the operator's own plan, for a cluster that has every API and contains only what is in the files. So the
//! output cannot differ from what the operator writes.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    process::ExitCode,
};

use clap::Args;
use serde_json::{Value, json};
use vitivirt_api::{
    Body, ObjectKey, Outcome, Stop, Target, Write,
    machine::machine_reason::{NETWORK_CONFIGURATION_NOT_FOUND, SECRET_NOT_FOUND, STORAGE_CLASS_NOT_FOUND},
};
use vitivirt_cli::{CommandResult, FileArguments, OrInvalid, RenderOutput, print_objects, print_warnings};
use vitivirt_machine::{Assessed, warnings};

use super::{
    files::{Files, placeholder_uid},
    neighbours::Neighbours,
    ready_condition,
};

const DEFAULT_NAMESPACE: &str = "default";
/// The reasons of objects that the files do not contain.
const NOT_FOUND: [&str; 3] = [SECRET_NOT_FOUND, NETWORK_CONFIGURATION_NOT_FOUND, STORAGE_CLASS_NOT_FOUND];

#[derive(Debug, Clone, Args)]
pub(crate) struct RenderArguments {
    #[command(flatten)]
    input: FileArguments,
    #[command(flatten)]
    output: RenderOutput,
}

/// Prints objects to standard output and problems to standard error.
pub(crate) fn run(arguments: &RenderArguments) -> CommandResult<ExitCode> {
    let documents = vitivirt_cli::read_manifests(&arguments.input.files)?;
    let namespace = arguments.input.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
    let files = Files::from_documents(&documents, namespace).or_invalid()?;
    print_warnings(&files.warnings);
    let Rendered { objects, problems, warnings, .. } = render(files)?;
    print_warnings(&warnings);
    for problem in &problems {
        eprintln!("error: {problem}");
    }
    print_objects(objects.into_iter().map(Ok), arguments.output.output)?;
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[derive(Default)]
struct Rendered {
    objects: Vec<Value>,
    /// The index of each object, by kind and name.
    positions: BTreeMap<String, usize>,
    problems: Vec<String>,
    warnings: Vec<String>,
}

impl Rendered {
    /// Adds an object once: two Machines on one network share its NetworkAttachmentDefinition.
    fn add(&mut self, object: Value) {
        if let Entry::Vacant(position) = self.positions.entry(name_of(&object)) {
            position.insert(self.objects.len());
            self.objects.push(object);
        }
    }

    fn has_different_version_of(&self, object: &Value) -> bool {
        let present = self.positions.get(&name_of(object)).and_then(|position| self.objects.get(*position));
        present.is_some_and(|other| other != object)
    }
}

fn name_of(object: &Value) -> String {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    format!("{} {}/{}", text("/kind"), text("/metadata/namespace"), text("/metadata/name"))
}

fn render(mut files: Files) -> anyhow::Result<Rendered> {
    for (number, machine) in files.machines.iter_mut().enumerate() {
        machine.metadata.uid.get_or_insert_with(|| placeholder_uid(number));
    }
    let mut neighbours = Neighbours::default();
    files.add_to_neighbours(&mut neighbours);
    let mut rendered = Rendered::default();
    for machine in &files.machines {
        let assessed = Assessed::new(files.observed(machine.clone(), &neighbours)?);
        let identity = ObjectKey::from_metadata(&machine.metadata);
        rendered
            .warnings
            .extend(warnings(&assessed).into_iter().map(|warning| format!("Machine {identity}: {warning}")));
        let plan = vitivirt_machine::plan(&assessed)?;
        let created = plan.steps.iter().flat_map(|step| &step.writes).filter_map(|write| match write {
            Write::Create { target, body } => Some(with_identity(target, body)),
            _ => None,
        });
        let created: Vec<Value> = created.collect();
        let problem = match created.iter().find(|object| rendered.has_different_version_of(object)) {
            Some(object) => Some(format!(
                "NameTaken: another Machine in the files also needs {}; rename one of them",
                name_of(object)
            )),
            None if created.is_empty() => problem(&assessed, &plan),
            None => None,
        };
        match problem {
            Some(problem) => {
                rendered.problems.push(format!("Machine {identity}: {problem}"));
            }
            None => created.into_iter().for_each(|object| rendered.add(object)),
        }
    }
    Ok(rendered)
}

/// The reason and the message of the condition `Ready` that the Machine would have. A missing object may be in the cluster.
fn problem(assessed: &Assessed, plan: &vitivirt_api::Plan) -> Option<String> {
    let report = vitivirt_machine::report(assessed, plan, &Outcome { stop: Stop::Done, written: 0 });
    let status = report.status?.desired;
    let ready = ready_condition(&status)?;
    let is_missing = NOT_FOUND.contains(&ready.reason.as_str());
    let hint = if is_missing { "; render reads only the files: add the object to them, or use plan" } else { "" };
    Some(format!("{}: {}{hint}", ready.reason, ready.message))
}

/// The body with its apiVersion, kind and name, as the executor sends it.
fn with_identity(target: &Target, body: &Body) -> Value {
    let mut object = json!({
        "apiVersion": target.resource.api_version,
        "kind": target.resource.kind,
        "metadata": {"name": target.key.name(), "namespace": target.key.namespace()},
    });
    if let (Value::Object(object), Value::Object(fields)) = (&mut object, body.json().clone()) {
        for (name, value) in fields {
            match (object.get_mut(&name), value) {
                (Some(Value::Object(present)), Value::Object(more)) => present.extend(more),
                (_, value) => {
                    object.insert(name, value);
                }
            }
        }
    }
    // The empty name stands for the default StorageClass, whose name only the cluster knows.
    if let Some(Value::Object(spec)) = object.get_mut("spec")
        && spec.get("storageClassName") == Some(&"".into())
    {
        spec.remove("storageClassName");
    }
    object
}

#[cfg(test)]
mod tests;
