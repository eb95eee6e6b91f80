//! The input of one comparison: a KubeVirt resource, the extensions of the cluster, and the operator's environment.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};
use vitivirt_lab::Lab;

use super::{ParityExtension, file_name};
use crate::{lab_commands, programs};

const VARIANTS: &str = "crates/install/tests/variants";

#[derive(Clone, Debug, Serialize)]
pub(super) struct ParityCase {
    pub(super) name: String,
    pub(super) custom_resource: Value,
    #[serde(skip)]
    pub(super) extensions: Vec<ParityExtension>,
    pub(super) environment: Vec<(String, String)>,
}

/// The cases of these files, or of every variant in the repository.
pub(super) fn load_all(
    files: &[PathBuf],
    extensions: &[ParityExtension],
    environment: &[(String, String)],
) -> Result<Vec<ParityCase>> {
    if !files.is_empty() {
        return files.iter().map(|file| load(file, extensions, environment)).collect();
    }
    let folder = programs::root().join(VARIANTS);
    let entries = std::fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.iter().map(|file| load(file, variant_extensions(&file_name(file)), &[])).collect()
}

/// The extensions of the clusters in which the snapshots of `crates/install/tests/reference` were taken.
fn variant_extensions(name: &str) -> &'static [ParityExtension] {
    if name == "monitoring" { &[ParityExtension::Monitoring] } else { &[] }
}

fn load(file: &Path, extensions: &[ParityExtension], environment: &[(String, String)]) -> Result<ParityCase> {
    Ok(ParityCase {
        name: file_name(file),
        custom_resource: lab_commands::read_custom_resource(file)?,
        extensions: extensions.to_vec(),
        environment: environment.to_vec(),
    })
}

impl ParityCase {
    /// Creates everything that must exist before the KubeVirt resource.
    pub(super) async fn prepare(&self, lab: &Lab) -> Result<()> {
        for extension in &self.extensions {
            lab.install(extension.extension()).await?;
            for object in self.prerequisites(*extension) {
                lab.create(&object.to_string()).await?;
            }
        }
        Ok(())
    }

    fn prerequisites(&self, extension: ParityExtension) -> Vec<Value> {
        let field_or = |field: &str, default: &str| {
            let value = self.custom_resource.pointer(&format!("/spec/{field}")).and_then(Value::as_str);
            value.unwrap_or(default).to_owned()
        };
        match extension {
            ParityExtension::Monitoring => {
                let namespace = field_or("monitorNamespace", "monitoring");
                let account = json!({"name": field_or("monitorAccount", "prometheus-k8s"), "namespace": namespace});
                let monitors = field_or("serviceMonitorNamespace", &namespace);
                let namespace_object =
                    |name: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
                vec![
                    namespace_object(&namespace),
                    namespace_object(&monitors),
                    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}),
                ]
            }
            // Every OpenShift cluster has it, and the operator removes KubeVirt's accounts from it.
            ParityExtension::Openshift => vec![json!({
                "apiVersion": "security.openshift.io/v1",
                "kind": "SecurityContextConstraints",
                "metadata": {"name": "privileged"},
                "allowPrivilegedContainer": true,
                "users": ["system:admin"],
            })],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_files_all_variants_are_loaded() {
        let cases = load_all(&[], &[], &[]).unwrap();
        let names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names, ["combined", "customize", "default", "gates", "images", "monitoring", "placement"]);
        let monitoring = cases.iter().find(|case| case.name == "monitoring").unwrap();
        assert_eq!(monitoring.extensions, [ParityExtension::Monitoring]);
        assert_eq!(monitoring.prerequisites(ParityExtension::Monitoring)[2]["metadata"]["namespace"], "monitoring");
    }
}
