//! The manifests of the operator: the objects that must exist before it runs, and its Deployment. The operator installs
//! everything else (`installation`), including the Service of its webhooks: without an installation there are no
//! webhooks.

mod access;
mod deployment;

use k8s_openapi::api::{core::v1::Namespace, scheduling::v1::PriorityClass};
use serde::Serialize;
use serde_json::Value;
use vitivirt_api::{Failure, reason};

use crate::{crds, metadata::cluster_scoped, names::label, workloads::PRIORITY_CLASS};

/// The settings of the manifests.
#[derive(Clone, Debug)]
pub struct Manifests {
    /// The namespace of the operator and of KubeVirt.
    pub namespace: String,
    /// The image of the operator. The images of KubeVirt's components are not derived from it.
    pub image: String,
    /// Secrets with the credentials of the image's registry.
    pub image_pull_secrets: Vec<String>,
}

impl Manifests {
    /// Every object, in the order of creation.
    pub fn objects(&self) -> Result<Vec<Value>, Failure> {
        let namespace = &self.namespace;
        Ok(vec![
            json(&own_namespace(namespace))?,
            crds::KUBEVIRT.object()?,
            json(&priority_class())?,
            json(&access::administrator_role())?,
            json(&access::service_account(namespace))?,
            json(&access::role(namespace))?,
            json(&access::role_binding(namespace))?,
            json(&access::cluster_role())?,
            json(&access::cluster_role_binding(namespace))?,
            json(&deployment::deployment(namespace, &self.image, &self.image_pull_secrets))?,
        ])
    }
}

fn json(object: &impl Serialize) -> Result<Value, Failure> {
    serde_json::to_value(object)
        .map_err(|error| Failure::bug(reason::BAD_REQUEST, format!("an object cannot be serialized: {error}")))
}

/// virt-handler and virt-launcher need the pod security level `privileged`.
fn own_namespace(name: &str) -> Namespace {
    let labels = [(label::APP, ""), ("pod-security.kubernetes.io/enforce", "privileged")];
    Namespace { metadata: cluster_scoped(name, &labels), ..Namespace::default() }
}

fn priority_class() -> PriorityClass {
    PriorityClass {
        metadata: cluster_scoped(PRIORITY_CLASS, &[]),
        // The highest value that is not reserved for Kubernetes.
        value: 1_000_000_000,
        description: Some("For the components of KubeVirt and nothing else.".to_owned()),
        global_default: Some(false),
        ..PriorityClass::default()
    }
}
