//! `virt-operator uninstall`: removes KubeVirt with the user's own permissions, for a cluster whose operator or namespace
//! is gone. Which objects are deleted, and in which order, is the operator's own decision (`vitivirt_install::removal`).

use std::{
    collections::BTreeMap,
    io::{IsTerminal, Write as _},
    process::ExitCode,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use serde_json::json;
use tokio::time::{Instant, sleep};
use vitivirt_api::{ObjectKey, Stop, Write, kubevirt::KubeVirt};
use vitivirt_cli::{ClusterArguments, CommandError, CommandResult, DurationParser, OrInvalid, namespace_name, print};
use vitivirt_install::{
    Kind,
    names::{FIELD_MANAGER, VIRT_OPERATOR},
    removal::{RemovalInput, RemovalMode, RemovalStage, obstacles, removal_plan},
    validation::{self, Remaining},
};
use vitivirt_runtime::reconcile::Executor;

use super::cluster::InstallationReader;
use crate::{
    desired::timestamp,
    removal::{marked_nodes, read_instances},
    workloads::remaining_workloads,
};

const DEFAULT_NAMESPACE: &str = "kubevirt";
const POLL: Duration = Duration::from_millis(500);
/// A removal that takes longer prints what it waits for.
const QUIET_PERIOD: Duration = Duration::from_secs(5);
const TIMEOUTS: DurationParser = DurationParser { least: Duration::from_secs(1), most: Duration::from_secs(24 * 3600) };

/// The last part of the help.
pub(crate) const UNINSTALL_EXIT_STATUS: &str = "\
Exit status:
  0  KubeVirt was removed, or is not installed
  1  Nothing was removed: VMs exist, or the removal was not confirmed
  2  The removal is incomplete, the cluster cannot be read, or an argument is invalid";

#[derive(Debug, Clone, Args)]
pub(crate) struct UninstallArguments {
    /// Do not ask for confirmation
    #[arg(short, long)]
    yes: bool,
    /// Delete VMs too, and remove finalizers of other clients from KubeVirt's objects
    #[arg(long)]
    force: bool,
    /// Print what would be deleted and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Namespace of KubeVirt. Default: that of the KubeVirt resource, or kubevirt
    #[arg(short, long, value_parser = namespace_name)]
    namespace: Option<String>,
    /// Maximum time to wait for everything to be deleted
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "10m",
        value_parser = TIMEOUTS
    )]
    timeout: Duration,
    #[command(flatten)]
    cluster: ClusterArguments,
}

pub(crate) fn run(arguments: &UninstallArguments) -> CommandResult<ExitCode> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting")?;
    tokio.block_on(uninstall(arguments))
}

async fn uninstall(arguments: &UninstallArguments) -> CommandResult<ExitCode> {
    let reader = InstallationReader::connect(&arguments.cluster).await?;
    let command = Uninstaller { reader, arguments };
    let found = command.read().await?;
    if found.is_clean() {
        print(
            "KubeVirt is not installed in this cluster: nothing to remove.\n\
             To remove virt-operator too, if it is installed: virt-operator manifests | kubectl delete -f -\n",
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&found.description())?;
    let workloads = workloads_text(&found.workloads);
    if let (Some(workloads), false) = (&workloads, arguments.force) {
        let error = anyhow!("there are still {workloads}; delete them first, or use --force to delete them too");
        return Err(CommandError::Invalid(error));
    }
    print(&found.intention(workloads.as_deref(), arguments.force))?;
    if arguments.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    if !arguments.yes && !confirm().or_invalid()? {
        print("Nothing was changed.\n")?;
        return Ok(ExitCode::FAILURE);
    }
    command.remove(found).await?;
    print(
        "KubeVirt was removed. The operator, its namespace, the CRD kubevirts.kubevirt.io and PVCs stay.\n\
         To remove the operator: virt-operator manifests | kubectl delete -f -\n",
    )?;
    Ok(ExitCode::SUCCESS)
}

fn confirm() -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("standard input is not a terminal: use --yes to remove KubeVirt without confirmation");
    }
    print("Remove KubeVirt? [y/N] ")?;
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

/// What is in the cluster.
struct Found {
    kubevirts: Vec<KubeVirt>,
    input: RemovalInput,
    workloads: Vec<Remaining>,
    /// Whether an operator runs that removes the installation of a deleted resource.
    operator_runs: bool,
}

impl Found {
    fn is_clean(&self) -> bool {
        self.kubevirts.is_empty() && self.input.stage() == RemovalStage::Nodes && self.input.nodes.is_empty()
    }

    fn description(&self) -> String {
        let mut lines = vec!["Found in this cluster:".to_owned()];
        for kubevirt in &self.kubevirts {
            let version = kubevirt.status.as_ref().map(|status| status.observed_kube_virt_version.as_str());
            let version = version.filter(|version| !version.is_empty()).unwrap_or("not installed completely");
            lines.push(format!("  KubeVirt {} ({version})", ObjectKey::from_metadata(&kubevirt.metadata)));
        }
        let mut kinds: BTreeMap<Kind, usize> = BTreeMap::new();
        self.input.kinds().for_each(|kind| *kinds.entry(kind).or_default() += 1);
        lines.extend(kinds.iter().map(|(kind, count)| format!("  {}: {count}", kind.name())));
        if !self.input.nodes.is_empty() {
            lines.push(format!("  labels or annotations of KubeVirt on {} nodes", self.input.nodes.len()));
        }
        let namespace = &self.input.namespace;
        lines.push(if self.operator_runs {
            format!("  a running operator in namespace {namespace}")
        } else {
            format!("  no running operator in namespace {namespace}")
        });
        lines.join("\n") + "\n"
    }

    fn intention(&self, workloads: Option<&str>, force: bool) -> String {
        let mut text = "All of these will be deleted".to_owned();
        if let Some(workloads) = workloads {
            text += &format!(", and with them {workloads}: THEIR GUESTS WILL BE STOPPED");
        }
        if self.operator_runs && !self.kubevirts.is_empty() && !force {
            text += ", by the operator: this command deletes the KubeVirt resource and waits";
        }
        if force {
            text += "; finalizers of other clients on them will be removed";
        }
        text + ".\n"
    }
}

fn workloads_text(workloads: &[Remaining]) -> Option<String> {
    let left: Vec<String> =
        workloads.iter().filter(|left| !left.examples.is_empty()).map(validation::describe).collect();
    (!left.is_empty()).then(|| left.join(" and "))
}

struct Uninstaller<'a> {
    reader: InstallationReader,
    arguments: &'a UninstallArguments,
}

impl Uninstaller<'_> {
    async fn read(&self) -> Result<Found> {
        let client = self.reader.client();
        let kubevirts = self.reader.kubevirts_if_served().await?;
        let first = kubevirts.iter().min_by_key(|kubevirt| crate::cache::kubevirt_order(kubevirt)).cloned();
        let resource_namespace = first.as_ref().and_then(|kubevirt| kubevirt.metadata.namespace.clone());
        let namespace = self.arguments.namespace.clone().or(resource_namespace);
        let namespace = namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        #[expect(clippy::disallowed_methods, reason = "the removal takes place now")]
        let now = SystemTime::now();
        let mut input = RemovalInput {
            kubevirt: first,
            mode: RemovalMode::Command { force: self.arguments.force },
            now: timestamp(now),
            objects: self.reader.objects().await?,
            pods: self.reader.component_pods(&namespace).await?,
            complete: true,
            instances: Vec::new(),
            empty_crds: Vec::new(),
            nodes: Vec::new(),
            namespace,
        };
        if input.is_irrevocable() {
            let crds = input.crds_with_instances().cloned().collect();
            read_instances(&client, crds, &mut input).await;
        }
        input.nodes = marked_nodes(&client).await.map_err(anyhow::Error::from)?;
        let workloads = remaining_workloads(&client).await.context("cannot list VMs")?;
        let operator_runs = self.operator_runs(&input.namespace).await?;
        Ok(Found { kubevirts, input, workloads, operator_runs })
    }

    async fn operator_runs(&self, namespace: &str) -> Result<bool> {
        let deployments: Api<Deployment> = Api::namespaced(self.reader.client(), namespace);
        let found = deployments.get_opt(VIRT_OPERATOR).await.context("cannot read Deployment virt-operator")?;
        let found = found.filter(|deployment| deployment.metadata.deletion_timestamp.is_none());
        let ready = found.and_then(|deployment| deployment.status).and_then(|status| status.ready_replicas);
        Ok(ready.is_some_and(|ready| ready > 0))
    }

    async fn remove(&self, mut found: Found) -> Result<()> {
        let executor = Executor::new(self.reader.client(), FIELD_MANAGER);
        let (start, mut printed) = (Instant::now(), String::new());
        loop {
            let mut waits_for = self.delete_kubevirts(&found).await.err().map(|error| format!("{error:#}"));
            let is_left_to_operator = found.operator_runs && !found.kubevirts.is_empty() && !self.arguments.force;
            if is_left_to_operator {
                waits_for = waits_for.or_else(|| reported_problem(&found.kubevirts));
            } else {
                let plan = removal_plan(&found.input);
                let outcome = executor.apply_once(&plan).await;
                print_deletions(plan.steps.iter().flat_map(|step| &step.writes), outcome.written)?;
                if let Stop::Failed { failure, .. } = outcome.stop {
                    waits_for = waits_for.or(Some(failure.message));
                }
                waits_for = waits_for.or_else(|| obstacles(&found.input));
            }
            found = self.read().await?;
            if found.is_clean() {
                return Ok(());
            }
            let waits_for = waits_for.unwrap_or_else(|| "objects are being deleted".to_owned());
            if start.elapsed() > self.arguments.timeout {
                bail!("KubeVirt is not removed completely: {waits_for}; run the command again, or with --force");
            }
            if start.elapsed() > QUIET_PERIOD && waits_for != printed {
                print(&format!("Waiting: {waits_for}\n"))?;
                printed = waits_for;
            }
            sleep(POLL).await;
        }
    }

    /// The webhook of an operator that does not run would reject the deletion.
    async fn delete_kubevirts(&self, found: &Found) -> Result<()> {
        let is_present = |kubevirt: &&KubeVirt| kubevirt.metadata.deletion_timestamp.is_none();
        let present: Vec<&KubeVirt> = found.kubevirts.iter().filter(is_present).collect();
        if !present.is_empty() && !found.operator_runs {
            self.reader.delete_operator_webhooks().await?;
        }
        for kubevirt in present {
            let metadata = &kubevirt.metadata;
            let (namespace, name) =
                (metadata.namespace.as_deref().unwrap_or_default(), metadata.name.as_deref().unwrap_or_default());
            let api: Api<KubeVirt> = Api::namespaced(self.reader.client(), namespace);
            if self.arguments.force && validation::protects_workloads(kubevirt) {
                let patch = json!({"spec": {"uninstallStrategy": "RemoveWorkloads"}});
                let patched = api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
                patched.with_context(|| format!("cannot change KubeVirt {namespace}/{name}"))?;
            }
            let preconditions = Some(Preconditions { uid: metadata.uid.clone(), resource_version: None });
            let deleted = api.delete(name, &DeleteParams { preconditions, ..DeleteParams::background() }).await;
            deleted.with_context(|| format!("cannot delete KubeVirt {namespace}/{name}"))?;
            print(&format!("Deleted KubeVirt {namespace}/{name}\n"))?;
        }
        Ok(())
    }
}

/// What the operator reports about the removal.
fn reported_problem(kubevirts: &[KubeVirt]) -> Option<String> {
    let conditions =
        kubevirts.iter().filter_map(|kubevirt| kubevirt.status.as_ref()).flat_map(|status| &status.conditions);
    let mut problems = conditions.filter(|condition| condition.condition_type == "Synchronized");
    problems.next().map(|condition| condition.message.clone())
}

fn print_deletions<'a>(writes: impl Iterator<Item = &'a Write>, written: usize) -> Result<()> {
    if written == 0 {
        return Ok(());
    }
    let mut counts: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for write in writes {
        let action = if write.verb() == "delete" { "Deleted" } else { "Cleaned up" };
        *counts.entry((action, write.target().resource.plural.clone())).or_default() += 1;
    }
    let lines: String = counts.iter().map(|((action, kind), count)| format!("{action} {count} {kind}\n")).collect();
    print(&lines)
}
