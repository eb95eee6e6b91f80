//! `kubevirt-operator render`: the objects that a Machine becomes, without a cluster.
//!
//! It is the plan of a Machine in a cluster that has everything and holds nothing but what the files say, so it shows
//! what the operator would write and cannot drift from it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use api::machine::{Machine, NetworkConfiguration, condition_type};
use api::{Body, ObjectKey, Outcome, Stop, Target, Write};
use clap::{Args, ValueEnum};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use machine::Observed;
use machine::observed::{Installed, NetworkView, SourceView, StorageClassView};
use machine::render::cloud_init::SecretBytes;
use machine::resolve::SecretSource;
use serde_json::{Value, json};

use crate::manifests::yaml;

/// Stands for what only a cluster gives.
const PLACEHOLDER_UID: &str = "00000000-0000-0000-0000-000000000000";
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
    let mut documents = Vec::new();
    for file in &arguments.files {
        documents.extend(parse(&read(file)?).with_context(|| format!("reading {}", file.display()))?);
    }
    let Rendered { objects, problems } = render(documents)?;
    if !objects.is_empty() {
        print!("{}", write(&objects, arguments.output)?);
    }
    for problem in &problems {
        eprintln!("{problem}");
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The Machines of files; one that names no namespace is meant for `namespace`.
pub(super) fn machines_of(files: &[PathBuf], namespace: &str) -> Result<Vec<Machine>> {
    let mut machines = Vec::new();
    for file in files {
        let documents = parse(&read(file)?).with_context(|| format!("reading {}", file.display()))?;
        for document in documents.into_iter().filter(|document| document.get("kind") == Some(&"Machine".into())) {
            let mut machine: Machine = serde_json::from_value(document)
                .with_context(|| format!("a Machine of {} cannot be read", file.display()))?;
            machine.metadata.namespace.get_or_insert_with(|| namespace.to_owned());
            machines.push(machine);
        }
    }
    if machines.is_empty() {
        bail!("there is no Machine in the files");
    }
    Ok(machines)
}

fn read(file: &Path) -> Result<String> {
    if file == Path::new("-") {
        return std::io::read_to_string(std::io::stdin()).context("reading standard input");
    }
    std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))
}

fn parse(text: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(text).map_err(|error| anyhow::anyhow!("not YAML: {error}"))?;
    Ok(documents.into_iter().filter(|document| !document.is_null()).collect())
}

fn write(objects: &[Value], format: Format) -> Result<String> {
    match format {
        Format::Yaml => yaml(objects),
        Format::Json => {
            let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
            Ok(format!("{}\n", serde_json::to_string_pretty(&list)?))
        }
    }
}

struct Rendered {
    objects: Vec<Value>,
    problems: Vec<String>,
}

fn render(documents: Vec<Value>) -> Result<Rendered> {
    let files = Files::of(documents)?;
    if files.machines.is_empty() {
        bail!("there is no Machine in the files");
    }
    let mut rendered = Rendered { objects: Vec::new(), problems: Vec::new() };
    for machine in &files.machines {
        let observed = files.observed(machine.clone());
        let plan = machine::plan(&observed);
        let made = plan.steps.iter().flat_map(|step| &step.writes).filter_map(|write| match write {
            Write::Create { target, body } => Some(complete(target, body)),
            _ => None,
        });
        let before = rendered.objects.len();
        // Two Machines of one network need one object for it.
        made.for_each(|object| {
            if !rendered.objects.contains(&object) {
                rendered.objects.push(object);
            }
        });
        if rendered.objects.len() == before {
            let sentence = problem(&observed, &plan).unwrap_or_else(|| "there is nothing to make of it".to_owned());
            rendered.problems.push(format!("Machine {}: {sentence}", ObjectKey::of(&machine.metadata)));
        }
    }
    Ok(rendered)
}

/// What the status of the Machine would say.
fn problem(observed: &Observed, plan: &api::Plan) -> Option<String> {
    let report = machine::report(observed, plan, &Outcome { stop: Stop::Done, written: 0 });
    let status = report.status?.desired;
    let ready =
        status.get("conditions")?.as_array()?.iter().find(|have| have["type"] == condition_type::READY)?.clone();
    Some(format!("{}: {}", ready.get("reason")?.as_str()?, ready.get("message")?.as_str()?))
}

/// What the files say.
struct Files {
    machines: Vec<Machine>,
    networks: BTreeMap<ObjectKey, NetworkConfiguration>,
    secrets: BTreeMap<ObjectKey, Secret>,
    classes: Vec<StorageClass>,
}

impl Files {
    fn of(documents: Vec<Value>) -> Result<Self> {
        let mut files =
            Files { machines: Vec::new(), networks: BTreeMap::new(), secrets: BTreeMap::new(), classes: Vec::new() };
        for mut document in documents {
            let kind = document.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
            if kind != "StorageClass"
                && let Some(Value::Object(metadata)) = document.get_mut("metadata")
            {
                metadata.entry("namespace").or_insert_with(|| DEFAULT_NAMESPACE.into());
                metadata.entry("uid").or_insert_with(|| PLACEHOLDER_UID.into());
            }
            let what = || format!("a document of kind {kind:?} cannot be read");
            match kind.as_str() {
                "Machine" => files.machines.push(serde_json::from_value(document).with_context(what)?),
                "NetworkConfiguration" => {
                    let network: NetworkConfiguration = serde_json::from_value(document).with_context(what)?;
                    files.networks.insert(ObjectKey::of(&network.metadata), network);
                }
                "Secret" => {
                    // The error could quote the data.
                    let Ok(secret) = serde_json::from_value::<Secret>(document) else { bail!("{}", what()) };
                    files.secrets.insert(ObjectKey::of(&secret.metadata), secret);
                }
                "StorageClass" => files.classes.push(serde_json::from_value(document).with_context(what)?),
                other => bail!(
                    "a document is of kind {other:?}; Machine, NetworkConfiguration, Secret and StorageClass are understood"
                ),
            }
        }
        Ok(files)
    }

    fn observed(&self, machine: Machine) -> Observed {
        let key = ObjectKey::of(&machine.metadata);
        let beside = |name: &str| ObjectKey::namespaced(key.namespace().unwrap_or_default(), name);
        let networks = machine.spec.networks.iter().filter_map(|network| {
            let found = self.networks.get(&beside(&network.network_name))?;
            Some((network.network_name.clone(), network_view(found)))
        });
        Observed {
            networks: networks.collect(),
            installed: Installed { kubevirt: true, multus: true, cdi: true },
            storage_classes: self.classes(&machine),
            source: self.source(&machine, beside),
            attachments: BTreeMap::new(),
            secret: None,
            claims: BTreeMap::new(),
            import_sources: BTreeMap::new(),
            vm: None,
            vmi: None,
            macs_in_use: BTreeMap::new(),
            now: Timestamp::UNIX_EPOCH,
            machine,
        }
    }

    /// If the files name no class, every class that the Machine names exists, and a default class without a name.
    fn classes(&self, machine: &Machine) -> Vec<StorageClassView> {
        let view = |name: &str, is_default: bool| StorageClassView {
            name: name.to_owned(),
            is_default,
            waits_for_consumer: false,
            expands: true,
        };
        if self.classes.is_empty() {
            let named = machine.spec.disks.iter().filter_map(|disk| disk.storage_class.as_deref());
            let named = named.filter(|name| *name != "default").map(|name| view(name, false));
            return named.chain([view("", true)]).collect();
        }
        let is_default = |class: &StorageClass| {
            let annotations = class.metadata.annotations.as_ref();
            let value = annotations.and_then(|all| all.get("storageclass.kubernetes.io/is-default-class"));
            value.is_some_and(|value| value == "true")
        };
        self.classes
            .iter()
            .map(|class| view(class.metadata.name.as_deref().unwrap_or_default(), is_default(class)))
            .collect()
    }

    fn source(&self, machine: &Machine, beside: impl Fn(&str) -> ObjectKey) -> SourceView {
        let reference = machine.spec.cloud_init.as_ref().and_then(|given| given.secret_ref.as_ref());
        let Some(source) = reference.map(SecretSource::from) else { return SourceView::NotNeeded };
        let Some(secret) = self.secrets.get(&beside(&source.name)) else { return SourceView::SecretMissing };
        let text =
            secret.string_data.as_ref().and_then(|data| data.get(&source.key)).map(|text| text.clone().into_bytes());
        let bytes = secret.data.as_ref().and_then(|data| data.get(&source.key)).map(|bytes| bytes.0.clone());
        text.or(bytes).map_or(SourceView::KeyMissing, |bytes| SourceView::Read(SecretBytes(bytes)))
    }
}

fn network_view(network: &NetworkConfiguration) -> NetworkView {
    NetworkView {
        uid: network.metadata.uid.clone().unwrap_or_default(),
        vlan: network.spec.vlan,
        bridge: network.spec.bridge.clone(),
        protected: true,
        deleting: false,
        other_users: false,
    }
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
