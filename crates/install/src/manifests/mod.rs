//! What must exist before the operator runs, the operator itself last: nobody else installs these objects. Everything
//! else of an installation is the operator's work (`installation`), as in the release; so is the Service through which
//! the API server asks the operator's own webhooks, because without an installation there are no webhooks.

mod access;
mod deployment;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use serde::Serialize;
use serde_json::Value;
use vitivirt_api::{Failure, reason};

use crate::{crds, metadata::cluster, names::label, workloads::PRIORITY_CLASS};

/// What of it may be chosen.
#[derive(Clone, Debug)]
pub struct Manifests {
    /// Where the operator and KubeVirt run.
    pub namespace: String,
    /// The image of the operator itself. KubeVirt's images do not follow it: they are those of the release.
    pub image: String,
}

impl Manifests {
    /// Every object, in the order in which they can be created.
    pub fn objects(&self) -> Result<Vec<Value>, Failure> {
        let namespace = &self.namespace;
        Ok(vec![
            json(&own_namespace(namespace))?,
            crds::KUBEVIRT.object()?,
            json(&priority_class())?,
            json(&access::role_of_administrators())?,
            json(&access::service_account(namespace))?,
            json(&access::role(namespace))?,
            json(&access::role_binding(namespace))?,
            json(&access::cluster_role())?,
            json(&access::cluster_role_binding(namespace))?,
            json(&deployment::deployment(namespace, &self.image))?,
        ])
    }
}

fn json(object: &impl Serialize) -> Result<Value, Failure> {
    serde_json::to_value(object)
        .map_err(|error| Failure::bug(reason::BAD_REQUEST, format!("an object cannot be written as JSON: {error}")))
}

/// virt-handler and virt-launcher need more than a namespace usually allows.
fn own_namespace(name: &str) -> Namespace {
    let labels = [(label::APP, ""), ("pod-security.kubernetes.io/enforce", "privileged")];
    Namespace { metadata: cluster(name, &labels), ..Namespace::default() }
}

fn priority_class() -> PriorityClass {
    PriorityClass {
        metadata: cluster(PRIORITY_CLASS, &[]),
        // The highest that is not reserved for Kubernetes itself.
        value: 1_000_000_000,
        description: Some("For the components of KubeVirt and nothing else.".to_owned()),
        global_default: Some(false),
        ..PriorityClass::default()
    }
}
