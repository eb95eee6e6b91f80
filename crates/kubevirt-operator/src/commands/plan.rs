//! `kubevirt-operator plan`: what the operator would write if a file were applied, field by field, and when it would
//! take effect. It reads the cluster and writes nothing. The plan is the operator's own, for the cluster as it is now.

use std::{collections::BTreeSet, process::ExitCode, sync::Arc};

use anyhow::{Context, anyhow};
use clap::Args;
use vitivirt_api::{
    Outcome, Stop, Target, Write,
    machine::{Machine, MachinePhase, MachineStatus, machine_reason},
};
use vitivirt_cli::{
    ChangeEffect, ClusterArguments, CommandError, CommandResult, FileArguments, OrInvalid, PlanDocument, PlanOutput,
    PlanResult, PlannedChange, PlannedObject, PlannedWrite, RefusedField, WriteAction,
};
use vitivirt_machine::{
    Assessed, Observed,
    changes::{Effect, FieldChange, changes_of},
    resolve::PowerState,
};
use vitivirt_runtime::{
    client::{configuration, connect},
    metrics::Metrics,
};

use super::{cluster::ClusterReader, files::Files, ready_condition};

#[derive(Debug, Clone, Args)]
pub struct PlanArguments {
    #[command(flatten)]
    input: FileArguments,
    #[command(flatten)]
    cluster: ClusterArguments,
    #[command(flatten)]
    output: PlanOutput,
}

pub fn run(arguments: &PlanArguments) -> CommandResult<ExitCode> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    let document = tokio.block_on(plan(arguments))?;
    document.print(&arguments.output)?;
    Ok(document.exit_code())
}

async fn plan(arguments: &PlanArguments) -> CommandResult<PlanDocument> {
    let documents = vitivirt_cli::read_manifests(&arguments.input.files)?;
    let cluster = &arguments.cluster;
    let config = configuration(cluster.kubeconfig.as_deref(), cluster.context.as_deref()).await;
    let config = config.map_err(anyhow::Error::from)?;
    let namespace = arguments.input.namespace.as_deref().unwrap_or(&config.default_namespace);
    let mut files = Files::from_documents(&documents, namespace).or_invalid()?;
    let agent = concat!("kubevirt-operator/", env!("CARGO_PKG_VERSION"));
    let clients = connect(&config, agent, None, &Arc::new(Metrics::new("plan"))).map_err(anyhow::Error::from)?;
    let reader = ClusterReader::new(clients.rate_limited);
    let mut exists = Vec::new();
    for (position, machine) in files.machines.iter_mut().enumerate() {
        exists.push(reader.complete(machine, position).await?);
    }
    // An existing Machine is in a namespace that exists.
    let new = files.machines.iter().zip(&exists).filter(|(_, exists)| !**exists);
    let namespaces: BTreeSet<&str> = new.filter_map(|(machine, _)| machine.metadata.namespace.as_deref()).collect();
    for namespace in namespaces {
        if !files.namespaces.contains(namespace) && !reader.has_namespace(namespace).await? {
            return Err(CommandError::Invalid(anyhow!(
                "Namespace {namespace} not found; create it with `kubectl create namespace {namespace}`, or set another one with -n"
            )));
        }
    }
    let mut objects = Vec::new();
    for (machine, exists) in files.machines.iter().zip(exists) {
        let observed = reader.observe(machine.clone(), &files).await?;
        let mut object = planned_object(&Assessed::new(observed), exists)?;
        object.warnings.extend(reader.take_warnings());
        objects.push(object);
    }
    Ok(PlanDocument { objects, warnings: files.warnings })
}

fn planned_object(assessed: &Assessed, exists: bool) -> anyhow::Result<PlannedObject> {
    let observed = assessed.observed();
    let plan = vitivirt_machine::plan(assessed)?;
    let machine = Target::of_kind::<Machine>(observed.id.key());
    // The operator's first write sets the finalizer of a new Machine.
    let own = plan.steps.iter().flat_map(|step| &step.writes).filter(|write| exists || *write.target() != machine);
    let created = (!exists).then(|| PlannedWrite::new(WriteAction::Create, &machine, Vec::new()));
    let writes = created.into_iter().chain(own.map(|write| planned_write(observed, write))).collect();
    let report = vitivirt_machine::report(assessed, &plan, &Outcome { stop: Stop::Done, written: 0 });
    let error = report.error.is_some();
    let status = report.status.map(|status| status.desired).unwrap_or_default();
    let refused = assessed.assessment().rejected_changes.iter();
    Ok(PlannedObject {
        identity: (&machine).into(),
        exists,
        writes,
        refused: refused
            .map(|rejected| RefusedField { field: rejected.field.clone(), reason: rejected.reason.clone() })
            .collect(),
        rollout: None,
        warnings: vitivirt_machine::warnings(assessed),
        result: with_future(assessed, planned_result(&status, error)),
    })
}

/// The status says what happened; the plan says what will.
fn with_future(assessed: &Assessed, result: PlanResult) -> PlanResult {
    if assessed.observed().own_vm().is_some() || result.reason.as_deref() != Some(machine_reason::VM_CREATED) {
        return result;
    }
    let is_stopped = assessed.assessment().resolved.as_ref().is_some_and(|spec| spec.power == PowerState::Stopped);
    let what = if is_stopped { "created and stay stopped" } else { "created and started" };
    PlanResult { message: Some(format!("VirtualMachine will be {what}")), ..result }
}

fn planned_result(status: &MachineStatus, error: bool) -> PlanResult {
    let ready = ready_condition(status);
    PlanResult {
        error,
        unknown: false,
        phase: status.phase.map(|phase| MachinePhase::as_str(phase).to_owned()),
        ready: Some(ready.is_some_and(|ready| ready.status == "True")),
        reason: ready.map(|ready| ready.reason.clone()),
        message: ready.map(|ready| ready.message.clone()),
    }
}

fn planned_write(observed: &Observed, write: &Write) -> PlannedWrite {
    let action = match write {
        Write::Create { .. } => WriteAction::Create,
        Write::Delete { .. } => WriteAction::Delete,
        Write::Apply { .. } | Write::Patch { .. } | Write::Lazy { .. } | Write::Status { .. } => WriteAction::Update,
    };
    let changes = changes_of(observed, write).into_iter().map(planned_change).collect();
    PlannedWrite::new(action, write.target(), changes)
}

fn planned_change(change: FieldChange) -> PlannedChange {
    PlannedChange {
        field: change.field,
        source_field: change.machine_field,
        from: change.from,
        to: change.to,
        effect: match change.effect {
            Effect::Live => ChangeEffect::Live,
            Effect::LiveIfPossible => ChangeEffect::LiveIfPossible,
            Effect::Restart => ChangeEffect::Restart,
            Effect::Refused => ChangeEffect::Refused,
        },
        reason: Some(change.why.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use serde_json::{Value, json};
    use vitivirt_machine::observed::StorageClassView;

    use super::*;

    #[test]
    fn the_plan_of_a_new_machine_says_what_will_happen() {
        let machine = json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "web", "namespace": "shop", "uid": "u"}, "spec": {"template": "small"},
        });
        let machine: Machine = serde_json::from_value(machine).unwrap();
        let mut observed = Observed::new(machine, Timestamp::UNIX_EPOCH).unwrap();
        let default = StorageClassView {
            name: "standard".to_owned(),
            is_default: true,
            waits_for_consumer: false,
            allows_expansion: true,
        };
        observed.storage_classes.push(default);
        let assessed = Assessed::new(observed);
        let writes = |exists| {
            let planned = planned_object(&assessed, exists).unwrap();
            let document = serde_json::to_value(&planned.writes).unwrap();
            let part = |write: &Value, name: &str| write[name].as_str().unwrap_or_default().to_owned();
            let lines = document.as_array().unwrap().iter();
            let lines =
                lines.map(|write| format!("{} {} {}", part(write, "action"), part(write, "kind"), part(write, "name")));
            (lines.collect::<Vec<_>>(), planned.result.message.unwrap())
        };
        let (lines, message) = writes(false);
        assert_eq!(lines, ["create Machine web", "create PersistentVolumeClaim web-root", "create VirtualMachine web"]);
        assert_eq!(message, "VirtualMachine will be created and started");
        assert_eq!(writes(true).0[0], "update Machine web", "the finalizer of a Machine that exists");
    }

    #[test]
    fn a_change_keeps_its_fields_values_effect_and_reason() {
        let change = FieldChange {
            field: "spec.x.cores".to_owned(),
            machine_field: Some("spec.resources.cpu.cores".to_owned()),
            from: Some(json!(1)),
            to: Some(json!(4)),
            effect: Effect::Restart,
            why: "because",
        };
        let expected = json!({
            "field": "spec.x.cores", "sourceField": "spec.resources.cpu.cores", "from": 1, "to": 4,
            "effect": "restart", "reason": "because",
        });
        assert_eq!(serde_json::to_value(planned_change(change)).unwrap(), expected);
    }

    #[test]
    fn the_result_is_taken_from_phase_and_ready_condition() {
        let time = "2026-01-01T00:00:00Z";
        let status = json!({
            "phase": "Failed",
            "conditions": [
                {"type": "StorageReady", "status": "True", "reason": "Bound", "message": "all bound", "lastTransitionTime": time},
                {"type": "Ready", "status": "False", "reason": "SecretNotFound", "message": "Secret x not found", "lastTransitionTime": time},
            ],
        });
        let expected = PlanResult {
            error: true,
            unknown: false,
            phase: Some("Failed".to_owned()),
            ready: Some(false),
            reason: Some("SecretNotFound".to_owned()),
            message: Some("Secret x not found".to_owned()),
        };
        assert_eq!(planned_result(&serde_json::from_value(status).unwrap(), true), expected);
    }
}
