//! The labels and annotations that KubeVirt's components have set on nodes.

use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use vitivirt_api::{ObjectKey, Operation, Target, Write};

/// A node with labels or annotations of KubeVirt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkedNode {
    key: ObjectKey,
    uid: String,
    labels: Vec<String>,
    annotations: Vec<String>,
}

impl MarkedNode {
    /// `None` if nothing of KubeVirt is on the node.
    pub fn new(metadata: &ObjectMeta) -> Option<Self> {
        let labels = metadata.labels.iter().flatten();
        let labels = labels.filter(|(key, value)| is_of_kubevirt(key) || is_cpu_manager(key, value));
        let annotations = metadata.annotations.iter().flatten().filter(|(key, _)| is_of_kubevirt(key));
        let node = Self {
            key: ObjectKey::from_metadata(metadata),
            uid: metadata.uid.clone().unwrap_or_default(),
            labels: labels.map(|(key, _)| key.clone()).collect(),
            annotations: annotations.map(|(key, _)| key.clone()).collect(),
        };
        (!node.labels.is_empty() || !node.annotations.is_empty()).then_some(node)
    }

    pub fn name(&self) -> &str {
        self.key.name()
    }

    /// One write, however many labels the node has.
    pub(super) fn remove_marks(&self) -> Write {
        let remove = |field: &'static str| {
            move |key: &String| Operation::remove(format!("/metadata/{field}/{}", Operation::escape(key)))
        };
        let labels = self.labels.iter().map(remove("labels"));
        let operations = labels.chain(self.annotations.iter().map(remove("annotations"))).collect();
        Write::Patch { target: Target::of_kind::<Node>(self.key.clone()), uid: self.uid.clone(), operations }
    }
}

/// virt-handler sets keys in the domains `kubevirt.io` and `*.node.kubevirt.io`. Users set others, such as
/// `node-labeller.kubevirt.io/skip-node`.
fn is_of_kubevirt(key: &str) -> bool {
    let domain = key.split_once('/').map_or("", |(domain, _)| domain);
    domain == "kubevirt.io" || domain.ends_with(".node.kubevirt.io")
}

/// The only label of virt-handler without a domain. Users set it to other values.
fn is_cpu_manager(key: &str, value: &str) -> bool {
    key == "cpumanager" && ["true", "false"].contains(&value)
}
