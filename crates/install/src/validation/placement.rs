//! Where components are asked to run. Whether selectors, affinities and tolerations are well formed is for the API server
//! to say: it is shown an object that has them, and makes nothing of it.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, DaemonSetSpec, Deployment, DeploymentSpec},
        core::v1::{Container, PodSpec, PodTemplateSpec},
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta},
};
use vitivirt_api::kubevirt::{ComponentConfig, KubeVirt, NodePlacement};

use super::{Cause, Refusal};

const NAME: &str = "placement-validation-webhook";
const LABEL: &str = "kubevirt.io/choose-me";
/// Where the server finds what is asked for.
const POD: &str = "spec.template.spec.";

/// Something to create as a dry run, in the namespace of the resource.
#[derive(Clone, Debug, PartialEq)]
pub struct DryRun {
    pub field: &'static str,
    pub template: Template,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Template {
    Deployment(Box<Deployment>),
    DaemonSet(Box<DaemonSet>),
}

impl DryRun {
    /// What the server said about a field of the object, said about the field of the resource.
    pub fn refusal(&self, field: &str, message: &str) -> Refusal {
        let field = match field.strip_prefix(POD) {
            Some(rest) => format!("{}.{rest}", self.field),
            None => self.field.to_owned(),
        };
        Refusal::new(Cause::Invalid, field, format!("cannot be used for pods: {message}"))
    }
}

pub(super) fn dry_runs(old: &KubeVirt, new: &KubeVirt) -> Vec<DryRun> {
    let infra = asked(old.spec.infra.as_ref(), new.spec.infra.as_ref()).map(|placement| DryRun {
        field: "spec.infra.nodePlacement",
        template: Template::Deployment(Box::new(Deployment {
            metadata: metadata(),
            spec: Some(DeploymentSpec {
                replicas: Some(1),
                selector: selector(),
                template: pod(placement),
                ..DeploymentSpec::default()
            }),
            ..Deployment::default()
        })),
    });
    let workloads = asked(old.spec.workloads.as_ref(), new.spec.workloads.as_ref()).map(|placement| DryRun {
        field: "spec.workloads.nodePlacement",
        template: Template::DaemonSet(Box::new(DaemonSet {
            metadata: metadata(),
            spec: Some(DaemonSetSpec { selector: selector(), template: pod(placement), ..DaemonSetSpec::default() }),
            ..DaemonSet::default()
        })),
    });
    infra.into_iter().chain(workloads).collect()
}

fn asked<'a>(old: Option<&ComponentConfig>, new: Option<&'a ComponentConfig>) -> Option<&'a NodePlacement> {
    new.filter(|_| old != new)?.node_placement.as_ref()
}

/// The server makes a name of it, so that no object in the cluster can be in the way.
fn metadata() -> ObjectMeta {
    ObjectMeta { generate_name: Some(format!("{NAME}-")), ..ObjectMeta::default() }
}

fn labels() -> Option<BTreeMap<String, String>> {
    Some(BTreeMap::from([(LABEL.to_owned(), String::new())]))
}

fn selector() -> LabelSelector {
    LabelSelector { match_labels: labels(), ..LabelSelector::default() }
}

fn pod(placement: &NodePlacement) -> PodTemplateSpec {
    let container =
        Container { name: "nothing".to_owned(), image: Some("test.only:latest".to_owned()), ..Container::default() };
    PodTemplateSpec {
        metadata: Some(ObjectMeta { labels: labels(), ..ObjectMeta::default() }),
        spec: Some(PodSpec {
            containers: vec![container],
            node_selector: placement.node_selector.clone(),
            affinity: placement.affinity.clone(),
            tolerations: placement.tolerations.clone(),
            ..PodSpec::default()
        }),
    }
}
