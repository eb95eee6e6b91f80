//! Commands that read a cluster, and the exchange of install strategies between releases.

use std::{
    collections::BTreeMap,
    process::{Output, Stdio},
    sync::Arc,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::process::Command;
use vitivirt_lab::{
    KubeVirtInstaller, Lab, LabOptions, Record, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::support::{NAMESPACE, TIMEOUT, condition, kubevirts, operator_requests, program, text, touch_kubevirt};

pub(crate) fn add(suite: &mut Suite) {
    suite.test(
        "a_plan_shows_the_effect_of_an_edit_and_writes_nothing",
        a_plan_shows_the_effect_of_an_edit_and_writes_nothing,
    );
    suite.test(
        "another_release_is_installed_from_the_strategy_that_upstream_dumps",
        another_release_is_installed_from_the_strategy_that_upstream_dumps,
    );
    suite.test(
        "a_dumped_strategy_has_the_metadata_that_upstream_gives_it",
        a_dumped_strategy_has_the_metadata_that_upstream_gives_it,
    );
}

async fn a_plan_shows_the_effect_of_an_edit_and_writes_nothing(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.ours(&program()).await?;
    let unchanged = plan(&lab, &json!({})).await?;
    ensure!(unchanged.iter().all(|(_, (action, _))| action != "restart"), "{unchanged:?}");
    let before = lab.audit()?.len();
    let flags = json!({"customizeComponents": {"flags": {"api": {"v": "5"}}}});
    let planned = plan(&lab, &flags).await?;
    let (action, fields) = planned.get("Deployment kubevirt/virt-api").context("virt-api is not in the plan")?;
    ensure!(action == "restart", "{planned:?}");
    ensure!(fields.iter().any(|field| field.contains("containers[0].command")), "{fields:?}");
    let restarts = planned.values().filter(|(action, _)| action == "restart").count();
    ensure!(restarts == 1, "only the command of virt-api changes: {planned:?}");
    let writes: Vec<_> = lab.audit()?.into_iter().skip(before).filter(Record::is_write).collect();
    ensure!(writes.iter().all(|record| record.user != "admin"), "the plan command wrote {writes:?}");
    Ok(())
}

async fn another_release_is_installed_from_the_strategy_that_upstream_dumps(_: Arc<SharedLabs>) -> Result<()> {
    // The lab runs the reference operator for every image with this name, whatever its tag. This operator starts it as
    // a Job to get the install strategy of the other release.
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    let other = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
        "spec": {"imageTag": "v1.8.4-other"},
    });
    kubevirts(&lab).create(&PostParams::default(), &serde_json::from_value(other)?).await?;
    let deployed = lab
        .wait("another release is deployed", TIMEOUT, kubevirts(&lab), "kubevirt", |kubevirt| {
            kubevirt.is_some_and(|kubevirt| text(kubevirt, "/status/phase") == "Deployed")
        })
        .await?
        .context("KubeVirt resource not found")?;
    ensure!(text(&deployed, "/status/observedKubeVirtVersion") == "v1.8.4-other", "{:?}", deployed.data);
    the_job_had_only_the_permissions_that_it_needs(&lab)?;
    the_strategy_is_read_once_and_may_be_lost(&lab).await?;
    lab.stop().await
}

/// Fault 22: upstream virt-operator runs the Job with its own permissions.
fn the_job_had_only_the_permissions_that_it_needs(lab: &Lab) -> Result<()> {
    let is_of_job = |record: &Record| record.user.contains(":kubevirt:kubevirt-") && record.user.ends_with("-job");
    let requests: Vec<Record> = lab.audit()?.into_iter().filter(is_of_job).collect();
    let is_create = |record: &Record| (record.verb.as_str(), record.resource.as_str()) == ("create", "configmaps");
    ensure!(requests.iter().any(is_create), "the Job did not use its own service account");
    let refused: Vec<&Record> = requests.iter().filter(|record| record.code == Some(403)).collect();
    ensure!(refused.is_empty(), "the Job needs more permissions: {refused:?}");
    Ok(())
}

async fn the_strategy_is_read_once_and_may_be_lost(lab: &Lab) -> Result<()> {
    let strategy = only_strategy(lab).await?.metadata.name.unwrap_or_default();
    let reads = || -> Result<usize> {
        let requests = operator_requests(lab)?;
        Ok(requests.iter().filter(|record| record.verb == "get" && record.name == strategy).count())
    };
    let maps: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
    maps.delete(&strategy, &Default::default()).await?;
    // Every touch starts a reconcile. The edit of the resource shows that a later one is done.
    touch_kubevirt(&kubevirts(lab), 5).await?;
    let edit = json!({"spec": {"configuration": {"network": {"defaultNetworkInterface": "masquerade"}}}});
    kubevirts(lab).patch("kubevirt", &PatchParams::default(), &Patch::Merge(edit)).await?;
    let ended = |kubevirt: Option<&DynamicObject>| {
        kubevirt.is_some_and(|kubevirt| {
            let observed = kubevirt.data.pointer("/status/observedGeneration").and_then(Value::as_i64);
            let lost = condition(kubevirt, "Available").is_some_and(|(status, ..)| status != "True");
            observed == kubevirt.metadata.generation || lost
        })
    };
    let kubevirt = lab.wait("the edit is installed", TIMEOUT, kubevirts(lab), "kubevirt", ended).await?;
    let available = kubevirt.as_ref().and_then(|kubevirt| condition(kubevirt, "Available"));
    ensure!(available.as_ref().is_some_and(|(status, ..)| status == "True"), "without its strategy: {available:?}");
    ensure!(reads()? == 1, "the operator read the strategy {} times", reads()?);
    Ok(())
}

/// The reference operator recognizes its own install strategy by labels and annotations. This runs the command that its
/// Job would run, and compares the result with its own.
async fn a_dumped_strategy_has_the_metadata_that_upstream_gives_it(_: Arc<SharedLabs>) -> Result<()> {
    let reference = KubeVirtInstaller::Reference { custom_resource: None };
    let lab = Lab::start(LabOptions { kubevirt: reference, ..LabOptions::default() }).await?;
    let reference = only_strategy(&lab).await?;
    let config = text(&kubevirts(&lab).get("kubevirt").await?, "/status/targetDeploymentConfig");
    let maps: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
    maps.delete(reference.metadata.name.as_deref().unwrap_or_default(), &Default::default()).await?;
    let mut dump = Command::new(program());
    dump.args(["--dump-install-strategy", "--kubeconfig"]).arg(lab.kubeconfig());
    dump.env("TARGET_DEPLOYMENT_CONFIG", &config);
    run(dump).await?;
    let ours = only_strategy(&lab).await?;
    ensure!(ours.metadata.annotations == reference.metadata.annotations, "{:?}", ours.metadata);
    ensure!(ours.metadata.labels == reference.metadata.labels, "{:?}", ours.metadata);
    lab.stop().await
}

/// The ConfigMap with the install strategy. It fails if there is not exactly one.
pub(crate) async fn only_strategy(lab: &Lab) -> Result<ConfigMap> {
    let maps: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
    let strategies = maps.list(&ListParams::default().labels("kubevirt.io/install-strategy")).await?.items;
    match <[ConfigMap; 1]>::try_from(strategies) {
        Ok([strategy]) => Ok(strategy),
        Err(strategies) => bail!("{} install strategies", strategies.len()),
    }
}

/// Runs a command to its end. It fails if the command does.
async fn run(mut command: Command) -> Result<Output> {
    let output = command.stdin(Stdio::null()).output().await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(output)
}

/// By kind and name of the object: the action, and the fields that differ.
type PlannedWrites = BTreeMap<String, (String, Vec<String>)>;

/// Runs the plan command for the live resource with `spec` merged into it.
async fn plan(lab: &Lab, spec: &Value) -> Result<PlannedWrites> {
    let live = kubevirts(lab).get("kubevirt").await?;
    let mut merged = live.data.get("spec").cloned().unwrap_or_default();
    json_patch::merge(&mut merged, spec);
    let file = lab.folder().join("plan.yaml");
    let kubevirt = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": NAMESPACE}, "spec": merged,
    });
    std::fs::write(&file, kubevirt.to_string())?;
    let mut plan = Command::new(program());
    plan.args(["plan", "-o", "json", "-f"]).arg(&file).arg("--kubeconfig").arg(lab.kubeconfig());
    plan.env("VIRT_OPERATOR_IMAGE", "quay.io/kubevirt/virt-operator:v1.8.4");
    let planned: Value = serde_json::from_slice(&run(plan).await?.stdout)?;
    let part = |write: &Value, name: &str| write[name].as_str().unwrap_or_default().to_owned();
    let fields = |write: &Value| {
        let changes = write["changes"].as_array().into_iter().flatten();
        changes.filter_map(|change| change["field"].as_str().map(ToOwned::to_owned)).collect()
    };
    let name = |write: &Value| match write["namespace"].as_str() {
        Some(namespace) => format!("{} {namespace}/{}", part(write, "kind"), part(write, "name")),
        None => format!("{} {}", part(write, "kind"), part(write, "name")),
    };
    let writes = planned["objects"][0]["writes"].as_array().into_iter().flatten();
    Ok(writes.map(|write| (name(write), (part(write, "action"), fields(write)))).collect())
}
