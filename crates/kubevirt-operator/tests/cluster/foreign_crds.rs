//! The operator's CRDs next to those of Viti Stack, which has kinds in the same group.

use std::sync::Arc;

use anyhow::{Result, ensure};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{Api, api::DeleteParams};
use serde_json::{Value, json};
use vitivirt_lab::{
    Lab, LabOptions,
    harness::{SharedLabs, Suite},
    manifests,
};
use vitivirt_runtime::lease::message::ACQUIRED;

use crate::{
    machine_test::{MACHINE_PATIENCE, create_crds},
    packages::repository_path,
    poll::poll_until,
    replica::{PATIENCE, grant_permissions, start},
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; the_crds_are_served_next_to_those_of_viti_stack_and_foreign_ones_are_refused);
}

/// A CRD with the names that Viti Stack uses.
fn viti_stack_crd(kind: &str, plural: &str, short_names: &[&str]) -> Value {
    let singular = kind.to_lowercase();
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.vitistack.io")},
        "spec": {
            "group": "vitistack.io", "scope": "Namespaced",
            "names": {"kind": kind, "listKind": format!("{kind}List"), "plural": plural, "singular": singular, "shortNames": short_names},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object",
                "properties": {"spec": {"type": "object", "properties": {"machineClass": {"type": "string"}}}},
            }}}],
        },
    })
}

const OURS: [&str; 2] = ["machines.vitistack.io", "networkconfigurations.vitistack.io"];
const THEIRS: [&str; 2] = ["machineclasses.vitistack.io", "vitistacks.vitistack.io"];

async fn the_crds_are_served_next_to_those_of_viti_stack_and_foreign_ones_are_refused(
    _: Arc<SharedLabs>,
) -> Result<()> {
    let lab = Box::pin(Lab::start(LabOptions::default())).await?;
    let crds: Api<CustomResourceDefinition> = Api::all(lab.client());
    let theirs =
        [viti_stack_crd("MachineClass", "machineclasses", &["mc"]), viti_stack_crd("Vitistack", "vitistacks", &["vs"])];
    let is_established = |crd: Option<&CustomResourceDefinition>| {
        let conditions = crd.and_then(|crd| crd.status.as_ref()?.conditions.as_ref());
        conditions.is_some_and(|all| all.iter().any(|have| have.type_ == "Established" && have.status == "True"))
    };
    for ours_first in [true, false] {
        if ours_first {
            create_crds(&lab).await?;
            manifests::create(&lab.client(), &theirs).await?;
        } else {
            manifests::create(&lab.client(), &theirs).await?;
            create_crds(&lab).await?;
        }
        for name in OURS.into_iter().chain(THEIRS) {
            lab.wait("an established CRD", MACHINE_PATIENCE, crds.clone(), name, is_established).await?;
        }
        for name in OURS.into_iter().chain(THEIRS) {
            crds.delete(name, &DeleteParams::default()).await?;
            lab.wait("the deletion", MACHINE_PATIENCE, crds.clone(), name, |crd| crd.is_none()).await?;
        }
    }

    manifests::create(&lab.client(), &[viti_stack_crd("Machine", "machines", &["m"])]).await?;
    lab.wait("an established CRD", MACHINE_PATIENCE, crds.clone(), OURS[0], is_established).await?;
    let created = lab.kubectl(&["create", "-f", &repository_path("config/crd")]).await;
    let refusal = created.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(refusal.contains(r#""machines.vitistack.io" already exists"#), "kubectl create replaced a CRD: {refusal}");
    grant_permissions(&lab, "foreign-crds").await?;
    let operator = start(&lab, "foreign-crds", false).await?;
    let expected = ["waiting for CRDs of this operator", "machines.vitistack.io belongs to another product"];
    let is_refused = || async {
        let log = operator.log_text();
        Ok(log.lines().any(|line| expected.iter().all(|part| line.contains(part))))
    };
    poll_until(PATIENCE, is_refused, || format!("the operator refuses the CRD: {}", operator.log_text())).await?;
    let (status, text) = operator.get(8081, "/readyz").await?;
    ensure!(status != 200 && text.contains("CRDs that belong to this operator"), "{status}: {text}");
    ensure!(operator.get(8081, "/healthz").await?.0 == 200, "an operator that waits is healthy");

    // It continues when the CRD is replaced.
    crds.delete(OURS[0], &DeleteParams::default()).await?;
    lab.wait("the deletion", MACHINE_PATIENCE, crds.clone(), OURS[0], |crd| crd.is_none()).await?;
    create_crds(&lab).await?;
    operator.wait_for_message(ACQUIRED, PATIENCE).await?;

    // It ends when the CRD is replaced again.
    crds.delete(OURS[0], &DeleteParams::default()).await?;
    lab.wait("the deletion", MACHINE_PATIENCE, crds.clone(), OURS[0], |crd| crd.is_none()).await?;
    manifests::create(&lab.client(), &[viti_stack_crd("Machine", "machines", &["m"])]).await?;
    operator.wait_for_message("CRD was replaced by that of another product", PATIENCE).await?;
    operator.wait_for_message("stopped", PATIENCE).await.map(|_| ())
}
