//! `virt-operator plan`: what the operator would do in this cluster for a KubeVirt resource in a file. It reads the
//! cluster and writes nothing. The plan is the operator's own.

use std::{process::ExitCode, sync::Arc, time::SystemTime};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Operation, Plan, Target, Write, kubevirt::KubeVirt};
use vitivirt_cli::{
    ChangeEffect, ClusterArguments, CommandResult, FileArguments, OrInvalid, PlanDocument, PlanOutput, PlanResult,
    PlannedChange, PlannedObject, PlannedWrite, WriteAction,
};
use vitivirt_install::{DeploymentConfig, Desired, Environment, Observed, desired_installation};

use super::{
    cluster::InstallationReader,
    render::{environment, read_kubevirt},
};
use crate::{
    desired::{renew_certificates, timestamp, with_certificates},
    observe::architecture,
};

#[derive(Debug, Clone, Args)]
pub(crate) struct PlanArguments {
    #[command(flatten)]
    input: FileArguments,
    #[command(flatten)]
    cluster: ClusterArguments,
    #[command(flatten)]
    output: PlanOutput,
}

pub(crate) fn run(arguments: &PlanArguments) -> CommandResult<ExitCode> {
    let (given, warnings) = read_kubevirt(&arguments.input)?;
    let environment = environment(std::env::vars()).or_invalid()?;
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    let object = tokio.block_on(plan(&arguments.cluster, &environment, given))?;
    let document = PlanDocument { objects: vec![object], warnings };
    document.print(&arguments.output)?;
    Ok(document.exit_code())
}

async fn plan(cluster: &ClusterArguments, environment: &Environment, given: KubeVirt) -> Result<PlannedObject> {
    let reader = InstallationReader::connect(cluster).await?;
    let key = ObjectKey::from_metadata(&given.metadata);
    let (own, others): (Vec<KubeVirt>, Vec<KubeVirt>) =
        reader.kubevirts().await?.into_iter().partition(|kubevirt| ObjectKey::from_metadata(&kubevirt.metadata) == key);
    let exists = !own.is_empty();
    let kubevirt = as_if_applied(given, own.into_iter().next());
    let config = DeploymentConfig::new(&kubevirt, environment);
    let found = reader.read_state(&config).await?;
    #[expect(clippy::disallowed_methods, reason = "the plan is made for the current time")]
    let now = SystemTime::now();
    let namespace = key.namespace().unwrap_or_default();
    let observed = Observed {
        first_kubevirt: others.first().map(|other| ObjectKey::from_metadata(&other.metadata)),
        operator_namespace: namespace.to_owned(),
        architecture: architecture(),
        now: timestamp(now),
        cluster: found.cluster,
        synchronization_addresses: Vec::new(),
        namespace: reader.namespace(namespace).await?,
        objects: found.objects,
        caches_complete: true,
        crds_with_objects: Default::default(),
        repairs: Arc::default(),
        nodes_held_until: None,
        kubevirt,
    };
    let desired = desired(&observed, environment).unwrap_or_else(Desired::Invalid);
    let plan = vitivirt_install::plan(&observed, &desired)?;
    Ok(planned_object(&observed, &desired, &plan, exists))
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

/// The resource as the API server would have it after `kubectl apply`.
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

fn planned_object(observed: &Observed, desired: &Desired, plan: &Plan, exists: bool) -> PlannedObject {
    let writes: Vec<&Write> = plan.steps.iter().flat_map(|step| &step.writes).collect();
    let problem = vitivirt_install::problem(observed, desired);
    let fine = if writes.is_empty() { "up to date" } else { "no errors found" };
    PlannedObject {
        identity: (&Target::of_kind::<KubeVirt>(ObjectKey::from_metadata(&observed.kubevirt.metadata))).into(),
        exists,
        writes: writes.into_iter().map(|write| planned_write(observed, write)).collect(),
        refused: Vec::new(),
        warnings: vitivirt_install::warnings(
            &observed.kubevirt,
            desired.installation().map(|installation| &**installation),
        ),
        result: PlanResult {
            error: problem.is_some(),
            message: Some(problem.unwrap_or_else(|| fine.to_owned())),
            ..PlanResult::default()
        },
    }
}

fn planned_write(observed: &Observed, write: &Write) -> PlannedWrite {
    let (action, fields) = match write {
        Write::Create { .. } | Write::Lazy { verb: "create", .. } => (WriteAction::Create, Vec::new()),
        Write::Delete { .. } => (WriteAction::Delete, Vec::new()),
        Write::Lazy { .. } | Write::Apply { .. } | Write::Status { .. } => (WriteAction::Update, Vec::new()),
        Write::Patch { operations, .. } => {
            let fields: Vec<String> =
                operations.iter().flat_map(|operation| changed_fields(observed, write, operation)).collect();
            let restarts = fields.iter().any(|field| restarts_pods(field));
            (if restarts { WriteAction::Restart } else { WriteAction::Update }, fields)
        }
    };
    PlannedWrite::new(action, write.target(), fields.into_iter().map(planned_change).collect())
}

fn restarts_pods(field: &str) -> bool {
    field.starts_with("spec.template.")
}

/// Without values: they can be secret.
fn planned_change(field: String) -> PlannedChange {
    let effect = if restarts_pods(&field) { ChangeEffect::Restart } else { ChangeEffect::Live };
    PlannedChange { field, source_field: None, from: None, to: None, effect, reason: None }
}

/// The fields below a replaced field whose values differ.
fn changed_fields(observed: &Observed, write: &Write, operation: &Operation) -> Vec<String> {
    let target = write.target();
    let path = operation.path.trim_start_matches('/').split('/').map(|part| part.replace("~1", "/").replace("~0", "~"));
    let path: Vec<String> = path.collect();
    let live = vitivirt_install::Kind::from_name(&target.resource.kind)
        .and_then(|kind| observed.objects.get(kind, &target.key))
        .and_then(|live| live.content());
    match (&operation.value, live.as_ref().and_then(|live| live.get(path.first()?))) {
        (Some(new), Some(old)) if path.len() == 1 => {
            let mut differences = Vec::new();
            collect_differences(&path.join("."), old, new, &mut differences);
            differences
        }
        _ => vec![path.join(".")],
    }
}

fn collect_differences(path: &str, old: &Value, new: &Value, into: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let nothing = Value::Null;
            // Fields that only the live object has are defaults of the API server.
            for (key, value) in new {
                collect_differences(&format!("{path}.{key}"), old.get(key).unwrap_or(&nothing), value, into);
            }
        }
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() => {
            for (index, (old, new)) in old.iter().zip(new).enumerate() {
                collect_differences(&format!("{path}[{index}]"), old, new, into);
            }
        }
        (old, new) if old != new => into.push(path.to_owned()),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_fields_of_the_desired_object_that_differ_are_listed() {
        let old = json!({"replicas": 2, "template": {"a": [1, {"b": 2}], "defaulted": true}, "same": "x"});
        let new = json!({"replicas": 3, "template": {"a": [1, {"b": 3}]}, "same": "x", "added": [1]});
        let mut fields = Vec::new();
        collect_differences("spec", &old, &new, &mut fields);
        assert_eq!(fields, ["spec.added", "spec.replicas", "spec.template.a[1].b"]);
        let effects: Vec<ChangeEffect> = fields.into_iter().map(|field| planned_change(field).effect).collect();
        assert_eq!(effects, [ChangeEffect::Live, ChangeEffect::Live, ChangeEffect::Restart]);
    }
}
