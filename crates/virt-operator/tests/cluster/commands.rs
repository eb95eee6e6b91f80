//! Commands that look at a cluster, and what one release tells another.

use std::collections::BTreeMap;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};
use vitivirt_lab::harness::Suite;
use vitivirt_lab::{KubeVirtInstaller, Lab, LabOptions, VirtOperator};

use crate::world::{NAMESPACE, PATIENCE, kubevirts, program, text};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("a_plan_shows_what_an_edit_would_do_and_does_nothing", |labs| async move {
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
        ensure!(restarts == 1, "only virt-api has another command: {planned:?}");
        let writes: Vec<_> = lab.audit()?.into_iter().skip(before).filter(vitivirt_lab::Record::is_write).collect();
        ensure!(writes.iter().all(|record| record.user != "admin"), "a plan writes nothing: {writes:?}");
        Ok(())
    });

    suite.test("the_reference_installs_what_ours_tells_and_the_other_way_round", |_| async move {
        // Every image of this name runs the reference's operator, whatever its tag: it is asked by ours.
        let lab = Lab::start(LabOptions::default()).await?;
        lab.create_virt_operator(&VirtOperator::ours(program())).await?;
        lab.wait_for_virt_operator(PATIENCE).await?;
        let other = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
            "spec": {"imageTag": "v1.8.4-other"},
        });
        kubevirts(&lab).create(&PostParams::default(), &serde_json::from_value(other)?).await?;
        let deployed = lab
            .wait("another release, deployed", PATIENCE, kubevirts(&lab), "kubevirt", |kubevirt| {
                kubevirt.is_some_and(|kubevirt| text(kubevirt, "/status/phase") == "Deployed")
            })
            .await?
            .context("the resource is gone")?;
        ensure!(text(&deployed, "/status/observedKubeVirtVersion") == "v1.8.4-other", "{:?}", deployed.data);
        lab.stop().await?;

        // Ours tells, by the same means that the reference's Job would use; the reference takes it as its own.
        let lab = Lab::start(LabOptions {
            kubevirt: KubeVirtInstaller::Reference { custom_resource: None },
            ..LabOptions::default()
        })
        .await?;
        let theirs = strategies(&lab).await?;
        let [told] = theirs.as_slice() else { anyhow::bail!("{} strategies", theirs.len()) };
        let config = text(&kubevirts(&lab).get("kubevirt").await?, "/status/targetDeploymentConfig");
        let maps: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
        maps.delete(told.metadata.name.as_deref().unwrap_or_default(), &Default::default()).await?;
        let output = tokio::process::Command::new(program())
            .args(["--dump-install-strategy", "--kubeconfig"])
            .arg(lab.kubeconfig())
            .env("TARGET_DEPLOYMENT_CONFIG", &config)
            .stdin(Stdio::null())
            .output()
            .await?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let ours = strategies(&lab).await?;
        let [ours] = ours.as_slice() else { anyhow::bail!("{} strategies", ours.len()) };
        ensure!(ours.metadata.annotations == told.metadata.annotations, "{:?}", ours.metadata);
        ensure!(ours.metadata.labels == told.metadata.labels, "{:?}", ours.metadata);
        lab.stop().await
    });
}

async fn strategies(lab: &Lab) -> Result<Vec<ConfigMap>> {
    let maps: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
    Ok(maps.list(&ListParams::default().labels("kubevirt.io/install-strategy")).await?.items)
}

type Planned = BTreeMap<String, (String, Vec<String>)>;

/// By kind and name: the action, and the fields that differ.
async fn plan(lab: &Lab, spec: &Value) -> Result<Planned> {
    let live = kubevirts(lab).get("kubevirt").await?;
    let mut merged = live.data.get("spec").cloned().unwrap_or_default();
    json_patch::merge(&mut merged, spec);
    let file = lab.folder().join("plan.yaml");
    let kubevirt = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": NAMESPACE}, "spec": merged,
    });
    std::fs::write(&file, kubevirt.to_string())?;
    let output = tokio::process::Command::new(program())
        .args(["plan".as_ref(), "-o".as_ref(), "json".as_ref(), "-f".as_ref(), file.as_os_str()])
        .args(["--kubeconfig".as_ref(), lab.kubeconfig().as_os_str()])
        .env("VIRT_OPERATOR_IMAGE", "quay.io/kubevirt/virt-operator:v1.8.4")
        .stdin(Stdio::null())
        .output()
        .await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let planned: Value = serde_json::from_slice(&output.stdout)?;
    let part = |write: &Value, name: &str| write[name].as_str().unwrap_or_default().to_owned();
    let fields = |write: &Value| {
        let fields = write["fields"].as_array().into_iter().flatten();
        fields.filter_map(|field| field.as_str().map(ToOwned::to_owned)).collect()
    };
    let writes = planned["writes"].as_array().into_iter().flatten();
    Ok(writes
        .map(|write| {
            (format!("{} {}", part(write, "kind"), part(write, "name")), (part(write, "action"), fields(write)))
        })
        .collect())
}
