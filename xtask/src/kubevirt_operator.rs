//! Installs and starts kubevirt-operator in a lab, from config/ and with its own service account.

use std::path::PathBuf;

use anyhow::{Context, Result};
use kube::{
    Api,
    api::{ApiResource, DynamicObject},
};
use vitivirt_api::IMAGE_NAME;
use vitivirt_lab::{Lab, OperatorProcess, OperatorProcessOptions, OwnProgram};

use crate::programs;

const NAMESPACE: &str = "kubevirt-operator-system";
const ACCOUNT: &str = "kubevirt-operator-controller-manager";

/// Creates the objects of config/crd and config/rbac.
pub(crate) async fn install(lab: &Lab) -> Result<()> {
    for folder in ["config/crd", "config/rbac"] {
        let folder = programs::root().join(folder);
        let files = std::fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))?;
        // Not the Kustomization, which is no object of a cluster.
        let is_manifest = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "yaml");
        let mut files: Vec<_> = files.flatten().map(|file| file.path()).filter(is_manifest).collect();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
            lab.create(&text).await.with_context(|| format!("creating {}", file.display()))?;
        }
    }
    Ok(())
}

/// The Deployment and the Service of config/manager.
pub(crate) fn deployment() -> Result<String> {
    let file = programs::root().join("config/manager/manager.yaml");
    std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))
}

/// Both programs, for the pods with their image.
pub(crate) fn own_programs() -> Result<Vec<OwnProgram>> {
    let folder = programs::target_dir()?.join("debug");
    let program = |name: &str| OwnProgram { image: IMAGE_NAME.to_owned(), file: folder.join(name) };
    Ok(vec![program("kubevirt-operator"), program("virt-operator")])
}

pub(crate) fn machine_resource() -> ApiResource {
    ApiResource {
        group: "vitistack.io".to_owned(),
        version: "v1alpha1".to_owned(),
        api_version: "vitistack.io/v1alpha1".to_owned(),
        kind: "Machine".to_owned(),
        plural: "machines".to_owned(),
    }
}

pub(crate) fn machines(lab: &Lab, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(lab.client(), namespace, &machine_resource())
}

/// Starts the operator that was built with `profile` (debug or release).
pub(crate) async fn start(lab: &Lab, profile: &str) -> Result<OperatorProcess> {
    start_through(lab, profile, false).await
}

/// Like [`start`], optionally through the fault proxy.
pub(crate) async fn start_through(lab: &Lab, profile: &str, through_proxy: bool) -> Result<OperatorProcess> {
    let environment = [
        ("NAMESPACE", NAMESPACE),
        ("METRICS_BIND_ADDRESS", "{address}:8080"),
        ("HEALTH_PROBE_BIND_ADDRESS", "{address}:8081"),
    ];
    lab.run(OperatorProcessOptions {
        file: programs::folder(profile)?.join("kubevirt-operator"),
        namespace: NAMESPACE.to_owned(),
        service_account: ACCOUNT.to_owned(),
        arguments: vec!["run".to_owned()],
        environment: environment.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        through_proxy,
    })
    .await
}
