//! `virt-operator plan`: what the operator would do in this cluster for a KubeVirt resource in a file. It reads the
//! cluster and writes nothing. The plan is the operator's own, until the installation is complete: it rehearses an
//! upgrade.

mod changes;
mod reader;
mod strategy;

use std::{path::PathBuf, process::ExitCode, sync::Arc, time::SystemTime};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use vitivirt_api::{ApiResource, Failure, ObjectKey, Plan, Target, Write, kubevirt::KubeVirt};
use vitivirt_cli::{
    ClusterArguments, CommandError, CommandResult, FileArguments, KeptObject, OrInvalid, PlanDocument, PlanOutput,
    PlanResult, PlannedObject, PlannedRestart, PlannedRollout, PlannedVm, PlannedWrite, VmEffect, WriteAction,
};
use vitivirt_install::{
    CertificateScope, CrdCheck, DeploymentConfig, Desired, DesiredCertificates, Environment, InstallStrategy,
    Installation, Kind, LiveObject, NodeState, Observed, RELEASE, certificate_plan, check_crd, crds_to_check,
    desired_installation, is_of_another_release, lost_versions, orphans, preparation,
    rehearsal::{
        VmiEffect, complete_plan, installed_version, missing_permissions, node_problems, outdated_vms, restart,
        unchanged_objects,
    },
    served::Served,
};

pub(crate) use self::changes::written_fields;
use self::{
    changes::{CrdSpecs, PlanComparison},
    reader::RehearsalReader,
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
    /// File with the install strategy of the release in spec.imageTag
    ///
    /// The ConfigMap that the virt-operator of that release writes, or the objects in it. Without the option, the plan
    /// uses the ConfigMap in the cluster. If there is none, the changes are unknown.
    #[arg(long, value_name = "FILE")]
    strategy: Option<PathBuf>,
    #[command(flatten)]
    cluster: ClusterArguments,
    #[command(flatten)]
    output: PlanOutput,
}

pub(crate) fn run(arguments: &PlanArguments) -> CommandResult<ExitCode> {
    let given = read_kubevirt(&arguments.input)?;
    let environment = environment(std::env::vars()).or_invalid()?;
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    let mut warnings = Vec::new();
    let strategy = strategy_file(arguments, &environment, &given, &mut warnings)?;
    let object = tokio.block_on(plan(&arguments.cluster, &environment, given, strategy))?;
    let document = PlanDocument { objects: vec![object], warnings };
    document.print(&arguments.output)?;
    Ok(document.exit_code())
}

fn strategy_file(
    arguments: &PlanArguments,
    environment: &Environment,
    kubevirt: &KubeVirt,
    warnings: &mut Vec<String>,
) -> CommandResult<Option<InstallStrategy>> {
    let Some(file) = &arguments.strategy else { return Ok(None) };
    if !is_of_another_release(kubevirt, environment) {
        let error = anyhow!(
            "--strategy: the resource asks for KubeVirt {RELEASE}, whose objects this program contains; set spec.imageTag \
             to another release, or remove the option"
        );
        return Err(CommandError::Invalid(error));
    }
    let (strategy, warning) = strategy::read_file(file, &DeploymentConfig::new(kubevirt, environment))?;
    warnings.extend(warning);
    Ok(Some(strategy))
}

async fn plan(
    cluster: &ClusterArguments,
    environment: &Environment,
    given: KubeVirt,
    strategy: Option<InstallStrategy>,
) -> Result<PlannedObject> {
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
    let rehearsal = RehearsalReader { client: reader.client() };
    let nodes = rehearsal.nodes().await?;
    let pods = rehearsal.pods(namespace).await?;
    let dead = nodes.iter().filter(|node| !node.is_ready).map(|node| (node.name.clone(), Some(node.clone())));
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
        pods,
        served: Served::default(),
        crd_checks: Default::default(),
        storage_page: None,
        crds_with_objects: Default::default(),
        unchecked_orphans: None,
        lane_problems: Default::default(),
        repairs: Arc::default(),
        nodes_held_until: None,
        kubevirt,
    };
    observed.set_dead_nodes(dead.collect());
    let strategy = match strategy {
        Some(strategy) => Some(strategy),
        None => dumped_strategy(&reader, &observed, environment).await?,
    };
    let desired = desired(&observed, environment, strategy).unwrap_or_else(Desired::Invalid);
    observed.crds_with_objects = crds_with_objects(&reader.client(), &orphans(&observed, &desired)).await?;
    let mut crds = CrdSpecs::new();
    for (crd, _) in crds_to_check(&observed, &desired) {
        if let Some((live, spec)) = rehearsal.crd(&crd).await? {
            observed.crd_checks.insert(crd.clone(), check_crd(&desired, &crd, &live)?);
            crds.insert(crd, spec);
        }
    }
    let mut rollout = PlannedRollout::default();
    if let Some(installation) = desired.installation() {
        rollout.blockers = lost_versions(&observed, &installation.config.kube_virt_version);
    }
    for (crd, check) in &observed.crd_checks {
        if let Some(kind) = check.migrated_kind() {
            rollout.preparations.extend(preparation(crd, check, rehearsal.count(kind).await?));
        }
    }
    // The plan shows what would follow.
    observed.crd_checks.values_mut().for_each(CrdCheck::ignore_lost_versions);
    let plan = whole_plan(&mut observed, &desired, environment)?;
    // The objects as the live resource asks for them. What an edit takes away is in these only.
    let before = live_spec.and_then(|spec| {
        let kubevirt = KubeVirt { spec, ..observed.kubevirt.clone() };
        Installation::new(&kubevirt, environment, &observed.cluster).ok()
    });
    let comparison = PlanComparison { observed: &observed, before: before.as_ref(), crds: &crds };
    let writes = plan.steps.iter().flat_map(|step| &step.writes);
    let writes: Vec<(&Target, PlannedWrite)> =
        writes.map(|write| (write.target(), comparison.planned_write(write))).collect();
    let mut warnings = Vec::new();
    if let Some(installation) = desired.installation() {
        describe_rollout(&mut rollout, &observed, installation, &plan, &writes);
        let (blockers, node_warnings) = node_problems(installation, &plan, &nodes);
        rollout.blockers.extend(blockers);
        warnings.extend(node_warnings);
        rollout.vms = planned_vms(&rehearsal, &observed, installation, &nodes).await?;
        match rehearsal.access(installation).await? {
            Some(access) => rollout.blockers.extend(missing_permissions(&access, installation, &plan)),
            None => warnings.push(format!(
                "permissions of the operator are not checked: it is not installed in namespace {namespace}; apply the output \
                 of `virt-operator manifests`"
            )),
        }
    }
    let writes = writes.into_iter().map(|(_, write)| write).collect();
    let mut object = planned_object(&observed, &desired, exists, writes, rollout);
    object.warnings.extend(warnings);
    Ok(object)
}

/// The objects that stay, the pods that restart, and the versions.
fn describe_rollout(
    rollout: &mut PlannedRollout,
    observed: &Observed,
    installation: &Installation,
    plan: &Plan,
    writes: &[(&Target, PlannedWrite)],
) {
    rollout.from_version = installed_version(&observed.kubevirt).map(ToOwned::to_owned);
    rollout.to_version = Some(installation.config.kube_virt_version.clone());
    rollout.unchanged = unchanged_objects(observed, installation, plan);
    let crds = observed.crds_with_objects.iter();
    let crds = crds.map(|crd| Target::new(Kind::CustomResourceDefinition.resource(), crd.clone()));
    let reason = "it is no longer part of the installation, but it still has objects";
    rollout.kept = crds.map(|crd| KeptObject::new(&crd, reason)).collect();
    let restarted = writes.iter().filter(|(_, write)| write.action() == WriteAction::Restart);
    rollout.restarts = restarted
        .filter_map(|(target, _)| {
            let restart = restart(observed, target)?;
            Some(PlannedRestart::new(target, restart.pods, restart.batches))
        })
        .collect();
}

async fn planned_vms(
    reader: &RehearsalReader,
    observed: &Observed,
    installation: &Installation,
    nodes: &[NodeState],
) -> Result<Vec<PlannedVm>> {
    let vmis = reader.vmis().await?;
    let (budgets, launchers) = if vmis.is_empty() { Default::default() } else { reader.budgets().await? };
    let vms = outdated_vms(&observed.kubevirt, installation, &vmis, nodes, &budgets, &launchers);
    let resource = ApiResource {
        group: "kubevirt.io".to_owned(),
        version: "v1".to_owned(),
        api_version: "kubevirt.io/v1".to_owned(),
        kind: "VirtualMachineInstance".to_owned(),
        plural: "virtualmachineinstances".to_owned(),
    };
    let planned = vms.into_iter().map(|vm| {
        let effect = match vm.effect {
            VmiEffect::Migrated => VmEffect::Migrate,
            VmiEffect::Evicted => VmEffect::Evict,
            VmiEffect::StaysOutdated => VmEffect::StayOutdated,
        };
        PlannedVm::new(&Target::new(resource.clone(), vm.key), effect, vm.reason)
    });
    Ok(planned.collect())
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
        None => Desired::StrategyPending {
            config: Arc::new(DeploymentConfig::new(&observed.kubevirt, environment)),
            running: None,
        },
    })
}

/// The writes of all lanes. Components wait for their certificates, so these are planned first, as if each of their
/// plans were carried out.
fn whole_plan(observed: &mut Observed, desired: &Desired, environment: &Environment) -> Result<Plan, Failure> {
    let scope = match desired {
        Desired::Installation { installation, .. } => CertificateScope::Installation(installation.clone()),
        Desired::StrategyPending { .. } | Desired::Refused { .. } | Desired::Invalid(_) | Desired::Nothing => {
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
    plan.steps.extend(complete_plan(observed, desired)?.steps);
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
    exists: bool,
    writes: Vec<PlannedWrite>,
    rollout: PlannedRollout,
) -> PlannedObject {
    let problem = vitivirt_install::problem(observed, desired);
    let installation = desired.installation().map(|installation| &**installation);
    let mut warnings = vitivirt_install::warnings(&observed.kubevirt, installation);
    let unknown = matches!(desired, Desired::StrategyPending { .. }) && problem.is_none();
    if let Desired::StrategyPending { config, .. } = desired {
        warnings.push(format!(
            "the changes are unknown: the install strategy of KubeVirt {} is not in the cluster; the operator first runs \
             a Job with the image {}, which writes it; to plan with a strategy from another cluster, use --strategy",
            config.kube_virt_version, config.images.virt_operator_image
        ));
    }
    let message = match (problem, rollout.blockers.len()) {
        (Some(problem), _) => Err(problem),
        (None, 0) if unknown => Ok("the changes are unknown"),
        (None, 0) if writes.is_empty() => Ok("up to date"),
        (None, 0) => Ok("no errors found"),
        (None, 1) => Err("1 problem would block the operator".to_owned()),
        (None, blockers) => Err(format!("{blockers} problems would block the operator")),
    };
    PlannedObject {
        identity: (&Target::of_kind::<KubeVirt>(ObjectKey::from_metadata(&observed.kubevirt.metadata))).into(),
        exists,
        writes,
        refused: Vec::new(),
        warnings,
        rollout: installation.map(|_| rollout),
        result: PlanResult {
            error: message.is_err(),
            unknown,
            message: Some(message.map_or_else(|problem| problem, ToOwned::to_owned)),
            ..PlanResult::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
