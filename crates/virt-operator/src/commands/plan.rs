//! `virt-operator plan`: what the operator would do in this cluster for a KubeVirt resource in a file. It reads the
//! cluster and writes nothing. The plan is the operator's own.

use std::{process::ExitCode, sync::Arc, time::SystemTime};

use anyhow::{Context, Result};
use clap::Args;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;
use vitivirt_api::{Failure, ObjectKey, Operation, Plan, Target, Write, kubevirt::KubeVirt};
use vitivirt_cli::{
    ChangeEffect, ClusterArguments, CommandResult, FileArguments, OrInvalid, PlanDocument, PlanOutput, PlanResult,
    PlannedChange, PlannedObject, PlannedWrite, WriteAction,
};
use vitivirt_install::{
    DeploymentConfig, Desired, Environment, InstallStrategy, Installation, Kind, Lane, LiveObject, Observed,
    certificates::{CertificateScope, DesiredCertificates, NoCertificates, certificate_plan},
    desired_installation, is_of_another_release, orphans,
    pods::Pods,
    served::Served,
};

use super::{
    cluster::InstallationReader,
    render::{environment, read_kubevirt},
};
use crate::{
    cache::kubevirt_order,
    certificate_controller::renew_certificates,
    desired::{read_strategy, timestamp},
    observe::{architecture, crds_with_objects},
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
    let namespace = key.namespace().unwrap_or_default();
    let kubevirts = reader.kubevirts().await?;
    let first_kubevirt = older_kubevirt(&kubevirts, &key);
    let live = kubevirts.into_iter().find(|kubevirt| ObjectKey::from_metadata(&kubevirt.metadata) == key);
    let exists = live.is_some();
    let live_spec = live.as_ref().map(|live| live.spec.clone());
    let kubevirt = as_if_applied(given, live);
    let config = DeploymentConfig::new(&kubevirt, environment);
    let found = reader.read_state(&config).await?;
    #[expect(clippy::disallowed_methods, reason = "the plan is made for the current time")]
    let now = SystemTime::now();
    let mut observed = Observed {
        first_kubevirt,
        operator_namespace: namespace.to_owned(),
        architecture: architecture(),
        now: timestamp(now),
        cluster: found.cluster,
        synchronization_addresses: Vec::new(),
        namespace: reader.namespace(namespace).await?,
        objects: found.objects,
        caches_complete: true,
        pods: Pods::default(),
        served: Served::default(),
        crd_checks: Default::default(),
        crds_with_objects: Default::default(),
        unchecked_orphans: None,
        lane_problems: Default::default(),
        repairs: Arc::default(),
        nodes_held_until: None,
        kubevirt,
    };
    let strategy = dumped_strategy(&reader, &observed, environment).await?;
    let desired = desired(&observed, environment, strategy).unwrap_or_else(Desired::Invalid);
    observed.crds_with_objects = crds_with_objects(&reader.client(), &orphans(&observed, &desired)).await?;
    let plan = whole_plan(&mut observed, &desired, environment)?;
    // The objects as the live resource asks for them. What an edit takes away is in these only.
    let before = live_spec.and_then(|spec| {
        let kubevirt = KubeVirt { spec, ..observed.kubevirt.clone() };
        Installation::new(&kubevirt, environment, &observed.cluster).ok()
    });
    Ok(planned_object(&observed, &desired, &plan, exists, before.as_ref()))
}

/// The resource that is installed instead of this one: an older one in the same namespace. Resources in other
/// namespaces belong to other operators, or to none.
fn older_kubevirt(kubevirts: &[KubeVirt], key: &ObjectKey) -> Option<ObjectKey> {
    let in_namespace = kubevirts.iter().filter(|kubevirt| kubevirt.metadata.namespace.as_deref() == key.namespace());
    // A resource that does not exist yet is younger than every other.
    let first = in_namespace.min_by_key(|kubevirt| kubevirt_order(kubevirt))?;
    Some(ObjectKey::from_metadata(&first.metadata)).filter(|first| first != key)
}

/// The install strategy of another release, if its operator has dumped it already.
async fn dumped_strategy(
    reader: &InstallationReader,
    observed: &Observed,
    environment: &Environment,
) -> Result<Option<InstallStrategy>> {
    if !is_of_another_release(&observed.kubevirt, environment) {
        return Ok(None);
    }
    let config = DeploymentConfig::new(&observed.kubevirt, environment);
    match observed.objects.strategy(&config.id) {
        Some((key, _)) => Ok(Some(read_strategy(&reader.client(), key).await?)),
        None => Ok(None),
    }
}

/// As the operator computes it.
fn desired(
    observed: &Observed,
    environment: &Environment,
    dumped: Option<InstallStrategy>,
) -> Result<Desired, Failure> {
    let installation = desired_installation(observed, environment, dumped)?.map(Arc::new);
    Ok(match installation {
        Some(installation) => Desired::Installation { installation, up_to_date: Arc::default() },
        None => Desired::StrategyPending(Arc::new(DeploymentConfig::new(&observed.kubevirt, environment))),
    })
}

/// The writes of all lanes. Components wait for their certificates, so these are planned first, as if each of their
/// plans were carried out.
fn whole_plan(observed: &mut Observed, desired: &Desired, environment: &Environment) -> Result<Plan, Failure> {
    let scope = match desired {
        Desired::Installation { installation, .. } => CertificateScope::Installation(installation.clone()),
        Desired::StrategyPending(_) | Desired::Refused { .. } | Desired::Invalid(_) | Desired::Nothing => {
            CertificateScope::Existing
        }
    };
    let mut plan = Plan::default();
    loop {
        let certificates = DesiredCertificates::new(observed, environment, &scope)?;
        let issued = renew_certificates(&certificates, observed, None)?;
        let next = certificate_plan(observed, &certificates, &issued)?;
        let created = store_created(observed, &next);
        plan.steps.extend(next.steps);
        if !created {
            break;
        }
    }
    for lane in [Lane::Components, Lane::Monitoring, Lane::Instancetypes] {
        plan.steps.extend(vitivirt_install::plan(observed, desired, lane)?.steps);
    }
    Ok(plan)
}

/// Adds the objects that a plan creates to the observed ones. Returns whether there are any.
fn store_created(observed: &mut Observed, plan: &Plan) -> bool {
    let mut created = false;
    for write in plan.steps.iter().flat_map(|step| &step.writes) {
        let Write::Create { target, body } = write else { continue };
        let Some(kind) = Kind::from_name(&target.resource.kind) else { continue };
        let metadata = body.json().get("metadata").cloned().unwrap_or_default();
        let metadata: ObjectMeta = serde_json::from_value(metadata).unwrap_or_default();
        observed.objects.insert(kind, target.key.clone(), Arc::new(LiveObject::new(&metadata, body.json().clone())));
        created = true;
    }
    created
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

fn planned_object(
    observed: &Observed,
    desired: &Desired,
    plan: &Plan,
    exists: bool,
    before: Option<&Installation>,
) -> PlannedObject {
    let writes: Vec<&Write> = plan.steps.iter().flat_map(|step| &step.writes).collect();
    let problem = vitivirt_install::problem(observed, desired);
    let fine = if writes.is_empty() { "up to date" } else { "no errors found" };
    let installation = desired.installation().map(|installation| &**installation);
    let mut warnings = vitivirt_install::warnings(&observed.kubevirt, installation);
    warnings.extend(observed.crds_with_objects.iter().map(|crd| {
        format!(
            "CustomResourceDefinition {} is no longer part of the installation; the operator keeps it because it \
                 still has objects",
            crd.name()
        )
    }));
    if let Desired::StrategyPending(config) = desired {
        warnings.push(format!(
            "what changes is unknown: the install strategy of KubeVirt {} is not in the cluster; the operator first runs \
             a Job with the image {}, which extracts it", config.kube_virt_version, config.images.virt_operator_image
        ));
    }
    PlannedObject {
        identity: (&Target::of_kind::<KubeVirt>(ObjectKey::from_metadata(&observed.kubevirt.metadata))).into(),
        exists,
        writes: writes.into_iter().map(|write| planned_write(observed, write, before)).collect(),
        refused: Vec::new(),
        warnings,
        result: PlanResult {
            error: problem.is_some(),
            message: Some(problem.unwrap_or_else(|| fine.to_owned())),
            ..PlanResult::default()
        },
    }
}

fn planned_write(observed: &Observed, write: &Write, before: Option<&Installation>) -> PlannedWrite {
    let (action, changes) = match write {
        Write::Create { .. } | Write::Lazy { verb: "create", .. } => (WriteAction::Create, Vec::new()),
        Write::Delete { .. } => (WriteAction::Delete, Vec::new()),
        Write::Lazy { .. } | Write::Apply { .. } | Write::Status { .. } => (WriteAction::Update, Vec::new()),
        Write::Patch { operations, .. } => {
            let before = before.and_then(|before| {
                let object = before.objects.iter().find(|object| object.target() == *write.target())?;
                Some(object.body(&NoCertificates).ok()?.into_json())
            });
            let changes: Vec<PlannedChange> = operations
                .iter()
                .flat_map(|operation| changed_fields(observed, write, operation, before.as_ref()))
                .collect();
            let restarts = changes.iter().any(|change| change.effect == ChangeEffect::Restart);
            (if restarts { WriteAction::Restart } else { WriteAction::Update }, changes)
        }
    };
    PlannedWrite::new(action, write.target(), changes)
}

/// Without values: they can be secret.
fn planned_change(field: String, removed: bool) -> PlannedChange {
    let effect = if field.starts_with("spec.template.") { ChangeEffect::Restart } else { ChangeEffect::Live };
    let reason = removed.then(|| "removed".to_owned());
    PlannedChange { field, source_field: None, from: None, to: None, effect, reason }
}

/// The fields below a replaced field whose values differ. `before` is the object as the live resource asks for it.
fn changed_fields(
    observed: &Observed,
    write: &Write,
    operation: &Operation,
    before: Option<&Value>,
) -> Vec<PlannedChange> {
    let target = write.target();
    let path = operation.path.trim_start_matches('/').split('/').map(|part| part.replace("~1", "/").replace("~0", "~"));
    let path: Vec<String> = path.collect();
    let live = Kind::from_name(&target.resource.kind)
        .and_then(|kind| observed.objects.get(kind, &target.key))
        .and_then(|live| live.content());
    let [field] = path.as_slice() else {
        return vec![planned_change(path.join("."), operation.value.is_none())];
    };
    match (&operation.value, live.as_ref().and_then(|live| live.get(field))) {
        (Some(new), Some(old)) => {
            let (mut differences, mut removed) = (Vec::new(), Vec::new());
            collect_differences(field, old, new, &mut differences);
            if let Some(before) = before.and_then(|before| before.get(field)) {
                collect_removed(field, before, new, old, &mut removed);
            }
            let changed = differences.into_iter().map(|field| planned_change(field, false));
            changed.chain(removed.into_iter().map(|field| planned_change(field, true))).collect()
        }
        (value, _) => vec![planned_change(field.clone(), value.is_none())],
    }
}

/// The fields that the object had before the edit, does not have any more, and that the live object has.
fn collect_removed(path: &str, before: &Value, new: &Value, live: &Value, into: &mut Vec<String>) {
    match (before, new, live) {
        (Value::Object(before), Value::Object(new), Value::Object(live)) => {
            for (key, value) in before {
                match (new.get(key), live.get(key)) {
                    (Some(new), Some(live)) => collect_removed(&format!("{path}.{key}"), value, new, live, into),
                    (None, Some(_)) => into.push(format!("{path}.{key}")),
                    (_, None) => {}
                }
            }
        }
        (Value::Array(before), Value::Array(new), Value::Array(live))
            if before.len() == new.len() && live.len() == new.len() =>
        {
            for (index, ((before, new), live)) in before.iter().zip(new).zip(live).enumerate() {
                collect_removed(&format!("{path}[{index}]"), before, new, live, into);
            }
        }
        _ => {}
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
        let effects = fields.into_iter().map(|field| planned_change(field, false).effect);
        assert_eq!(effects.collect::<Vec<_>>(), [ChangeEffect::Live, ChangeEffect::Live, ChangeEffect::Restart]);
    }

    /// A field that only the live object has may be a default of the API server.
    #[test]
    fn fields_that_an_edit_takes_away_are_removed_and_defaults_are_not() {
        let before =
            json!({"template": {"nodeSelector": {"a": "b", "os": "linux"}, "list": [{"x": 1, "y": 2}], "gone": 1}});
        let new = json!({"template": {"nodeSelector": {"os": "linux"}, "list": [{"x": 1}]}});
        let live =
            json!({"template": {"nodeSelector": {"a": "b", "os": "linux"}, "list": [{"x": 1, "y": 2}], "default": 1}});
        let mut fields = Vec::new();
        collect_removed("spec", &before, &new, &live, &mut fields);
        assert_eq!(fields, ["spec.template.list[0].y", "spec.template.nodeSelector.a"]);
        let change = planned_change("spec.template.nodeSelector.a".to_owned(), true);
        assert_eq!((change.effect, change.reason.as_deref()), (ChangeEffect::Restart, Some("removed")));
    }

    #[test]
    fn only_an_older_resource_of_the_same_namespace_prevents_an_installation() {
        let kubevirt = |namespace: &str, name: &str, created: &str| -> KubeVirt {
            let metadata = json!({"namespace": namespace, "name": name, "creationTimestamp": created});
            let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": metadata, "spec": {}});
            serde_json::from_value(object).unwrap()
        };
        let elsewhere = kubevirt("other", "kubevirt", "2020-01-01T00:00:00Z");
        let (old, new) =
            (kubevirt("kubevirt", "old", "2021-01-01T00:00:00Z"), kubevirt("kubevirt", "new", "2022-01-01T00:00:00Z"));
        let key = |name: &str| ObjectKey::namespaced("kubevirt", name);
        assert_eq!(older_kubevirt(std::slice::from_ref(&elsewhere), &key("new")), None);
        let all = [new, elsewhere, old];
        assert_eq!(older_kubevirt(&all, &key("new")), Some(key("old")));
        assert_eq!(older_kubevirt(&all, &key("old")), None, "it is the oldest");
        assert_eq!(older_kubevirt(&all, &key("third")), Some(key("old")), "it does not exist yet");
    }
}
