//! The placement of components. Only the API server can check selectors, affinities and tolerations, so it gets a dry
//! run of an object that contains them.

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
/// The path of the placement in the object of the dry run.
const POD: &str = "spec.template.spec.";

/// An object to create with a server-side dry run, in the namespace of the KubeVirt resource.
#[derive(Clone, Debug, PartialEq)]
pub struct DryRun {
    pub field: &'static str,
    pub object: DryRunObject,
}

#[derive(Clone, Debug, PartialEq)]
pub enum DryRunObject {
    Deployment(Box<Deployment>),
    DaemonSet(Box<DaemonSet>),
}

impl DryRun {
    /// Maps an error of the API server about the dry-run object to a field of the KubeVirt resource.
    pub fn refusal(&self, field: &str, message: &str) -> Refusal {
        let Some(rest) = field.strip_prefix(POD) else {
            return Refusal::new(Cause::Invalid, self.field, format!("invalid placement: {message}"));
        };
        let message = if rest.starts_with("tolerations[") && rest.ends_with("].operator") {
            // Clients search the message for the words of upstream virt-operator, which name the field without an index.
            format!("{}.tolerations.operator in body should be one of the supported values: {message}", self.field)
        } else {
            format!("invalid placement: {message}")
        };
        Refusal::new(Cause::Invalid, format!("{}.{rest}", self.field), message)
    }
}

pub(crate) fn dry_runs(old: &KubeVirt, new: &KubeVirt) -> Vec<DryRun> {
    let infra = changed_placement(old.spec.infra.as_ref(), new.spec.infra.as_ref()).map(|placement| DryRun {
        field: "spec.infra.nodePlacement",
        object: DryRunObject::Deployment(Box::new(Deployment {
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
    let workloads =
        changed_placement(old.spec.workloads.as_ref(), new.spec.workloads.as_ref()).map(|placement| DryRun {
            field: "spec.workloads.nodePlacement",
            object: DryRunObject::DaemonSet(Box::new(DaemonSet {
                metadata: metadata(),
                spec: Some(DaemonSetSpec {
                    selector: selector(),
                    template: pod(placement),
                    ..DaemonSetSpec::default()
                }),
                ..DaemonSet::default()
            })),
        });
    infra.into_iter().chain(workloads).collect()
}

fn changed_placement<'a>(old: Option<&ComponentConfig>, new: Option<&'a ComponentConfig>) -> Option<&'a NodePlacement> {
    new.filter(|_| old != new)?.node_placement.as_ref()
}

/// With `generateName`, so that the name cannot conflict with an existing object.
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
