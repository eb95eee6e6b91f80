//! What is installed on both sides: a KubeVirt resource, the cluster that it needs, and the operator's environment.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};
use vitivirt_lab::Lab;

use super::{Offer, file_name};
use crate::{lab_commands, programs};

const VARIANTS: &str = "crates/install/tests/variants";

#[derive(Clone, Debug, Serialize)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) custom_resource: Value,
    #[serde(skip)]
    pub(super) offers: Vec<Offer>,
    pub(super) environment: Vec<(String, String)>,
}

/// From these files, or every variant of the repository.
pub(super) fn all(files: &[PathBuf], offers: &[Offer], environment: &[(String, String)]) -> Result<Vec<Case>> {
    if !files.is_empty() {
        return files.iter().map(|file| read(file, offers, environment)).collect();
    }
    let folder = programs::root().join(VARIANTS);
    let entries = std::fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.iter().map(|file| read(file, variant_offers(&file_name(file)), &[])).collect()
}

/// What the snapshots of `crates/install/tests/reference` were taken on.
fn variant_offers(name: &str) -> &'static [Offer] {
    if name == "monitoring" { &[Offer::Monitoring] } else { &[] }
}

fn read(file: &Path, offers: &[Offer], environment: &[(String, String)]) -> Result<Case> {
    Ok(Case {
        name: file_name(file),
        custom_resource: lab_commands::read_custom_resource(file)?,
        offers: offers.to_vec(),
        environment: environment.to_vec(),
    })
}

impl Case {
    /// What must be in the cluster before the resource is.
    pub(super) async fn prepare(&self, lab: &Lab) -> Result<()> {
        for offer in &self.offers {
            lab.install(offer.extension()).await?;
            for object in self.neighbours(*offer) {
                lab.create(&object.to_string()).await?;
            }
        }
        Ok(())
    }

    fn neighbours(&self, offer: Offer) -> Vec<Value> {
        let said = |field: &str, usually: &str| {
            let value = self.custom_resource.pointer(&format!("/spec/{field}")).and_then(Value::as_str);
            value.unwrap_or(usually).to_owned()
        };
        match offer {
            Offer::Monitoring => {
                let namespace = said("monitorNamespace", "monitoring");
                let account = json!({"name": said("monitorAccount", "prometheus-k8s"), "namespace": namespace});
                let monitors = said("serviceMonitorNamespace", &namespace);
                let place = |name: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
                vec![
                    place(&namespace),
                    place(&monitors),
                    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}),
                ]
            }
            // Every OpenShift has it, and the operator takes KubeVirt's accounts out of it.
            Offer::Openshift => vec![json!({
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
    fn the_variants_are_the_repositorys() {
        let cases = all(&[], &[], &[]).unwrap();
        let names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names, ["combined", "customize", "default", "gates", "images", "monitoring", "placement"]);
        let monitoring = cases.iter().find(|case| case.name == "monitoring").unwrap();
        assert_eq!(monitoring.offers, [Offer::Monitoring]);
        assert_eq!(monitoring.neighbours(Offer::Monitoring)[2]["metadata"]["namespace"], "monitoring");
    }
}
