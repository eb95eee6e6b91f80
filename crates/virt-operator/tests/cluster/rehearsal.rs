//! `virt-operator plan` for an upgrade: what it shows, that it writes nothing, and that the upgrade then does the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{policy::v1::PodDisruptionBudget, rbac::v1::ClusterRole};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, json};
use tokio::process::Command;
use vitivirt_lab::{
    KubeVirtRelease, Lab, LabOptions, NodeTaints, Record, VirtOperator,
    harness::{SharedLabs, Suite},
};
use vitivirt_snapshot::{Snapshot, compare, key};

use crate::{
    commands::only_strategy,
    support::{NAMESPACE, create_kubevirt, kubevirt, program, text, wait_until_release},
    takeover::component_pods,
    upgrade::{TIMEOUT, migrations, start_vms, start_vms_with, vmis},
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(
        suite;
        an_upgrade_does_what_its_rehearsal_shows,
        another_release_is_planned_from_a_file_or_is_unknown,
    );
}

/// The result of the command: its exit code, and the object of the document.
pub(crate) struct Planned {
    pub(crate) code: i32,
    pub(crate) object: Value,
}

impl Planned {
    fn rollout(&self, field: &str) -> &[Value] {
        self.object["rollout"][field].as_array().map(Vec::as_slice).unwrap_or_default()
    }

    fn blockers(&self) -> Vec<&str> {
        self.rollout("blockers").iter().filter_map(Value::as_str).collect()
    }

    /// The effect on a VM, and its reason.
    fn vm(&self, name: &str) -> (&str, &str) {
        let vm = self.rollout("vms").iter().find(|vm| vm["name"] == name);
        let text = |field: &str| vm.and_then(|vm| vm[field].as_str()).unwrap_or_default();
        (text("effect"), text("reason"))
    }

    /// The VMs with this effect.
    fn vms(&self, effect: &str) -> Vec<&str> {
        let vms = self.rollout("vms").iter().filter(|vm| vm["effect"] == effect);
        vms.filter_map(|vm| vm["name"].as_str()).collect()
    }

    /// Group, version, kind, namespace and name of the objects with this action.
    fn written(&self, action: &str) -> Vec<(GroupVersionKind, Option<String>, String)> {
        let writes = self.object["writes"].as_array().into_iter().flatten().filter(|write| write["action"] == action);
        writes
            .map(|write| {
                let text = |field: &str| write[field].as_str().unwrap_or_default();
                let (group, version) = text("apiVersion").split_once('/').unwrap_or(("", text("apiVersion")));
                let namespace = write["namespace"].as_str().map(ToOwned::to_owned);
                (GroupVersionKind::gvk(group, version, text("kind")), namespace, text("name").to_owned())
            })
            .collect()
    }

    /// The objects with one of these actions that are in a snapshot, by their keys there.
    fn keys(&self, actions: &[&str]) -> BTreeSet<String> {
        let written = actions.iter().flat_map(|action| self.written(action));
        let written = written.filter(|(kind, _, name)| kind.kind != "Job" && !is_temporary(name));
        let keys = written.map(|(kind, namespace, name)| {
            let metadata = json!({"namespace": namespace, "name": name});
            key(&json!({"apiVersion": kind.api_version(), "kind": kind.kind, "metadata": metadata}))
        });
        keys.filter(|key| !is_strategy(key)).collect()
    }
}

/// Whether this is the key of a ConfigMap with an install strategy. Upstream virt-operator generates its name, so a snapshot
/// has one key for those of all releases.
fn is_strategy(key: &str) -> bool {
    key.starts_with("core/ConfigMap/kubevirt/kubevirt-install-strategy-")
}

const KUBEVIRT: &str = "kubevirt.io/KubeVirt/kubevirt/kubevirt";

/// Whether an object exists only during the upgrade.
fn is_temporary(name: &str) -> bool {
    name.starts_with("virt-operator-tmp-webhook")
}

/// What an upgrade changes.
struct State {
    objects: Snapshot,
    pods: BTreeSet<String>,
    /// The UID of each VMI.
    vmis: BTreeMap<String, Option<String>>,
}

impl State {
    async fn of(lab: &Lab) -> Result<Self> {
        let vmis = vmis(lab).list(&ListParams::default()).await?;
        Ok(Self {
            objects: lab.installed(None).await?,
            pods: component_pods(lab).await?,
            vmis: vmis.iter().map(|vmi| (vmi.name_any(), vmi.uid())).collect(),
        })
    }
}

/// Runs the command, and checks that it wrote nothing.
pub(crate) async fn plan(lab: &Lab, spec: &Value, arguments: &[&Path]) -> Result<Planned> {
    let before = lab.audit()?.len();
    let file = lab.folder().join("rehearsal.yaml");
    std::fs::write(&file, kubevirt(spec).to_string())?;
    let mut command = Command::new(program());
    command.args(["plan", "-o", "json", "-f"]).arg(&file).arg("--kubeconfig").arg(lab.kubeconfig());
    command.args(arguments).stdin(Stdio::null());
    let output = command.output().await?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let mut document: Value = serde_json::from_slice(&output.stdout).with_context(|| errors.into_owned())?;
    let writes: Vec<Record> = lab.audit()?.into_iter().skip(before).filter(Record::is_write).collect();
    ensure!(writes.iter().all(|record| record.user != "admin"), "the plan command wrote {writes:?}");
    let object = document["objects"][0].take();
    Ok(Planned { code: output.status.code().unwrap_or(-1), object })
}

/// Gives the operator in the cluster the permissions of this one.
async fn apply_permissions(lab: &Lab) -> Result<()> {
    let output =
        Command::new(program()).args(["manifests", "--image", "example.org/virt-operator:new"]).output().await?;
    let parameters = PatchParams::apply("administrator").force();
    for document in vitivirt_cli::parse_manifests("manifests", &String::from_utf8(output.stdout)?)? {
        let object: DynamicObject = serde_json::from_value(document.object.clone())?;
        let kind = GroupVersionKind::gvk("rbac.authorization.k8s.io", "v1", document.kind());
        let resource = ApiResource::from_gvk(&kind);
        let api: Api<DynamicObject> = match document.kind() {
            "ClusterRole" => Api::all_with(lab.client(), &resource),
            "Role" => Api::namespaced_with(lab.client(), NAMESPACE, &resource),
            _ => continue,
        };
        api.patch(&object.name_any(), &parameters, &Patch::Apply(&object)).await?;
    }
    Ok(())
}

async fn an_upgrade_does_what_its_rehearsal_shows(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { nodes: 4, ..LabOptions::default() }).await?;
    lab.create_virt_operator(&VirtOperator::reference_of(KubeVirtRelease::Previous)).await?;
    let spec = json!({"workloadUpdateStrategy": {"workloadUpdateMethods": ["LiveMigrate", "Evict"]}});
    create_kubevirt(&lab, &spec).await?;
    wait_until_release(&lab, KubeVirtRelease::Previous.version(), TIMEOUT).await.context("v1.7.0")?;
    start_vms(&lab, &["migrated"]).await?;
    lab.set_guests(|guests| guests.live_migratable = false);
    start_vms(&lab, &["evicted"]).await?;
    start_vms_with(&lab, &["stays"], &json!({"evictionStrategy": "LiveMigrate"})).await?;
    // v1.8.4 grants permissions that the operator of v1.7.0 does not hold.
    let planned = plan(&lab, &spec, &[]).await?;
    let blockers = planned.blockers();
    let expected = ["ServiceAccount kubevirt/kubevirt-operator lacks permissions", "virt-operator manifests"];
    ensure!(planned.code == 1 && blockers.len() == 1, "{} {blockers:?}", planned.code);
    ensure!(expected.iter().all(|expected| blockers[0].contains(expected)), "{blockers:?}");
    apply_permissions(&lab).await?;
    the_rehearsal_shows_pods_and_vms(&lab, &spec).await?;
    a_budget_and_a_dead_node_are_reported(&lab, &spec).await?;
    let (planned, before) = (plan(&lab, &spec, &[]).await?, State::of(&lab).await?);
    lab.replace_virt_operator(&VirtOperator::ours(program())).await?;
    wait_until_release(&lab, KubeVirtRelease::Current.version(), TIMEOUT).await.context("v1.8.4")?;
    the_objects_and_pods_are_as_planned(&lab, &planned, &before).await?;
    the_vms_are_as_planned(&lab, &planned, &before).await?;
    let planned = plan(&lab, &spec, &[]).await?;
    ensure!(planned.code == 0 && planned.rollout("restarts").is_empty(), "after the upgrade: {}", planned.object);
    lab.stop().await
}

async fn the_rehearsal_shows_pods_and_vms(lab: &Lab, spec: &Value) -> Result<()> {
    let planned = plan(lab, spec, &[]).await?;
    ensure!(planned.code == 0, "{} {:?}", planned.code, planned.blockers());
    let rollout = &planned.object["rollout"];
    ensure!((&rollout["fromVersion"], &rollout["toVersion"]) == (&json!("v1.7.0"), &json!("v1.8.4")), "{rollout}");
    let restarts: Vec<&str> = planned.rollout("restarts").iter().filter_map(|it| it["name"].as_str()).collect();
    let place = |name: &str| restarts.iter().position(|restarted| *restarted == name);
    let order = [place("virt-handler"), place("virt-controller"), place("virt-api")];
    ensure!(order.iter().all(Option::is_some) && order.is_sorted(), "{restarts:?}");
    let handler = &planned.rollout("restarts")[place("virt-handler").unwrap_or_default()];
    ensure!(handler["batches"] == json!([1, 1, 1, 1]), "{handler}");
    ensure!(handler["pods"].as_array().is_some_and(|pods| pods.len() == 4), "{handler}");
    let (effect, reason) = planned.vm("migrated");
    ensure!(effect == "migrate" && reason.contains("LiveMigrate"), "{effect} {reason}");
    let (effect, reason) = planned.vm("evicted");
    let expected = ["DisksNotLiveMigratable", "VirtualMachine evicted starts it again"];
    ensure!(effect == "evict" && expected.iter().all(|expected| reason.contains(expected)), "{effect} {reason}");
    let (effect, reason) = planned.vm("stays");
    ensure!(effect == "stayOutdated" && reason.contains("virt-api refuses the eviction"), "{effect} {reason}");
    let (effect, reason) = {
        let planned = plan(lab, &json!({}), &[]).await?;
        let (effect, reason) = planned.vm("migrated");
        (effect.to_owned(), reason.to_owned())
    };
    ensure!(effect == "stayOutdated" && reason.contains("workloadUpdateMethods is empty"), "{effect} {reason}");
    Ok(())
}

async fn a_budget_and_a_dead_node_are_reported(lab: &Lab, spec: &Value) -> Result<()> {
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(lab.client(), "default");
    let budget = json!({"metadata": {"name": "all"}, "spec": {"minAvailable": 9, "selector": {}}});
    budgets.create(&PostParams::default(), &serde_json::from_value(budget)?).await?;
    lab.wait("the budget is evaluated", TIMEOUT, budgets.clone(), "all", |budget| {
        let status = budget.and_then(|budget| budget.status.as_ref());
        status.is_some_and(|status| status.observed_generation.is_some() && status.disruptions_allowed == 0)
    })
    .await?;
    lab.kill_node("node-3", NodeTaints::Set).await?;
    let planned = plan(lab, spec, &[]).await?;
    let (effect, reason) = planned.vm("evicted");
    let is_refused = reason.contains("PodDisruptionBudget default/all") || reason.contains("Node node-3 is not ready");
    ensure!(effect == "stayOutdated" && is_refused, "{effect} {reason}");
    let warnings = planned.object["warnings"].to_string();
    ensure!(warnings.contains("Node node-3 is not ready: virt-handler keeps its version there"), "{warnings}");
    ensure!(planned.code == 0, "the upgrade does not wait for them: {:?}", planned.blockers());
    lab.revive_node("node-3").await?;
    budgets.delete("all", &DeleteParams::default()).await?;
    Ok(())
}

/// The planned objects, and no others, were created, changed and deleted, and the planned pods, and no others, were replaced.
async fn the_objects_and_pods_are_as_planned(lab: &Lab, planned: &Planned, before: &State) -> Result<()> {
    let exists = async |(kind, namespace, name): &(GroupVersionKind, Option<String>, String)| -> Result<bool> {
        let resource = ApiResource::from_gvk(kind);
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(lab.client(), namespace, &resource),
            None => Api::all_with(lab.client(), &resource),
        };
        Ok(api.get_metadata_opt(name).await?.is_some())
    };
    // By their full names, which snapshots do not have for each object.
    for object in planned.written("create") {
        ensure!(exists(&object).await? != is_temporary(&object.2), "planned to create {object:?}");
    }
    for object in planned.written("delete") {
        ensure!(!exists(&object).await?, "planned to delete {object:?}");
    }

    let after = State::of(lab).await?;
    let comparison = compare(&before.objects, &after.objects);
    let (created, deleted) = (planned.keys(&["create"]), planned.keys(&["delete"]));
    let mut changed = &planned.keys(&["update", "restart"]) - &created;
    // A new object with the key of a deleted one.
    changed.extend(created.intersection(&deleted).cloned());
    require_equal("created", &(&created - &deleted), comparison.extra)?;
    require_equal("deleted", &(&deleted - &created), comparison.missing)?;
    // A plan does not contain the status of the resource.
    let differing = comparison.differing.into_keys().filter(|key| key != KUBEVIRT && !is_strategy(key));
    require_equal("changed", &changed, differing)?;

    let pods = planned.rollout("restarts").iter().filter_map(|restart| restart["pods"].as_array()).flatten();
    let pods = pods.filter_map(Value::as_str).map(ToOwned::to_owned).collect();
    let replaced = before.pods.difference(&after.pods).filter_map(|pod| Some(pod.split_once(' ')?.0.to_owned()));
    require_equal("replaced", &pods, replaced)
}

fn require_equal(what: &str, planned: &BTreeSet<String>, found: impl IntoIterator<Item = String>) -> Result<()> {
    let found: BTreeSet<String> = found.into_iter().collect();
    let (missing, extra) = (planned - &found, &found - planned);
    ensure!(missing.is_empty() && extra.is_empty(), "{what}: planned and not done {missing:?}, not planned {extra:?}");
    Ok(())
}

/// virt-controller updates VMs when the upgrade is complete. The VM that stays comes last: virt-controller has tried to evict
/// it together with the other one.
async fn the_vms_are_as_planned(lab: &Lab, planned: &Planned, before: &State) -> Result<()> {
    let [migrated, evicted, outdated] = ["migrate", "evict", "stayOutdated"].map(|effect| planned.vms(effect));
    ensure!((migrated.len(), evicted.len(), outdated.len()) == (1, 1, 1), "{:?}", planned.rollout("vms"));
    let is_same = |vmi: &DynamicObject| before.vmis.get(&vmi.name_any()) == Some(&vmi.uid());
    for name in &migrated {
        lab.wait("the VM is migrated", TIMEOUT, vmis(lab), name, |vmi| {
            vmi.is_some_and(|vmi| {
                vmi.data.pointer("/status/migrationState/completed") == Some(&json!(true)) && is_same(vmi)
            })
        })
        .await?;
    }
    for name in &evicted {
        lab.wait("the VM is evicted and started again", TIMEOUT, vmis(lab), name, |vmi| {
            vmi.is_some_and(|vmi| text(vmi, "/status/phase") == "Running" && !is_same(vmi))
        })
        .await?;
    }
    for name in &outdated {
        lab.wait("the VM stays outdated", TIMEOUT, vmis(lab), name, |vmi| {
            vmi.is_some_and(|vmi| {
                let is_outdated = vmi.labels().contains_key("kubevirt.io/outdatedLauncherImage");
                is_outdated && is_same(vmi) && text(vmi, "/status/phase") == "Running"
            })
        })
        .await?;
    }
    let found = migrations(lab).list(&ListParams::default()).await?;
    let found: BTreeSet<String> = found.iter().map(|migration| text(migration, "/spec/vmiName")).collect();
    ensure!(found.iter().eq(&migrated), "migrated {found:?}");
    Ok(())
}

async fn another_release_is_planned_from_a_file_or_is_unknown(labs: Arc<SharedLabs>) -> Result<()> {
    const TAG: &str = "v1.8.4-rehearsed";
    let lab = labs.ours(&program()).await?;
    let spec = json!({"imageTag": TAG});
    let planned = plan(&lab, &spec, &[]).await?;
    ensure!(planned.code == 2 && planned.object["result"]["unknown"] == json!(true), "{}", planned.object);
    let warnings = planned.object["warnings"].to_string();
    ensure!(warnings.contains("the changes are unknown") && warnings.contains("--strategy"), "{warnings}");
    let mut strategy = serde_json::to_value(only_strategy(&lab).await?)?;
    strategy["metadata"]["annotations"]["kubevirt.io/install-strategy-version"] = json!(TAG);
    let file = lab.folder().join("strategy.json");
    std::fs::write(&file, strategy.to_string())?;
    let option = PathBuf::from("--strategy");
    let planned = plan(&lab, &spec, &[&option, &file]).await?;
    ensure!(planned.code == 0, "{} {:?}", planned.code, planned.blockers());
    ensure!(planned.object["rollout"]["toVersion"] == json!(TAG), "{}", planned.object["rollout"]);
    let roles: Api<ClusterRole> = Api::all(lab.client());
    let count = roles.list(&ListParams::default().labels("app.kubernetes.io/managed-by=virt-operator")).await?;
    let planned_roles = planned.written("update").into_iter().filter(|(kind, ..)| kind.kind == "ClusterRole").count();
    ensure!(planned_roles == count.items.len(), "the version of every object changes: {planned_roles}");
    Ok(())
}
